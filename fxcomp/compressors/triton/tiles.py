"""Cut a bucket into tiles, one for each program of a launch, and read their values.

    segments (5, 3), block 4, two blocks a tile:    a b c d e | x y z   -->   tile 0:  a b c d    tile 1:  x y z 0
                                                                                       e 0 0 0             0 0 0 0

A tile is `rows` blocks of one segment, each padded to `width`, a power of two. A cached device table locates each
program's tile.

Vector loads of four values need tiles whose start and size are multiples of four. If a bucket also has other tiles, the
kernel has code for both, and each program checks its own tile (`lies_well`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, stream_of, tl, uniform

TILE = 2048  # values per program: 16 per thread of 4 warps  # assumed
VECTOR = 4  # fp32 values a thread reads at once: 16 bytes
COLUMNS = constant(8)
INFINITY = constant(0x7F800000)  # as bits


@dataclass(frozen=True)
class Tiles:
    """Division of a bucket into tiles."""

    table: Tensor
    """One row per tile: first value, number of values, first block, first byte of codes, segment, first value's index
    in the segment, two columns with a kernel's own data.
    """
    shape: tuple[int, int, int, int, int]
    """Values per block, width, rows, smallest and largest alignment of the tiles.

    A tile's alignment, 4, 2 or 1, divides start and size.
    """
    warps: int

    def __len__(self) -> int:
        return len(self.table)

    def launch(self, kernel: Any, *arguments: Tensor | float | None, rows: int = 1, **constants: object) -> None:
        """Run `rows` programs for each tile. The kernel's first argument is `table`; its argument SHAPE is `shape`."""
        launch(kernel, len(self), self.table, *arguments, rows=rows, warps=self.warps, **constants, SHAPE=self.shape)


@cache
def cut(segments: tuple[int, ...], block: int, device: torch.device, values_per_byte: int = 1) -> Tiles:
    return tiles_of(block, list(rows_of(segments, block, values_per_byte)), device)


def tiles_of(block: int, table: list[tuple[int, ...]], device: torch.device) -> Tiles:
    width = 1 << (block - 1).bit_length()
    rows = max(TILE // width, 1)
    alignments = {gcd(VECTOR, block, start, values) for start, values, *_ in table}
    shape = block, width, rows, min(alignments, default=VECTOR), max(alignments, default=VECTOR)
    on_device = torch.tensor(table, dtype=torch.int64, device=device).view(-1, 8)
    return Tiles(on_device, shape, warps=min(max(rows * width // 512, 4), 32))


def rows_of(segments: tuple[int, ...], block: int, values_per_byte: int) -> Iterator[tuple[int, ...]]:
    rows = max(TILE // (1 << (block - 1).bit_length()), 1)
    start = first_block = first_byte = 0
    for segment, size in enumerate(segments):
        for place in range(0, size, rows * block):
            values = min(size - place, rows * block)
            at = start + place, values, first_block + place // block, first_byte + place // values_per_byte
            yield *at, segment, place, 0, 0
        start += size
        first_block += -(-size // block)
        first_byte += -(-size // values_per_byte)


@jit
def lies_well(table, SHAPE: constexpr):
    """Return True if the largest alignment, SHAPE[4], divides start and size of this program's tile."""
    if SHAPE[3] == SHAPE[4]:
        return True
    else:  # noqa: RET505  Triton compiles one branch only
        entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
        return (tl.load(entry) | tl.load(entry + 1)) % SHAPE[4] == 0


@jit
def tile_of(table, ALIGNMENT: constexpr):
    """Return first value, number of values, first block and first byte of codes of this program's tile."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    start = tl.multiple_of(tl.load(entry), ALIGNMENT)
    size = tl.multiple_of(tl.load(entry + 1).to(tl.int32), ALIGNMENT)
    return start, size, tl.load(entry + 2), tl.load(entry + 3)


@jit
def own_of(table):
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    return tl.load(entry + 6), tl.load(entry + 7)


@jit
def segment_of(table):
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    return tl.load(entry + 4), tl.load(entry + 5)


@jit
def places(size, SHAPE: constexpr):
    """Return each value's index in the tile, and a mask of the values that exist."""
    BLOCK: constexpr = SHAPE[0]
    WIDTH: constexpr = SHAPE[1]
    ROWS: constexpr = SHAPE[2]
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    place = row * BLOCK + column
    is_there = place < size
    if BLOCK < WIDTH:
        is_there = is_there & (column < BLOCK)
    return place, is_there


@jit
def blocks_of(size, SHAPE: constexpr):
    """Return the indices of a tile's blocks, and a mask of the blocks that exist."""
    BLOCK: constexpr = SHAPE[0]
    ROWS: constexpr = SHAPE[2]
    block = tl.arange(0, ROWS)
    return block, block * BLOCK < size


@jit
def compensated(bucket, residual, at, is_there):
    """Return v = bucket + residual, and the old residual (v if there is no residual)."""
    value = tl.load(bucket + at, is_there, other=0.0)
    old = value
    if residual is not None:
        old = tl.load(residual + at, is_there, other=0.0)
        value = value + old
    return value, old


@jit
def magnitude_of(value):
    """Return |v| as bits, in the order of magnitudes; NaN is the largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def is_finite(value):
    return magnitude_of(value) < INFINITY


@jit
def draw(state, table, place):
    """Draw a number in [0, 1) for each index of this tile, from its segment's stream."""
    segment, first = segment_of(table)
    low, high = stream_of(state, segment)
    return uniform(low, high, first + place)


@jit
def nothing(SHAPE: constexpr):
    """Return negative zeros, the neutral element of addition. `tl.full` would make them positive."""
    return tl.full(SHAPE, -2147483648, tl.int32).to(tl.float32, bitcast=True)
