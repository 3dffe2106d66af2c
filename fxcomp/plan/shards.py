"""Cut a bucket into shards, one for each rank of a group.

    a a a a a a b b b c c c c c c c       sizes (6, 3, 7), three parts, grain 2
    0         0|1       1|2       2       cut points 0, 6, 11, 16

A border lies between two parameters, or at a multiple of the grain from the start of the parameter that it cuts. Where
the grain is a compressor's block, no block belongs to two shards: the payload of a shard is what the compressor makes
of the shard's own segments. A shard differs from an equal part by at most the grain; a small bucket leaves some shards
empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

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

    b_i is the allowed place nearest to i / parts of the whole; of two equally near, the lower one.
    """
    assert parts >= 1, f"a bucket is cut into one part or more, not {parts}"
    assert grain >= 1, f"a grain is one value or more, not {grain}"
    edges = (0, *accumulate(sizes))
    return tuple(_nearest_place(edges, index, parts, grain) for index in range(parts + 1))


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
