"""Whole numbers rounded at random with one L2 norm a block: the bits of `fxcomp/compressors/qsgd.py`."""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.block_codes import most_scale
from fxcomp.compressors.qsgd import QSGD
from fxcomp.compressors.triton.blocks import (
    INFINITY,
    compensated,
    decode_blocks,
    draw,
    encode_blocks,
    fill_up,
    load_codes,
    load_scales,
    norm,
    nothing,
    places,
    store_codes,
    store_scales,
    tile_of,
    whole_below,
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
    levels: Value,
    most: Value,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
    BITS: constexpr,
):
    start, size, first_block, first_byte = tile_of(table, ALIGNMENT)
    bucket += start
    if residual is not None:
        residual += start
    scale = tl.div_rn(norm(bucket, residual, size, BLOCK, ROWS), levels)
    is_finite = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    scale = tl.where(is_finite, tl.minimum(scale, most), float("nan"))
    store_scales(payload, first_block, size, scale, BLOCK, ROWS)

    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    value, old = compensated(bucket, residual, place, is_there)
    is_finite = is_finite[:, None]
    quotient = tl.div_rn(tl.where(is_finite, value, 0.0), tl.where(scale > 0, scale, 1.0)[:, None])
    quotient = tl.minimum(tl.maximum(quotient, -levels), levels)
    whole = tl.minimum(whole_below(quotient + draw(state, table, place)), levels)
    code = whole.to(tl.int32) & ((1 << BITS) - 1)
    store_codes(
        payload + codes_at + first_byte, tl.where(is_finite & is_there, code, 0), size, BLOCK, WIDTH, ROWS, BITS
    )
    if residual is not None:
        tl.store(residual + place, tl.where(is_finite, value - whole * scale[:, None], old), is_there)
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
    BITS: constexpr,
):
    start, size, first_block, first_byte = tile_of(table, ALIGNMENT)
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    total = nothing([ROWS, WIDTH])
    SIGN: constexpr = 1 << (BITS - 1)
    for _ in range(RANKS):
        scale = load_scales(payloads, first_block, size, BLOCK, ROWS)[:, None]
        code = load_codes(payloads + codes_at + first_byte, place, is_there, BITS)
        total += ((code ^ SIGN) - SIGN).to(tl.float32) * scale
        payloads += payload_bytes
    tl.store(out + start + place, total * factor, is_there)


def encode(
    compressor: QSGD,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    levels, most, bits = float(compressor.levels), most_scale(compressor.levels), compressor.bits
    return encode_blocks(_encode, compressor, bucket, residual, payload, segments, state, levels, most, BITS=bits)


def decode(
    compressor: QSGD,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return decode_blocks(_decode, compressor, payloads, ranks, segments, out, BITS=compressor.bits)
