"""Legs: the operations of a strategy for one bucket, cluster and rank. Also cuts a bucket into shards.

    Encode   compress the bucket's pieces; `segments` holds the sizes of parameters' parts in each piece
    Send     run one collective
    Decode   average the payloads of each piece

`route.py` makes the legs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from fxcomp.cluster.cluster import Level
from fxcomp.compressors import Compressor
from fxcomp.plan.interpret import Device
from fxcomp.plan.kinds import CollectiveKind, ElementType

Piece = range
"""Range of a bucket's values."""


# Cached, because a search tries many strategies on the same bucket.


@lru_cache(maxsize=1024)
def shards(edges: tuple[int, ...], piece: Piece, ranks: int, grain: int) -> list[Piece]:
    """Cut a piece into one shard per rank. `edges` holds 0 and the parameters' ends; for `grain` see `cut_points`."""
    borders = cut_points(segments_of(edges, piece), ranks, grain)
    return [range(piece.start + a, piece.start + b) for a, b in pairwise(borders)]


@lru_cache(maxsize=16_384)
def segments_of(edges: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    """Return the size of each parameter's part in a piece."""
    sizes: list[int] = []
    start, number = piece.start, bisect_right(edges, piece.start)
    while start < piece.stop:
        stop = min(piece.stop, edges[number])
        sizes.append(stop - start)
        start, number = stop, number + 1
    return tuple(size for size in sizes if size)


def cut_points(sizes: Sequence[int], parts: int, grain: int) -> tuple[int, ...]:
    """Return the borders 0 = b0 <= ... <= b_parts = sum(sizes); shard i holds the values from b_i up to b_(i+1).

        a a a a a a b b b c c c c c c c       sizes (6, 3, 7), three parts, grain 2
        0         0|1       1|2       2       cut points 0, 6, 11, 16

    A border lies between two parameters, or at a multiple of the grain from the start of the parameter that it cuts.
    b_i is the allowed border nearest to i / parts · sum(sizes), the lower of two equally near borders. A shard differs
    from an equal part by at most the grain and may be empty. If the grain is a compressor's block, no block belongs to
    two shards.
    """
    assert parts >= 1, f"a bucket is cut into one part or more, not {parts}"
    assert grain >= 1, f"a grain is one value or more, not {grain}"
    edges = (0, *accumulate(sizes))
    return tuple(_nearest_place(edges, index, parts, grain) for index in range(parts + 1))


def row_shards(shapes: Sequence[Sequence[int]], ranks: int) -> tuple[tuple[int, range], ...]:
    """Cut parameters by rows, as fully_shard does; return (parameter index, element range), rank by rank.

    Every rank has the same number of rows; rows past a parameter's end are zeros.
    """
    parts = [-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes]
    return tuple(
        (number, range(rank * size, (rank + 1) * size))
        for rank in range(ranks)
        for number, size in enumerate(parts)
        if size
    )


def _nearest_place(edges: Sequence[int], index: int, parts: int, grain: int) -> int:
    whole = edges[-1]
    ideal = index * whole  # ideal border times parts
    if ideal == parts * whole:
        return whole
    segment = bisect_right(edges, ideal // parts) - 1  # last segment that starts here or before; not empty
    start, end = edges[segment], edges[segment + 1]
    below = start + (ideal // parts - start) // grain * grain
    above = min(below + grain, end)
    return below if ideal - parts * below <= parts * above - ideal else above


Cut = int | tuple[int, ...]
"""Number of elements of each rank, or number of equal parts."""


class Unit(NamedTuple):
    """Scale of a rank's values relative to the mean gradient."""

    weight: Fraction
    """Weight of this rank's values in the mean gradient.

    The mean is the sum of weight · values over all ranks that hold the same elements.
    """
    total: Fraction
    """Sum of the weights of all ranks that hold the same elements."""


@dataclass(frozen=True, slots=True)
class Encode:
    """Leg that proposes or compresses. `pieces` and their payloads are contiguous."""

    slot: int
    compressor: Compressor
    device: Device
    pieces: tuple[Piece, ...]
    segments: tuple[tuple[int, ...], ...]
    unit: Unit
    place: int
    """Index of this rank among the ranks that compress the same elements, with different values."""
    is_proposal: bool = False

    @property
    def payload_elements(self) -> int:
        return sum(payload_elements_of(self.compressor, piece) for piece in self.segments)

    @property
    def elements(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(frozen=True, slots=True)
class Send:
    """Leg of one collective."""

    kind: CollectiveKind
    level: Level
    cut: Cut
    place: int
    """Index of this rank in the process group."""
    ranks: int
    """Group size; a group of one sends nothing."""
    itemsize: int
    slot: int | None
    """Slot of the payload; None for dense values."""
    how: str = "sum"
    turned: Turn | None = None

    @property
    def parts(self) -> tuple[int, ...]:
        return self.cut if isinstance(self.cut, tuple) else ()

    def works_on(self, held: int) -> int:
        """Return the bytes that determine the price: the largest part if unequal parts are joined, else `held`."""
        return max(self.parts) * self.itemsize if self.is_priced_by_largest else held

    @property
    def is_priced_by_largest(self) -> bool:
        """True if the largest of unequal parts determines the price."""
        return bool(self.parts) and not self.kind.splits

    def leaves(self, held: int) -> int:
        """Return the bytes that the rank holds after the collective."""
        if not self.kind.has_parts:
            return held
        if self.kind.splits:
            return (1 if self.kind.sums else len(self.parts)) * self.parts[self.place] * self.itemsize
        return self.cut * held if isinstance(self.cut, int) else sum(self.cut) * self.itemsize


@dataclass(frozen=True, slots=True)
class Turn:
    """Reordering of `outer` rows, each with parts of `sizes` elements: part 0 of all rows first, then part 1, ..."""

    outer: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Leg that averages `payloads` payloads of each piece."""

    slot: int
    compressor: Compressor
    device: Device
    pieces: tuple[Piece, ...]
    segments: tuple[tuple[int, ...], ...]
    payloads: int

    @property
    def elements(self) -> int:
        return sum(map(len, self.pieces))


Leg = Encode | Send | Decode


@dataclass(frozen=True, slots=True)
class Route:
    """Legs of one bucket on one rank, cut into stages after each collective."""

    scale: Fraction
    """Factor applied to gradients while packing."""
    whole: Piece
    stages: tuple[tuple[Leg, ...], ...]
    element_type: ElementType = ElementType.F32

    @property
    def legs(self) -> tuple[Leg, ...]:
        return tuple(leg for stage in self.stages for leg in stage)

    @property
    def packs_fp32(self) -> bool:
        """True if values are packed as fp32, because a compressor reads them."""
        first = next((leg for leg in self.legs if not isinstance(leg, Send) or leg.ranks > 1), None)
        return isinstance(first, Encode)

    @property
    def slots(self) -> tuple[Encode, ...]:
        return tuple(leg for leg in self.legs if isinstance(leg, Encode) and not leg.is_proposal)


@lru_cache(maxsize=16_384)
def payload_elements_of(compressor: Compressor, segments: tuple[int, ...]) -> int:
    return compressor.payload_elements(segments)
