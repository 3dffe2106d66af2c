"""Error tables as gradients might have them: steep and flat spectra, light and heavy layers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from fxcomp.compressors.topk import counts
from fxcomp.error_tables import ErrorRow, ErrorTable
from fxcomp.error_tables.table import CODECS, LARGEST, LOW_RANK

_CODECS = {"bf16": 2.7e-6, "fp16": 1e-7, "int8": 5e-5, "int4": 0.013, "int2": 0.2}


def drawn_table(shapes: Mapping[str, tuple[int, ...]], seed: int) -> ErrorTable:
    """Draw a table; layers' squares differ by up to a thousand."""
    draw = random.Random(seed)
    return ErrorTable({name: _row(shape, draw) for name, shape in shapes.items()})


def _row(shape: tuple[int, ...], draw: random.Random) -> ErrorRow:
    size, tail, spectrum, rough = math.prod(shape), draw.uniform(0.1, 0.9), draw.uniform(0.1, 1.5), draw.uniform(0.3, 3)
    kept = [counts((size,), topk.ratio)[0] / size for topk in LARGEST]
    densities = [max(0.0, 1 - share ** (1 - tail)) for share in kept]
    ranks = [(1 + powersgd.rank) ** -spectrum for powersgd in LOW_RANK]
    codecs = [min(0.95, rough * _CODECS.get(str(codec), 0.4)) for codec in CODECS]
    return ErrorRow(shape, size * 10 ** draw.uniform(-1.5, 1.5), (*densities, *ranks, *codecs), 3)
