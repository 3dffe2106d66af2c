"""int8 with one fp32 scale a block: the bits of `fxcomp/compressors/int8.py`."""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.block_codes import most_scale
from fxcomp.compressors.int8 import Int8
from fxcomp.compressors.triton.blocks import (
    INFINITY,
    compensated,
    decode_blocks,
    draw,
    encode_blocks,
    fill_up,
    largest_magnitude,
    load_scales,
    nearest_codes,
    nothing,
    places,
    random_codes,
    store_scales,
    tile_of,
)
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, tl

MOST_SCALE = constant(most_scale(127))


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
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    value, old = compensated(bucket, residual, start + place, is_there)
    largest = largest_magnitude(value)
    is_finite = largest < INFINITY
    scale = tl.minimum(tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0), MOST_SCALE)
    scale = tl.where(is_finite, scale, float("nan"))
    if state is None:
        rounded, code = nearest_codes(value, scale, 127)
    else:
        rounded, code = random_codes(value, scale, draw(state, table, place), 127)
    code = tl.where(is_finite[:, None], code, 0).to(tl.uint8, bitcast=True)
    store_scales(payload, first_block, size, scale, BLOCK, ROWS)
    tl.store(payload + codes_at + first_byte + place, code, is_there)
    if residual is not None:
        left_out = tl.where(is_finite[:, None], value - rounded * scale[:, None], old)
        tl.store(residual + start + place, left_out, is_there)
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
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    total = nothing([ROWS, WIDTH])
    for _ in range(RANKS):
        scale = load_scales(payloads, first_block, size, BLOCK, ROWS)
        code = tl.load(payloads + codes_at + first_byte + place, is_there, other=0).to(tl.int8, bitcast=True)
        total += code.to(tl.float32) * scale[:, None]
        payloads += payload_bytes
    tl.store(out + start + place, total * factor, is_there)


def encode(
    compressor: Int8,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    return encode_blocks(_encode, compressor, bucket, residual, payload, segments, state)


def decode(
    compressor: Int8,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return decode_blocks(_decode, compressor, payloads, ranks, segments, out)
