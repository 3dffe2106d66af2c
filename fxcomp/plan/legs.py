"""The legs of a strategy that is bound to a bucket, a cluster and a rank, and the cuts of the bucket.

    Encode   pieces of the bucket, and the parameters' parts in each
    Send     one collective, and what each rank of the group owns of it
    Decode   the mean of the payloads of each piece

`route.py` makes them.
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
"""Values of a bucket, from start up to stop."""


# A search binds many strategies to the same bucket: what is asked of it is kept.


@lru_cache(maxsize=1024)
def shards(edges: tuple[int, ...], piece: Piece, ranks: int, grain: int) -> list[Piece]:
    """Cut a piece of a bucket, whose parameters end at `edges`, into one shard for each rank."""
    borders = cut_points(segments_of(edges, piece), ranks, grain)
    return [range(piece.start + a, piece.start + b) for a, b in pairwise(borders)]


@lru_cache(maxsize=16_384)
def segments_of(edges: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    """List the sizes of the parameters' parts in a piece."""
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
    b_i is the allowed place nearest to i / parts of the whole; of two equally near, the lower one. Where the grain is a
    compressor's block, no block belongs to two shards: the payload of a shard is what the compressor makes of the
    shard's own segments. A shard differs from an equal part by at most the grain; a small bucket leaves some empty.
    """
    assert parts >= 1, f"a bucket is cut into one part or more, not {parts}"
    assert grain >= 1, f"a grain is one value or more, not {grain}"
    edges = (0, *accumulate(sizes))
    return tuple(_nearest_place(edges, index, parts, grain) for index in range(parts + 1))


def row_shards(shapes: Sequence[Sequence[int]], ranks: int) -> tuple[tuple[int, range], ...]:
    """Cut parameters along their rows, as fully_shard does: each rank's parts in turn, by the parameter's number.

    All ranks have as many rows of a parameter; the last ones may lie after its end, and are zeros.
    """
    parts = [-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes]
    return tuple(
        (number, range(rank * size, (rank + 1) * size))
        for rank in range(ranks)
        for number, size in enumerate(parts)
        if size
    )


def _nearest_place(edges: Sequence[int], index: int, parts: int, grain: int) -> int:
    """The allowed place nearest to index / parts of the whole, in integers."""
    whole = edges[-1]
    ideal = index * whole  # times 1 / parts
    if ideal == parts * whole:
        return whole
    segment = bisect_right(edges, ideal // parts) - 1  # the last one that starts here or before: it is not empty
    start, end = edges[segment], edges[segment + 1]
    below = start + (ideal // parts - start) // grain * grain
    above = min(below + grain, end)
    return below if ideal - parts * below <= parts * above - ideal else above


Cut = int | tuple[int, ...]
"""The elements that each rank of a group owns, or the number of equal parts."""


class Unit(NamedTuple):
    """The unit of values that ranks hold, against the mean gradient's."""

    weight: Fraction
    """Add up `weight` times the values of every rank that holds a place: the mean gradient."""
    total: Fraction
    """The weights of all ranks that hold one place: values that are the same on all of them stand for so many times."""


@dataclass(frozen=True, slots=True)
class Encode:
    """Propose or compress. `pieces` lie one after the other in the value, and so do their payloads."""

    slot: int
    compressor: Compressor
    device: Device
    pieces: tuple[Piece, ...]
    segments: tuple[tuple[int, ...], ...]
    """The parameters' parts in each piece."""
    unit: Unit
    place: int
    """This rank's number among those that compress other values for the same places."""
    is_proposal: bool = False

    @property
    def payload_elements(self) -> int:
        return sum(payload_elements_of(self.compressor, piece) for piece in self.segments)

    @property
    def elements(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(frozen=True, slots=True)
class Send:
    """One collective. `turned` says how payloads are put in order before it, if they must be: see `Turn`."""

    kind: CollectiveKind
    level: Level
    cut: Cut
    place: int
    """This rank's number in its group."""
    ranks: int
    """The group's size; a group of one has nothing to send."""
    itemsize: int
    slot: int | None
    """Whose payload travels; None for dense values."""
    how: str = "sum"
    turned: Turn | None = None

    @property
    def parts(self) -> tuple[int, ...]:
        return self.cut if isinstance(self.cut, tuple) else ()

    def works_on(self, held: int) -> int:
        """Count the bytes that it is priced by, where this rank holds so many: of a gather what one rank brings."""
        return max(self.parts) * self.itemsize if self.is_priced_by_largest else held

    @property
    def is_priced_by_largest(self) -> bool:
        """Ranks bring parts of their own sizes, of which the largest counts."""
        return bool(self.parts) and not self.kind.splits

    def leaves(self, held: int) -> int:
        """Count the bytes that this rank holds afterwards."""
        if not self.kind.has_parts:
            return held
        if self.kind.splits:
            return (1 if self.kind.sums else len(self.parts)) * self.parts[self.place] * self.itemsize
        return self.cut * held if isinstance(self.cut, int) else sum(self.cut) * self.itemsize


@dataclass(frozen=True, slots=True)
class Turn:
    """Put `outer` rows of parts of these sizes in the parts' order: all rows of part 0, then all of part 1, ..."""

    outer: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """The mean of `payloads` payloads of each piece."""

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
    """The legs of one bucket on one rank, cut after each collective: the last stage follows the last one."""

    scale: Fraction
    """Gradients are multiplied by it while they are packed."""
    whole: Piece
    stages: tuple[tuple[Leg, ...], ...]
    element_type: ElementType = ElementType.F32
    """Of dense values that travel."""

    @property
    def legs(self) -> tuple[Leg, ...]:
        return tuple(leg for stage in self.stages for leg in stage)

    @property
    def packs_fp32(self) -> bool:
        """A compressor takes what is packed as it is, and not what a collective has made of it."""
        first = next((leg for leg in self.legs if not isinstance(leg, Send) or leg.ranks > 1), None)
        return isinstance(first, Encode)

    @property
    def slots(self) -> tuple[Encode, ...]:
        """The compressions, by slot."""
        return tuple(leg for leg in self.legs if isinstance(leg, Encode) and not leg.is_proposal)


@lru_cache(maxsize=16_384)
def payload_elements_of(compressor: Compressor, segments: tuple[int, ...]) -> int:
    """Count the elements of a payload of these segments."""
    return compressor.payload_elements(segments)
