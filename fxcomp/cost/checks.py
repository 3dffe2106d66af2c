"""Checks of cost tables created in Python; files are checked while they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fxcomp.cost.reading import MOST, Reader, number, positive, wrong

if TYPE_CHECKING:  # circular import
    from fxcomp.cost.table import CostTable

_TIME, _RATE = number(), positive()
_Readers = Mapping[str, Reader[float]]

_OWN = {
    "launch_us": _TIME,
    "feed_us": _TIME,
    "host_us": _TIME,
    "error": _TIME,
    "compute_error": _TIME,
    "pack_gb_per_s": _RATE,
    "contention": _RATE,
    "overlap_speed": positive(1.0),
}
_OF_ROOFLINE = {"gflops": _RATE, "gb_per_s": _RATE, "launch_us": _TIME}
_OF_TRANSPORT = {"us": _TIME, "us_per_mb": _TIME}
_OF_POINT = {"elements": number(1), "encode_us": _TIME, "decode_us": _TIME, "propose_us": _TIME}
_OF_PIECE = {"start": _TIME, "at_zero_us": number(-MOST), "us_per_unit": _TIME}


def check_numbers(costs: CostTable) -> None:
    """Raise BadOption if a number of a cost table is out of range, infinite or NaN."""
    parts: list[tuple[str, object, _Readers]] = [("", costs, _OWN), ("roofline.", costs.roofline, _OF_ROOFLINE)]
    parts += [(f"transport[{kind.value!r}].", taken, _OF_TRANSPORT) for kind, taken in costs.transport.items()]
    parts += [
        (f"compressors[{key!r}].points[{k}].", point, _OF_POINT)
        for key, known in costs.compressors.items()
        for k, point in enumerate(known.points)
    ]
    parts += [
        (f"collectives['{kind.value}@{topology}'].fit.pieces[{k}].", piece, _OF_PIECE)
        for (kind, topology), found in costs.collectives.items()
        for k, piece in enumerate(found.fit.pieces)
    ]
    for place, part, readers in parts:
        for name, read in readers.items():
            read(getattr(part, name), _place(f"{place}{name}"))
    if costs.copy_gb_per_s is not None:
        _RATE(costs.copy_gb_per_s, _place("copy_gb_per_s"))
    for name, gflops in costs.roofline.others.items():
        _RATE(gflops, _place(f"roofline.others[{name!r}]"))
    for key, each in costs.compute.items():  # hundreds, so paths are formatted only for errors
        if not (0 <= each.us <= MOST and 0 <= each.spread <= MOST):
            name = "spread" if 0 <= each.us <= MOST else "us"
            _TIME(getattr(each, name), _place(f"compute[{key!r}].{name}"))
    processors = costs.processors
    if not processors.count > 0 or not 0 < processors.compute < math.inf:
        raise wrong(_place("processors"), "above 0, and finite for compute", processors)


def _place(inside: str) -> str:
    return f"the cost table's {inside}"
