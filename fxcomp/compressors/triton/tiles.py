"""Cut a bucket into tiles, one for each program of a launch, and read their values.

    segments (5, 3), block 4, two blocks a tile:    a b c d e | x y z   -->   tile 0:  a b c d    tile 1:  x y z 0
                                                                                       e 0 0 0             0 0 0 0

A tile is `rows` blocks of one segment, in rows of `width`, the power of two from `block` on. A table on the device
tells each program where its tile lies: 64 bytes a tile, made once for each division of a bucket and kept.

A thread reads four values at once where the compiler knows that a tile begins at a multiple of four and holds a
multiple of four. One segment of 5 ends that for itself and for what lies after it. So a kernel's work is compiled twice
where tiles differ, for those that lie best and for all; each program looks where its tile lies (`lies_well`), and it
stays one launch.
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

TILE = 2048  # values a program holds at once: 16 a thread of 4 warps  # assumed
VECTOR = 4  # fp32 values that a thread reads or writes at once: 16 bytes
COLUMNS = constant(8)
INFINITY = constant(0x7F800000)  # as bits: magnitudes below are finite


@dataclass(frozen=True)
class Tiles:
    """A division of a bucket."""

    table: Tensor
    """For each tile: first value, values, first block, first byte of codes, segment, first value in the segment.

    Two more columns are for a kernel's own use.
    """
    shape: tuple[int, int, int, int, int]
    """Block, width, rows, and two powers of two for which kernels are compiled: the first divides first values and
    sizes of all tiles, the second those of the tiles that lie best."""
    warps: int

    def __len__(self) -> int:
        return len(self.table)

    def launch(self, kernel: Any, *arguments: Tensor | float | None, rows: int = 1, **constants: object) -> None:
        """Run a program for each tile, times `rows`; the table comes first, SHAPE last."""
        launch(kernel, len(self), self.table, *arguments, rows=rows, warps=self.warps, **constants, SHAPE=self.shape)


@cache
def cut(segments: tuple[int, ...], block: int, device: torch.device, values_per_byte: int = 1) -> Tiles:
    """Cut a bucket so that no tile reaches over a segment's end."""
    return tiles_of(block, list(rows_of(segments, block, values_per_byte)), device)


def tiles_of(block: int, table: list[tuple[int, ...]], device: torch.device) -> Tiles:
    """Put a table of tiles on a device."""
    width = 1 << (block - 1).bit_length()
    rows = max(TILE // width, 1)
    alignments = {gcd(VECTOR, block, start, values) for start, values, *_ in table}
    shape = block, width, rows, min(alignments, default=VECTOR), max(alignments, default=VECTOR)
    on_device = torch.tensor(table, dtype=torch.int64, device=device).view(-1, 8)
    return Tiles(on_device, shape, warps=min(max(rows * width // 512, 4), 32))


def rows_of(segments: tuple[int, ...], block: int, values_per_byte: int) -> Iterator[tuple[int, ...]]:
    """Yield the row of each tile."""
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
    """Return true where SHAPE[4] divides the first value and the size of this program's tile, and not only SHAPE[3]."""
    if SHAPE[3] == SHAPE[4]:
        return True
    else:  # noqa: RET505  Triton compiles one branch only
        entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
        return (tl.load(entry) | tl.load(entry + 1)) % SHAPE[4] == 0


@jit
def tile_of(table, ALIGNMENT: constexpr):
    """Look up this program's first value, number of values, first block and first byte of codes."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    start = tl.multiple_of(tl.load(entry), ALIGNMENT)
    size = tl.multiple_of(tl.load(entry + 1).to(tl.int32), ALIGNMENT)
    return start, size, tl.load(entry + 2), tl.load(entry + 3)


@jit
def own_of(table):
    """Look up this tile's two columns of the kernel's own."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    return tl.load(entry + 6), tl.load(entry + 7)


@jit
def segment_of(table):
    """Look up this program's segment, and its first value's place in there."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    return tl.load(entry + 4), tl.load(entry + 5)


@jit
def places(size, SHAPE: constexpr):
    """Return each value's place in the tile, and which places hold a value."""
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
    """Return the numbers of a tile's blocks, from 0 on, and which of them hold a value."""
    BLOCK: constexpr = SHAPE[0]
    ROWS: constexpr = SHAPE[2]
    block = tl.arange(0, ROWS)
    return block, block * BLOCK < size


@jit
def compensated(bucket, residual, at, is_there):
    """Read v, the values to compress, and the old residual, which is v where there is none."""
    value = tl.load(bucket + at, is_there, other=0.0)
    old = value
    if residual is not None:
        old = tl.load(residual + at, is_there, other=0.0)
        value = value + old
    return value, old


@jit
def magnitude_of(value):
    """Return |v| as bits, which have the order of magnitudes; what is not finite is largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def is_finite(value):
    return magnitude_of(value) < INFINITY


@jit
def draw(state, table, place):
    """Draw a number in [0, 1) for each place of this program's tile, from its segment's stream."""
    segment, first = segment_of(table)
    low, high = stream_of(state, segment)
    return uniform(low, high, first + place)


@jit
def nothing(SHAPE: constexpr):
    """Return negative zeros: plus x they are x, whatever x. `tl.full` makes zeros of them."""
    return tl.full(SHAPE, -2147483648, tl.int32).to(tl.float32, bitcast=True)
