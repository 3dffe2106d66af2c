"""One bit a value with one fp32 scale a block: the bits of `fxcomp/compressors/sign.py`.

The sum of magnitudes has the reference's order: a block's values in rows of 64 lanes, added row by row, then folded.
"""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.sign import Sign
from fxcomp.compressors.triton.blocks import (
    INFINITY,
    LANES,
    compensated,
    decode_blocks,
    encode_blocks,
    fill_up,
    load_scales,
    mean_magnitude,
    nothing,
    places_in_lanes,
    store_scales,
    tile_of,
)
from fxcomp.compressors.triton.language import Value, constexpr, jit, tl


@jit
def _encode(
    bucket: Value,
    residual: Value,
    payload: Value,
    state: Value,
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
    scale = mean_magnitude(bucket, residual, size, BLOCK, ROWS)
    is_finite = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    scale = tl.where(is_finite, scale, float("nan"))
    row = tl.arange(0, ROWS)
    store_scales(payload, first_block, size, scale, BLOCK, ROWS)

    payload_of_codes = payload + codes_at + first_byte
    for column in range(0, BLOCK, LANES):
        place, is_there = places_in_lanes(column, size, BLOCK, ROWS)
        value, old = compensated(bucket, residual, place, is_there)
        is_positive = value >= 0
        bit = (is_positive & is_there & is_finite[:, None]).to(tl.int32)
        weighed = tl.reshape(bit, [ROWS, LANES // 8, 8]) << tl.arange(0, 8)[None, None, :]
        byte = column // 8 + tl.arange(0, LANES // 8)[None, :]
        byte_place = row[:, None] * (BLOCK // 8) + byte
        is_byte = (8 * byte_place < size) & (8 * byte < BLOCK)
        tl.store(payload_of_codes + byte_place, tl.sum(weighed, axis=2).to(tl.uint8), is_byte)
        if residual is not None:
            left_out = value - tl.where(is_positive, 1.0, -1.0) * scale[:, None]
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
    total = nothing([ROWS, WIDTH])
    for _ in range(RANKS):
        scale = load_scales(payloads, first_block, size, BLOCK, ROWS)[:, None]
        byte = tl.load(payloads + codes_at + first_byte + place // 8, is_there, other=0).to(tl.int32)
        total += tl.where(((byte >> (place % 8)) & 1) != 0, 1.0, -1.0) * scale  # -x would be 0 - x, and lose -0
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
    return encode_blocks(_encode, compressor, bucket, residual, payload, segments, state)


def decode(
    compressor: Sign,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return decode_blocks(_decode, compressor, payloads, ranks, segments, out)
