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
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors.block_codes import BlockCompressor
from fxcomp.compressors.blocks import count_blocks
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.randomness import raise_step, stream_of, uniform

TILE = 2048  # values a program holds at once: 16 a thread of 4 warps  # assumed
COLUMNS = constant(6)
INFINITY = constant(0x7F800000)  # magnitudes as bits: not finite from here on
ROUND = constant(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest even integer
LANES = constant(64)  # the same number as in block_codes.py


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
def places_in_lanes(start_in_block: Value, size: Value, BLOCK: constexpr, ROWS: constexpr):
    """Of up to 64 values of each block of a tile, from `start_in_block` on."""
    column = start_in_block + tl.arange(0, LANES)[None, :]
    place = tl.arange(0, ROWS)[:, None] * BLOCK + column
    return place, (place < size) & (column < BLOCK)


@jit
def _halved(lanes: Value, ROWS: constexpr, HALF: constexpr):
    """Add the upper half of the lanes to the lower."""
    low, high = tl.split(tl.permute(tl.reshape(lanes, [ROWS, 2, HALF]), (0, 2, 1)))
    return low + high


@jit
def folded(lanes: Value, ROWS: constexpr):
    """The sum of each row's 64 lanes, in halves."""
    lanes = _halved(lanes, ROWS, 32)
    lanes = _halved(lanes, ROWS, 16)
    lanes = _halved(lanes, ROWS, 8)
    lanes = _halved(lanes, ROWS, 4)
    lanes = _halved(lanes, ROWS, 2)
    return tl.reshape(_halved(lanes, ROWS, 1), [ROWS])


@jit
def mean_magnitude(bucket: Value, residual: Value, size: Value, BLOCK: constexpr, ROWS: constexpr):
    """Of each block of a tile that begins at `bucket`; summed row by row in 64 lanes, which are then folded."""
    lanes = tl.zeros([ROWS, LANES], tl.float32)
    for column in range(0, BLOCK, LANES):
        place, is_there = places_in_lanes(column, size, BLOCK, ROWS)
        value, _ = compensated(bucket, residual, place, is_there)
        lanes += tl.abs(value)
    values = tl.maximum(tl.minimum(size - tl.arange(0, ROWS) * BLOCK, BLOCK), 1)
    return tl.div_rn(folded(lanes, ROWS), values.to(tl.float32))


@jit
def nearest_codes(value: Value, scale: Value, LEVELS: constexpr):
    """v / scale as integers within -LEVELS..LEVELS, ties to even; as floats and as int8."""
    quotient = tl.div_rn(value, tl.where(scale > 0, scale, 1.0)[:, None])
    shifted = tl.minimum(tl.maximum(quotient, -LEVELS), LEVELS) + ROUND
    return shifted - ROUND, shifted.to(tl.int32, bitcast=True).to(tl.int8)


@jit
def whole_below(value: Value):
    """The floor of magnitudes below 2^22; the compiler's own takes a denormal for zero."""
    nearest = (value + ROUND) - ROUND
    return tl.where(nearest > value, nearest - 1.0, nearest)


@jit
def random_codes(value: Value, scale: Value, drawn: Value, LEVELS: constexpr):
    """floor(v / scale + drawn) within -LEVELS..LEVELS; as floats and as int8."""
    quotient = tl.div_rn(value, tl.where(scale > 0, scale, 1.0)[:, None])
    whole = whole_below(tl.minimum(tl.maximum(quotient, -LEVELS), LEVELS) + drawn)
    whole = tl.minimum(whole, LEVELS)
    return whole, (whole + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@jit
def store_codes(
    codes: Value, code: Value, size: Value, BLOCK: constexpr, WIDTH: constexpr, ROWS: constexpr, BITS: constexpr
):
    """A tile's codes, int32 and 0 where there is no value, at the byte `codes`, the first in a byte's lowest bits."""
    IN_A_BYTE: constexpr = 8 // BITS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH // IN_A_BYTE)[None, :]
    place = row * (BLOCK // IN_A_BYTE) + column
    byte = code
    if IN_A_BYTE > 1:
        shift = (BITS * tl.arange(0, IN_A_BYTE))[None, None, :]
        byte = tl.sum(tl.reshape(code, [ROWS, WIDTH // IN_A_BYTE, IN_A_BYTE]) << shift, axis=2)
    is_byte = (IN_A_BYTE * place < size) & (IN_A_BYTE * column < BLOCK)
    tl.store(codes + place, byte.to(tl.uint8), is_byte)


@jit
def load_codes(codes: Value, place: Value, is_there: Value, BITS: constexpr):
    """What `store_codes` stored for each place of a tile."""
    IN_A_BYTE: constexpr = 8 // BITS
    byte = tl.load(codes + place // IN_A_BYTE, is_there, other=0).to(tl.int32)
    return (byte >> (BITS * (place % IN_A_BYTE))) & ((1 << BITS) - 1)


@jit
def draw(state: Value, table: Value, place: Value):
    """A number in [0, 1) for each place of this program's tile, from its segment's stream."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    low, high = stream_of(state, tl.load(entry + 4))
    return uniform(low, high, tl.load(entry + 5) + place)


@jit
def nothing(SHAPE: constexpr):
    """Negative zeros: plus x they are x, whatever x. `tl.full` makes zeros of them."""
    return tl.full(SHAPE, -2147483648, tl.int32).to(tl.float32, bitcast=True)


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


def encode_blocks(
    kernel: Any,
    compressor: BlockCompressor,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    *numbers: float,
    **constants: int,
) -> bool:
    """Launch a block compressor's encoding; `numbers` and `constants` are what its kernel takes besides."""
    if not is_aligned(payload):
        return False
    values_per_byte = 8 // compressor.bits
    tiles = cut(segments, compressor.block, values_per_byte, bucket.device)
    codes_at = 4 * count_blocks(segments, compressor.block)
    end = codes_at + sum(-(-size // values_per_byte) for size in segments)
    arguments = (bucket, residual, payload, state, tiles.table, codes_at, end, *numbers)
    launch(kernel, len(tiles), *arguments, warps=tiles.warps, **tiles.constants, **constants)
    raise_step(state)
    return True


def decode_blocks(
    kernel: Any,
    compressor: BlockCompressor,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    *numbers: float,
    **constants: int,
) -> bool:
    """Launch a block compressor's decoding."""
    if not is_aligned(payloads):
        return False
    tiles = cut(segments, compressor.block, 8 // compressor.bits, out.device)
    codes_at, payload_bytes = 4 * count_blocks(segments, compressor.block), len(payloads) // ranks
    arguments = (payloads, out, tiles.table, codes_at, payload_bytes, 1.0 / ranks, *numbers)
    launch(kernel, len(tiles), *arguments, RANKS=ranks, warps=tiles.warps, **tiles.constants, **constants)
    return True
