"""Two bits a value with one fp32 scale a block: the bits of `fxcomp/compressors/int2.py`."""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.block_codes import most_scale
from fxcomp.compressors.int2 import Int2
from fxcomp.compressors.triton.blocks import (
    INFINITY,
    compensated,
    decode_blocks,
    draw,
    encode_blocks,
    fill_up,
    largest_magnitude,
    load_codes,
    load_scales,
    mean_magnitude,
    nothing,
    places,
    store_codes,
    store_scales,
    tile_of,
    whole_below,
)
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, tl

OUTER = constant(1.5)  # the outer level, in units of the scale
MOST_SCALE = constant(most_scale(1.5))


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
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    value, old = compensated(bucket, residual, place, is_there)
    if state is None:
        scale = mean_magnitude(bucket, residual, size, BLOCK, ROWS) * OUTER
    else:
        scale = tl.div_rn(largest_magnitude(value).to(tl.float32, bitcast=True), OUTER)
    is_sent = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    scale, is_finite = tl.minimum(scale, MOST_SCALE), is_sent[:, None]
    if state is None:
        is_outer = tl.abs(value) >= scale[:, None]
        code = tl.where(is_outer, 3, 2) ^ tl.where(value < 0, 3, 0)
    else:
        quotient = tl.div_rn(tl.where(is_finite, value, 0.0), tl.where(scale > 0, scale, 1.0)[:, None])
        code = whole_below(quotient + OUTER + draw(state, table, place)).to(tl.int32)
        code = tl.minimum(tl.maximum(code, 0), 3)
    code = tl.where(is_finite & is_there, code, 0)
    scale = tl.where(is_sent, scale, float("nan"))
    store_scales(payload, first_block, size, scale, BLOCK, ROWS)
    store_codes(payload + codes_at + first_byte, code, size, BLOCK, WIDTH, ROWS, 2)
    if residual is not None:
        left_out = tl.where(is_finite, value - (code.to(tl.float32) - OUTER) * scale[:, None], old)
        tl.store(residual + place, left_out, is_there)
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
        scale = load_scales(payloads, first_block, size, BLOCK, ROWS)[:, None]
        code = load_codes(payloads + codes_at + first_byte, place, is_there, 2)
        total += (code.to(tl.float32) - OUTER) * scale
        payloads += payload_bytes
    tl.store(out + start + place, total * factor, is_there)


def encode(
    compressor: Int2,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    return encode_blocks(_encode, compressor, bucket, residual, payload, segments, state)


def decode(
    compressor: Int2,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return decode_blocks(_decode, compressor, payloads, ranks, segments, out)
