"""What the kernels of fp8_e4m3 and fp8_e5m2 share: the bits of `fxcomp/compressors/fp8.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.block_codes import most_scale
from fxcomp.compressors.fp8 import FP8
from fxcomp.compressors.triton.blocks import (
    INFINITY,
    compensated,
    decode_blocks,
    encode_blocks,
    fill_up,
    largest_magnitude,
    load_scales,
    nothing,
    places,
    store_scales,
    tile_of,
)
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, tl
from fxcomp.compressors.triton.small_floats import rounded, widened

SMALLEST_SCALE = constant(2.0**-126)  # 1 / scale must be finite

_FORMATS = {torch.float8_e4m3fn: {"MANTISSA": 3, "BIAS": 7}, torch.float8_e5m2: {"MANTISSA": 2, "BIAS": 15}}


@jit
def _of_code(code: Value, MANTISSA: constexpr, BIAS: constexpr):
    bits = widened(code & 127, MANTISSA, BIAS).to(tl.int32, bitcast=True) | ((code & 128) << 24)
    return bits.to(tl.float32, bitcast=True)


@jit
def _encode(
    bucket: Value,
    residual: Value,
    payload: Value,
    state: Value,
    table: Value,
    codes_at: Value,
    end: Value,
    most: Value,
    most_of_scale: Value,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
    MANTISSA: constexpr,
    BIAS: constexpr,
):
    start, size, first_block, first_byte = tile_of(table, ALIGNMENT)
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    value, old = compensated(bucket, residual, start + place, is_there)
    largest = largest_magnitude(value)
    is_finite = (largest < INFINITY)[:, None]
    scale = tl.minimum(tl.div_rn(largest.to(tl.float32, bitcast=True), most), most_of_scale)
    scale = tl.where(scale < SMALLEST_SCALE, 0.0, scale)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)[:, None]
    scale = tl.where(largest < INFINITY, scale, float("nan"))
    store_scales(payload, first_block, size, scale, BLOCK, ROWS)
    scaled = tl.minimum(tl.maximum(tl.where(is_finite, value, 0.0) * inverse, -most), most)
    bits = scaled.to(tl.int32, bitcast=True)
    code = rounded(bits & 0x7FFFFFFF, MANTISSA, BIAS) | ((bits >> 24) & 128)
    code = tl.where(is_finite, code, 0)
    tl.store(payload + codes_at + first_byte + place, code.to(tl.uint8), is_there)
    if residual is not None:
        left_out = tl.where(is_finite, value - _of_code(code, MANTISSA, BIAS) * scale[:, None], old)
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
    MANTISSA: constexpr,
    BIAS: constexpr,
):
    start, size, first_block, first_byte = tile_of(table, ALIGNMENT)
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    total = nothing([ROWS, WIDTH])
    for _ in range(RANKS):
        scale = load_scales(payloads, first_block, size, BLOCK, ROWS)
        code = tl.load(payloads + codes_at + first_byte + place, is_there, other=0).to(tl.int32)
        total += _of_code(code, MANTISSA, BIAS) * scale[:, None]
        payloads += payload_bytes
    tl.store(out + start + place, total * factor, is_there)


def encode(
    compressor: FP8,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    most, form = compressor.largest_value, _FORMATS[compressor.float8]
    numbers = most, most_scale(most)
    return encode_blocks(_encode, compressor, bucket, residual, payload, segments, None, *numbers, **form)


def decode(
    compressor: FP8,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return decode_blocks(_decode, compressor, payloads, ranks, segments, out, **_FORMATS[compressor.float8])
