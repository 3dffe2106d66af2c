"""One bit a value with one fp32 scale a block: the bits of `fxcomp/compressors/sign.py`.

The sum of magnitudes has the reference's order: a block's values in rows of 64 lanes, added row by row, then folded.
"""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.blocks import count_blocks
from fxcomp.compressors.sign import Sign
from fxcomp.compressors.triton.blocks import (
    INFINITY,
    compensated,
    cut,
    fill_up,
    is_aligned,
    load_scales,
    store_scales,
    tile_of,
)
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl

LANES = constant(64)


@jit
def _places(start_in_block: Value, size: Value, BLOCK: constexpr, ROWS: constexpr):
    """Of up to 64 values of each block of a tile, from `start_in_block` on."""
    column = start_in_block + tl.arange(0, LANES)[None, :]
    place = tl.arange(0, ROWS)[:, None] * BLOCK + column
    return place, (place < size) & (column < BLOCK)


@jit
def _fold(lanes: Value, ROWS: constexpr, HALF: constexpr):
    """Add the upper half of the lanes to the lower."""
    low, high = tl.split(tl.permute(tl.reshape(lanes, [ROWS, 2, HALF]), (0, 2, 1)))
    return low + high


@jit
def _encode(
    bucket: Value,
    residual: Value,
    payload: Value,
    table: Value,
    codes_at: Value,
    end: Value,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
):
    start, size, first_block, first_byte = tile_of(table, ALIGNMENT)
    bucket += start
    if residual is not None:
        residual += start
    lanes = tl.zeros([ROWS, LANES], tl.float32)
    for column in range(0, BLOCK, LANES):
        place, is_there = _places(column, size, BLOCK, ROWS)
        value, _ = compensated(bucket, residual, place, is_there)
        lanes += tl.abs(value)
    lanes = _fold(lanes, ROWS, 32)
    lanes = _fold(lanes, ROWS, 16)
    lanes = _fold(lanes, ROWS, 8)
    lanes = _fold(lanes, ROWS, 4)
    lanes = _fold(lanes, ROWS, 2)
    total = tl.reshape(_fold(lanes, ROWS, 1), [ROWS])
    row = tl.arange(0, ROWS)
    values = tl.maximum(tl.minimum(size - row * BLOCK, BLOCK), 1)
    scale = tl.div_rn(total, values.to(tl.float32))
    is_finite = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    scale = tl.where(is_finite, scale, float("nan"))
    store_scales(payload, first_block, size, scale, BLOCK, ROWS)

    payload_of_codes = payload + codes_at + first_byte
    for column in range(0, BLOCK, LANES):
        place, is_there = _places(column, size, BLOCK, ROWS)
        value, old = compensated(bucket, residual, place, is_there)
        is_positive = value >= 0
        bit = (is_positive & is_there & is_finite[:, None]).to(tl.int32)
        weighed = tl.reshape(bit, [ROWS, LANES // 8, 8]) << tl.arange(0, 8)[None, None, :]
        byte = column // 8 + tl.arange(0, LANES // 8)[None, :]
        byte_place = row[:, None] * (BLOCK // 8) + byte
        is_byte = (8 * byte_place < size) & (8 * byte < BLOCK)
        tl.store(payload_of_codes + byte_place, tl.sum(weighed, axis=2).to(tl.uint8), is_byte)
        if residual is not None:
            left_out = value - tl.where(is_positive, scale[:, None], -scale[:, None])
            tl.store(residual + place, tl.where(is_finite[:, None], left_out, old), is_there)
    fill_up(payload, end)


@jit
def _decode(
    payloads: Value,
    out: Value,
    table: Value,
    codes_at: Value,
    payload_bytes: Value,
    factor: Value,
    RANKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
):
    start, size, first_block, first_byte = tile_of(table, ALIGNMENT)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    place = row * BLOCK + column
    is_there = (place < size) & (column < BLOCK)
    total = tl.full([ROWS, WIDTH], -0.0, tl.float32)  # plus x is x, whatever x
    for _ in range(RANKS):
        scale = load_scales(payloads, first_block, size, BLOCK, ROWS)[:, None]
        byte = tl.load(payloads + codes_at + first_byte + place // 8, is_there, other=0).to(tl.int32)
        total += tl.where(((byte >> (place % 8)) & 1) != 0, scale, -scale)
        payloads += payload_bytes
    tl.store(out + start + place, total * factor, is_there)


def encode(
    compressor: Sign,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    if not is_aligned(payload):
        return False
    tiles = cut(segments, compressor.block, 8, bucket.device)
    codes_at = 4 * count_blocks(segments, compressor.block)
    end = codes_at + sum(-(-size // 8) for size in segments)
    arguments = (bucket, residual, payload, tiles.table, codes_at, end)
    launch(_encode, len(tiles), *arguments, **tiles.constants)
    return True


def decode(
    compressor: Sign,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    if not is_aligned(payloads):
        return False
    tiles = cut(segments, compressor.block, 8, out.device)
    codes_at, payload_bytes = 4 * count_blocks(segments, compressor.block), len(payloads) // ranks
    arguments = (payloads, out, tiles.table, codes_at, payload_bytes, 1.0 / ranks)
    launch(_decode, len(tiles), *arguments, RANKS=ranks, warps=tiles.warps, **tiles.constants)
    return True
