"""Cut a bucket into tiles for one launch, for kernels that work block by block.

    segments (5, 3), block 4, two blocks a tile:    a b c d e | x y z   -->   tile 0:  a b c d    tile 1:  x y z 0
                                                                                       e 0 0 0             0 0 0 0

A tile is ROWS blocks of one segment, in rows of WIDTH, the power of two from `block` on. A table on the device tells
each program where its tile lies: 48 bytes a tile, made once for each division of a bucket and kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
from torch import Tensor

from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, tl
from fxcomp.compressors.triton.randomness import stream_of, uniform

TILE = 2048  # values a program holds at once: 16 a thread of 4 warps  # assumed
COLUMNS = constant(6)
INFINITY = constant(0x7F800000)  # magnitudes as bits: not finite from here on
ROUND = constant(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest even integer


@dataclass(frozen=True)
class Tiles:
    """A division of a bucket. `constants` are what kernels are compiled for."""

    table: Tensor
    """For each tile: first value, values, first block, first byte of codes, segment, first value in the segment."""
    constants: dict[str, int]
    warps: int

    def __len__(self) -> int:
        return len(self.table)


@cache
def cut(segments: tuple[int, ...], block: int, values_per_byte: int, device: torch.device) -> Tiles:
    """The tiles of a bucket, none of which reaches over a segment's end."""
    width = 1 << (block - 1).bit_length()
    rows = max(TILE // width, 1)
    table = torch.tensor(list(_tiles(segments, block, rows, values_per_byte)), dtype=torch.int64, device=device)
    constants = {"BLOCK": block, "WIDTH": width, "ROWS": rows, "ALIGNMENT": gcd(16, block, *segments)}
    return Tiles(table.view(-1, 6), constants, warps=min(max(rows * width // 512, 4), 32))


def _tiles(segments: tuple[int, ...], block: int, rows: int, values_per_byte: int) -> Iterator[tuple[int, ...]]:
    start = first_block = first_byte = 0
    for segment, size in enumerate(segments):
        for place in range(0, size, rows * block):
            values = min(size - place, rows * block)
            yield (
                start + place,
                values,
                first_block + place // block,
                first_byte + place // values_per_byte,
                segment,
                place,
            )
        start += size
        first_block += -(-size // block)
        first_byte += -(-size // values_per_byte)


@jit
def tile_of(table: Value, ALIGNMENT: constexpr):
    """This program's first value, values, first block and first byte of codes."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    start = tl.multiple_of(tl.load(entry), ALIGNMENT)
    size = tl.multiple_of(tl.load(entry + 1).to(tl.int32), ALIGNMENT)
    return start, size, tl.load(entry + 2), tl.load(entry + 3)


@jit
def places(size: Value, BLOCK: constexpr, WIDTH: constexpr, ROWS: constexpr):
    """Where each value of a tile lies behind its first one, and whether there is one."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    place = row * BLOCK + column
    if BLOCK == WIDTH:
        return place, place < size
    return place, (place < size) & (column < BLOCK)


@jit
def compensated(bucket: Value, residual: Value, at: Value, is_there: Value):
    """v, the values to compress, and the old residual, which is v where there is none."""
    value = tl.load(bucket + at, is_there, other=0.0)
    old = value
    if residual is not None:
        old = tl.load(residual + at, is_there, other=0.0)
        value = value + old
    return value, old


@jit
def largest_magnitude(value: Value):
    """Of each row, as the bits of a float; above infinity's where there is a NaN."""
    return tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@jit
def nearest_codes(value: Value, scale: Value, LEVELS: constexpr):
    """v / scale as integers within -LEVELS..LEVELS, ties to even; as floats and as int8."""
    quotient = tl.div_rn(value, tl.where(scale > 0, scale, 1.0)[:, None])
    shifted = tl.minimum(tl.maximum(quotient, -LEVELS), LEVELS) + ROUND
    return shifted - ROUND, shifted.to(tl.int32, bitcast=True).to(tl.int8)


@jit
def random_codes(value: Value, scale: Value, drawn: Value, LEVELS: constexpr):
    """floor(v / scale + drawn) within -LEVELS..LEVELS; as floats and as int8."""
    quotient = tl.div_rn(value, tl.where(scale > 0, scale, 1.0)[:, None])
    whole = tl.floor(tl.minimum(tl.maximum(quotient, -LEVELS), LEVELS) + drawn)
    whole = tl.minimum(whole, LEVELS)
    return whole, (whole + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@jit
def draw(state: Value, table: Value, place: Value):
    """A number in [0, 1) for each place of this program's tile, from its segment's stream."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    low, high = stream_of(state, tl.load(entry + 4))
    return uniform(low, high, tl.load(entry + 5) + place)


@jit
def store_scales(payload: Value, first_block: Value, size: Value, scale: Value, BLOCK: constexpr, ROWS: constexpr):
    row = tl.arange(0, ROWS)
    tl.store(payload.to(tl.pointer_type(tl.float32)) + first_block + row, scale, row * BLOCK < size)


@jit
def load_scales(payload: Value, first_block: Value, size: Value, BLOCK: constexpr, ROWS: constexpr):
    row = tl.arange(0, ROWS)
    at = payload.to(tl.pointer_type(tl.float32)) + first_block + row
    return tl.load(at, row * BLOCK < size, other=0.0)


@jit
def fill_up(payload: Value, end: Value):
    """Zeros behind the last code up to a multiple of four, by the first program."""
    place = tl.arange(0, 4)
    is_ours = (place < (4 - end % 4) % 4) & (tl.program_id(0) == 0)
    tl.store(payload + end + place, tl.zeros([4], tl.uint8), is_ours)


def is_aligned(payload: Tensor) -> bool:
    """A device reads no fp32 from an address that is not a multiple of four; nobody promises one for a payload."""
    return payload.data_ptr() % 4 == 0
