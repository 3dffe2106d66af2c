"""Say what an error table has an entry for, and which entry a compressor finds.

    family      entry                       serves
    largest     share of values kept        topk; sidco, which sends about as many
    low rank    rank of the best matrix     powersgd
    codecs      the compressor itself       whatever rounds: bf16, fp16, int8, int4, int2, sign

Of sorted values and of singular values each one more is worth less than the one before it. So what is lost is convex in
the number that is kept, and a straight line between two entries never says too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TypeGuard

from fxcomp.compressors import Compressor, Int2, PowerSGD, Sidco, TopK, parse_compressor
from fxcomp.compressors.block_codes import BlockCompressor, SymmetricCompressor
from fxcomp.compressors.topk import counts
from fxcomp.errors import BadOption

DENSITIES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.25)
RANKS = (1, 2, 4, 8, 16)
CODECS = ("bf16", "fp16", "int8", "int4", "int2", "sign")

_LEAST_DENSITY = 1e-5
_ABOUT_K = (TopK, Sidco)


@dataclass(frozen=True, slots=True)
class Columns:
    """The entries of each gradient: densities first, then ranks, then codecs."""

    densities: tuple[float, ...] = DENSITIES
    ranks: tuple[int, ...] = RANKS
    codecs: tuple[Compressor, ...] = tuple(map(parse_compressor, CODECS))

    def __post_init__(self) -> None:
        for what, values in (("densities", self.densities), ("ranks", self.ranks)):
            if any(low >= high for low, high in pairwise(values)):
                raise BadOption(f"the {what} of an error table must rise, not {values}")
        if not all(_LEAST_DENSITY <= density < 1 for density in self.densities):
            raise BadOption(f"densities must be from {_LEAST_DENSITY:g} to below 1, not {self.densities}")
        if any(rank < 1 for rank in self.ranks):
            raise BadOption(f"ranks must be 1 or more, not {self.ranks}")
        if len(set(self.codecs)) < len(self.codecs):
            raise BadOption(f"a codec stands twice among {', '.join(map(str, self.codecs))}")
        for codec in self.codecs:
            if isinstance(codec, (*_ABOUT_K, PowerSGD)) or codec.facts.agreement is not None:
                raise BadOption(
                    f"{codec} is no codec that can be tried on a sample of one rank's values.\n"
                    "  topk and its like are found by their density, powersgd by its rank; leave others out."
                )

    @property
    def count(self) -> int:
        return len(self.densities) + len(self.ranks) + len(self.codecs)

    @property
    def names(self) -> tuple[str, ...]:
        """Each entry as the compressor that it is measured for."""
        largest = (f"topk({density})" for density in self.densities)
        return (*largest, *(f"powersgd({rank})" for rank in self.ranks), *map(str, self.codecs))

    def chains(self) -> list[list[int]]:
        """List entries of which each loses at least what the one after it loses: more kept, or more levels."""
        largest = len(self.densities)
        chains = [list(range(largest)), list(range(largest, largest + len(self.ranks)))]
        integers: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for number, codec in enumerate(self.codecs, largest + len(self.ranks)):
            if isinstance(codec, SymmetricCompressor):
                integers.setdefault((codec.block, codec.stochastic), []).append((codec.bits, number))
        return chains + [[number for _, number in sorted(each)] for each in integers.values()]

    def by_bits(self) -> list[int]:
        """List the entries of integers, the most bits first, whatever their blocks are."""
        found = [(codec.bits, number) for number, codec in enumerate(self.codecs) if _is_integer(codec)]
        return [self.contractions() + number for _, number in sorted(found, reverse=True)]

    def contractions(self) -> int:
        """Count the entries, from the first on, that leave values out and so lose at most all."""
        return len(self.densities) + len(self.ranks)

    def entry_of(self, compressor: Compressor) -> int | None:
        """Number the entry that is measured for this very compressor; None if there is none."""
        if isinstance(compressor, _ABOUT_K):
            return self.densities.index(compressor.ratio) if compressor.ratio in self.densities else None
        if isinstance(compressor, PowerSGD):
            found = self.ranks.index(compressor.rank) if compressor.rank in self.ranks else None
            return None if found is None else len(self.densities) + found
        return self.contractions() + self.codecs.index(compressor) if compressor in self.codecs else None

    def find(self, row: Sequence[float], compressor: Compressor, shape: tuple[int, ...]) -> float | None:
        """Read off what a compressor loses of a gradient of this shape; None if no entry serves it."""
        if isinstance(compressor, _ABOUT_K):
            return self._largest(row, compressor.ratio, prod(shape))
        if isinstance(compressor, PowerSGD):
            return self._low_rank(row, compressor, shape)
        if compressor in self.codecs:
            return row[self.contractions() + self.codecs.index(compressor)]
        return None

    def _largest(self, row: Sequence[float], ratio: float, size: int) -> float:
        kept = [counts((size,), density)[0] for density in self.densities]
        points = [(0, 1.0), *zip(kept, row, strict=False), (size, 0.0)]
        return on_lines(points, counts((size,), ratio)[0])

    def _low_rank(self, row: Sequence[float], compressor: PowerSGD, shape: tuple[int, ...]) -> float:
        if sends_whole(compressor, shape):
            return 0.0
        points = [(0, 1.0), *zip(self.ranks, row[len(self.densities) :], strict=False)]
        return on_lines(points, compressor.rank)


def _is_integer(codec: Compressor) -> TypeGuard[BlockCompressor]:
    return isinstance(codec, Int2 | SymmetricCompressor)


STANDARD = Columns()


@lru_cache(maxsize=4096)
def sends_whole(compressor: PowerSGD, shape: tuple[int, ...]) -> bool:
    """Return whether a vector, or a matrix too small for two factors to pay, travels as it is."""
    return compressor.bound_to([shape], 1).columns == (0,)


def on_lines(points: Sequence[tuple[int, float]], at: int) -> float:
    """Read a curve off between its points, which are in order; after the last one it stays as it is."""
    for (left, high), (right, low) in pairwise(points):
        if left < right and at <= right:
            return high + (low - high) * (at - left) / (right - left)
    return points[-1][1]
