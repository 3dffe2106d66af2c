"""Four bits a value with one fp32 scale a block: the bits of `fxcomp/compressors/int4.py`."""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.block_codes import most_scale
from fxcomp.compressors.int4 import Int4
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

MOST_SCALE = constant(most_scale(7))


@jit
def _places_of_pairs(size: Value, BLOCK: constexpr, WIDTH: constexpr, ROWS: constexpr):
    """Where the byte of each two values of a tile lies behind its first one, and whether there is one."""
    row = tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, WIDTH // 2)[None, :]
    place = row * (BLOCK // 2) + pair
    return place, (2 * place < size) & (2 * pair < BLOCK)


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
    scale = tl.minimum(tl.div_rn(largest.to(tl.float32, bitcast=True), 7.0), MOST_SCALE)
    scale = tl.where(is_finite, scale, float("nan"))
    if state is None:
        rounded, code = nearest_codes(value, scale, 7)
    else:
        rounded, code = random_codes(value, scale, draw(state, table, place), 7)
    store_scales(payload, first_block, size, scale, BLOCK, ROWS)

    code = tl.where(is_finite[:, None], code, 0).to(tl.uint8, bitcast=True)
    low, high = tl.split(tl.reshape(code, [ROWS, WIDTH // 2, 2]))
    pair, is_pair = _places_of_pairs(size, BLOCK, WIDTH, ROWS)
    tl.store(payload + codes_at + first_byte + pair, (low & 15) | (high << 4), is_pair)
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
    pair, is_pair = _places_of_pairs(size, BLOCK, WIDTH, ROWS)
    low = nothing([ROWS, WIDTH // 2])
    high = low
    for _ in range(RANKS):
        scale = load_scales(payloads, first_block, size, BLOCK, ROWS)[:, None]
        codes = tl.load(payloads + codes_at + first_byte + pair, is_pair, other=0).to(tl.int32)
        low += (((codes & 15) ^ 8) - 8).to(tl.float32) * scale
        high += (((codes >> 4) ^ 8) - 8).to(tl.float32) * scale
        payloads += payload_bytes
    total = tl.reshape(tl.join(low, high), [ROWS, WIDTH])
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    tl.store(out + start + place, total * factor, is_there)


def encode(
    compressor: Int4,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    return encode_blocks(_encode, compressor, bucket, residual, payload, segments, state)


def decode(
    compressor: Int4,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return decode_blocks(_decode, compressor, payloads, ranks, segments, out)
