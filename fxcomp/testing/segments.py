"""Lengths of segments at which layouts break."""

from __future__ import annotations

from fxcomp.compressors import Compressor

LARGE = 5_000_000

SMALL_SEGMENTS: tuple[tuple[int, ...], ...] = ((0, 1, 512, 0, 65, 3), (1000, 66_000, 9))

ROUND_SEGMENTS = (65_536, 131_072, *range(256, 256 * 33, 256))
"""Whole multiples of 2^8 and 2^16, where an index into a table of so many ends."""

LARGE_SEGMENTS: tuple[tuple[int, ...], ...] = (ROUND_SEGMENTS, (2**20 + 1,), (LARGE - 70_000, 70_000))


def segments_to_try(compressor: Compressor) -> list[tuple[int, ...]]:
    """Lengths at which layouts break: none, one, odd, around a block, above 2^16; and several at once."""
    block = int(getattr(compressor, "block", 512))
    lengths = sorted({0, 1, 7, block - 1, block, block + 1, 65_537})
    return [(), *((length,) for length in lengths), *SMALL_SEGMENTS]
