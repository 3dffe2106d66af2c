"""Block quantisers: int8, int4, int2 and sign. `fxcomp/compressors/block_codes.py` defines the payload.

A codec is three functions:

    scale(value, bucket, residual, state, size, MOST, SHAPE)    each block's scale, not finite if a value is not
    code(value, scale, drawn, MOST)                             each value's code and decoded value
    value(code, scale, BITS, MOST)                              the decoded value of a code's bits

MOST is the value of the largest code, in units of the scale. `drawn` has random numbers in [0, 1), or is None without
stochastic rounding. To sum in a fixed order, a codec reads the values again, from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors.block_codes import BlockCompressor, count_blocks, most_scale
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.triton.language import constant, constexpr, jit, raise_step, sum_of_columns, tl
from fxcomp.compressors.triton.tiles import (
    Tiles,
    blocks_of,
    compensated,
    draw,
    is_finite,
    lies_well,
    magnitude_of,
    nothing,
    own_of,
    places,
    rows_of,
    tile_of,
    tiles_of,
)

ROUND = constant(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest even integer
Pieces = tuple[tuple[int, ...], ...]
LANES = constant(64)  # the same number as in block_codes.py


def block_kernels(scale: Any, code: Any, value: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return `encode` and `decode` for a codec. Both can process all pieces of a bucket in one launch."""

    def encode(compressor: BlockCompressor, given: EncoderInput, payload: Tensor, pieces: Pieces | None = None) -> None:
        tiles, constants = _divide(compressor, pieces or (given.segments,), 1, given.bucket.device)
        largest = most_scale(compressor.largest_value)
        arguments = (given.bucket, given.residual, payload, given.state, largest)
        tiles.launch(_encode, *arguments, **constants, SCALE=scale, CODE=code)
        raise_step(given.state)

    def decode(compressor: BlockCompressor, received: DecoderInput, out: Tensor, pieces: Pieces | None = None) -> None:
        in_pieces, ranks = pieces or (received.segments,), received.ranks
        tiles, constants = _divide(compressor, in_pieces, ranks if len(in_pieces) > 1 else 1, out.device)
        tiles.launch(_decode, received.payloads, out, **constants, VALUE=value, RANKS=ranks)

    return encode, decode


@cache
def _divide(
    compressor: BlockCompressor, pieces: Pieces, ranks: int, device: torch.device
) -> tuple[Tiles, dict[str, Any]]:
    """Return the tiles and the compile-time constants.

    Table columns: first value, number of values, index of the first scale in the payload as fp32, index of the first
    code byte, segment index, first value's index in the segment, padding bytes after the tile, payload bytes per rank.
    """
    block, values_per_byte = compressor.block, 8 // compressor.bits
    table: list[tuple[int, ...]] = []
    values_at = payload_at = segment_at = 0
    for piece in pieces:
        codes = sum(-(-size // values_per_byte) for size in piece)
        scales, filling = 4 * count_blocks(piece, block), -codes % 4
        payload_bytes = scales + codes + filling
        rows = list(rows_of(piece, block, values_per_byte))
        for row, (start, values, first_block, first_byte, segment, place, *_) in enumerate(rows):
            at = values_at + start, values, payload_at // 4 + first_block, payload_at + scales + first_byte
            after = filling if row == len(rows) - 1 else 0
            table.append((*at, segment_at + segment, place, after, payload_bytes))
        values_at += sum(piece)
        payload_at += ranks * payload_bytes
        segment_at += len(piece)
    constants: dict[str, Any] = {"BITS": compressor.bits, "MOST": float(compressor.largest_value)}
    return tiles_of(block, table, device), constants


@jit
def _encode(
    table,
    bucket,
    residual,
    payload,
    state,
    most_scale,
    BITS: constexpr,
    MOST: constexpr,
    SCALE: constexpr,
    CODE: constexpr,
    SHAPE: constexpr,
):
    if lies_well(table, SHAPE):
        _encode_tile(table, bucket, residual, payload, state, most_scale, SHAPE[4], BITS, MOST, SCALE, CODE, SHAPE)
    else:
        _encode_tile(table, bucket, residual, payload, state, most_scale, SHAPE[3], BITS, MOST, SCALE, CODE, SHAPE)


@jit
def _encode_tile(
    table,
    bucket,
    residual,
    payload,
    state,
    most_scale,
    ALIGNMENT: constexpr,
    BITS: constexpr,
    MOST: constexpr,
    SCALE: constexpr,
    CODE: constexpr,
    SHAPE: constexpr,
):
    start, size, first_block, first_byte = tile_of(table, ALIGNMENT)
    filling, _ = own_of(table)
    bucket += start
    if residual is not None:
        residual += start
    place, is_there = places(size, SHAPE)
    value, old = compensated(bucket, residual, place, is_there)
    scale = SCALE(value, bucket, residual, state, size, MOST, SHAPE)
    is_sent = is_finite(scale)
    scale = tl.minimum(scale, most_scale)
    block, is_block = blocks_of(size, SHAPE)
    scales = payload.to(tl.pointer_type(tl.float32)) + first_block
    tl.store(scales + block, tl.where(is_sent, scale, float("nan")), is_block)

    drawn = None
    if state is not None:
        drawn = draw(state, table, place)
    code, sent = CODE(value, scale[:, None], drawn, MOST)
    is_sent = is_sent[:, None]
    code = tl.where(is_sent, code, 0)
    if BITS < 8:
        code = tl.where(is_there, code, 0) & ((1 << BITS) - 1)
    _store_codes(payload + first_byte, code, size, BITS, SHAPE)
    if residual is not None:
        tl.store(residual + place, tl.where(is_sent, value - sent, old), is_there)

    after = tl.arange(0, 4)
    end = first_byte + (size * BITS + 7) // 8
    tl.store(payload + end + after, tl.zeros([4], tl.uint8), after < filling)


@jit
def _decode(
    table, payloads, out, BITS: constexpr, MOST: constexpr, VALUE: constexpr, RANKS: constexpr, SHAPE: constexpr
):
    if lies_well(table, SHAPE):
        _decode_tile(table, payloads, out, SHAPE[4], BITS, MOST, VALUE, RANKS, SHAPE)
    else:
        _decode_tile(table, payloads, out, SHAPE[3], BITS, MOST, VALUE, RANKS, SHAPE)


@jit
def _decode_tile(
    table,
    payloads,
    out,
    ALIGNMENT: constexpr,
    BITS: constexpr,
    MOST: constexpr,
    VALUE: constexpr,
    RANKS: constexpr,
    SHAPE: constexpr,
):
    WIDTH: constexpr = SHAPE[1]
    ROWS: constexpr = SHAPE[2]
    start, size, first_block, first_byte = tile_of(table, ALIGNMENT)
    _, payload_bytes = own_of(table)
    block, is_block = blocks_of(size, SHAPE)
    total = nothing([ROWS, WIDTH])
    for _ in range(RANKS):
        scale = tl.load(payloads.to(tl.pointer_type(tl.float32)) + first_block + block, is_block, other=0.0)
        code = _load_codes(payloads + first_byte, size, BITS, SHAPE)
        total += VALUE(code, scale[:, None], BITS, MOST)
        payloads += payload_bytes
    place, is_there = places(size, SHAPE)
    tl.store(out + start + place, total * (1.0 / RANKS), is_there)


@jit
def _bytes_of(size, BITS: constexpr, SHAPE: constexpr):
    BLOCK: constexpr = SHAPE[0]
    WIDTH: constexpr = SHAPE[1]
    ROWS: constexpr = SHAPE[2]
    IN_A_BYTE: constexpr = 8 // BITS
    column = tl.arange(0, WIDTH // IN_A_BYTE)[None, :]
    place = tl.arange(0, ROWS)[:, None] * (BLOCK // IN_A_BYTE) + column
    return place, (IN_A_BYTE * place < size) & (IN_A_BYTE * column < BLOCK)


@jit
def _store_codes(codes, code, size, BITS: constexpr, SHAPE: constexpr):
    WIDTH: constexpr = SHAPE[1]
    ROWS: constexpr = SHAPE[2]
    IN_A_BYTE: constexpr = 8 // BITS
    place, is_byte = _bytes_of(size, BITS, SHAPE)
    byte = code
    if IN_A_BYTE > 1:
        shift = (BITS * tl.arange(0, IN_A_BYTE))[None, None, :]
        byte = tl.sum(tl.reshape(code, [ROWS, WIDTH // IN_A_BYTE, IN_A_BYTE]) << shift, axis=2)
    tl.store(codes + place, byte.to(tl.uint8), is_byte)


@jit
def _load_codes(codes, size, BITS: constexpr, SHAPE: constexpr):
    WIDTH: constexpr = SHAPE[1]
    ROWS: constexpr = SHAPE[2]
    place, is_byte = _bytes_of(size, BITS, SHAPE)
    code = tl.load(codes + place, is_byte, other=0).to(tl.int32)
    if BITS < 8:
        shift = (BITS * tl.arange(0, 8 // BITS))[None, None, :]
        code = tl.reshape((code[:, :, None] >> shift) & ((1 << BITS) - 1), [ROWS, WIDTH])
    return code


# Parts of codecs


@jit
def largest_magnitude(value):
    """Return the largest |v| of each row, not finite if a value is not."""
    return tl.max(magnitude_of(value), axis=1).to(tl.float32, bitcast=True)


@jit
def mean_magnitude(bucket, residual, size, SHAPE: constexpr):
    """Return mean |v| of each block, summed in the order of block_codes.py."""
    BLOCK: constexpr = SHAPE[0]
    ROWS: constexpr = SHAPE[2]
    lanes = tl.zeros([ROWS, LANES], tl.float32)
    for first in range(0, BLOCK, LANES):
        column = first + tl.arange(0, LANES)[None, :]
        place = tl.arange(0, ROWS)[:, None] * BLOCK + column
        value, _ = compensated(bucket, residual, place, (place < size) & (column < BLOCK))
        lanes += tl.abs(value)
    if residual is not None:
        tl.debug_barrier()  # other threads may overwrite the values read above
    values = tl.maximum(tl.minimum(size - tl.arange(0, ROWS) * BLOCK, BLOCK), 1)
    return tl.div_rn(sum_of_columns(lanes, ROWS, LANES), values.to(tl.float32))


@jit
def quotient_of(value, scale):
    """Return v / scale; v where the scale is zero."""
    return tl.div_rn(value, tl.where(scale > 0, scale, 1.0))


@jit
def clamped(value, most):
    return tl.minimum(tl.maximum(value, -most), most)


@jit
def whole_below(value):
    """Return floor(value) if |value| < 2^22. Triton's own floor treats denormals as zero."""
    nearest = (value + ROUND) - ROUND
    return tl.where(nearest > value, nearest - 1.0, nearest)
