"""One signed byte a value on scales that the ranks share: the bits of `fxcomp/compressors/shared_int8.py`."""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.block_codes import most_scale
from fxcomp.compressors.shared_int8 import SharedInt8
from fxcomp.compressors.triton.blocks import (
    INFINITY,
    ROUND,
    compensated,
    cut,
    draw,
    largest_magnitude,
    nothing,
    places,
    tile_of,
)
from fxcomp.compressors.triton.language import Value, constexpr, jit, launch, tl
from fxcomp.compressors.triton.randomness import raise_step


@jit
def _propose(
    bucket: Value,
    residual: Value,
    proposal: Value,
    table: Value,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
):
    start, size, first_block, _ = tile_of(table, ALIGNMENT)
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    value, _ = compensated(bucket, residual, start + place, is_there)
    largest = tl.minimum(largest_magnitude(value), INFINITY).to(tl.float32, bitcast=True)
    row = tl.arange(0, ROWS)
    tl.store(proposal + first_block + row, largest, row * BLOCK < size)


@jit
def _scales(
    agreed: Value, first_block: Value, size: Value, levels: Value, most: Value, BLOCK: constexpr, ROWS: constexpr
):
    """Of a tile's blocks, and which of them are finite."""
    row = tl.arange(0, ROWS)
    largest = tl.load(agreed + first_block + row, row * BLOCK < size, other=0.0)
    is_finite = (largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    scale = tl.minimum(tl.div_rn(largest, levels), most)
    return tl.where(is_finite, scale, float("nan"))[:, None], is_finite[:, None]


@jit
def _encode(
    bucket: Value,
    residual: Value,
    payload: Value,
    state: Value,
    agreed: Value,
    table: Value,
    levels: Value,
    most: Value,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
):
    start, size, first_block, _ = tile_of(table, ALIGNMENT)
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    value, old = compensated(bucket, residual, start + place, is_there)
    scale, is_finite = _scales(agreed, first_block, size, levels, most, BLOCK, ROWS)
    quotient = tl.div_rn(value, tl.where(scale > 0, scale, 1.0))
    quotient = tl.minimum(tl.maximum(quotient, -levels), levels)
    code = (quotient + ROUND) - ROUND
    if state is not None:
        above = quotient - code
        drawn = draw(state, table, place)
        code = code + (drawn < above).to(tl.float32) - (drawn < -above).to(tl.float32)
    code = tl.where(is_finite, code, 0.0)
    tl.store(payload + start + place, code.to(tl.int32).to(tl.int8), is_there)
    if residual is not None:
        tl.store(residual + start + place, tl.where(is_finite, value - code * scale, old), is_there)


@jit
def _decode(
    payloads: Value,
    agreed: Value,
    out: Value,
    table: Value,
    elements: Value,
    levels: Value,
    most: Value,
    factor: Value,
    RANKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
):
    start, size, first_block, _ = tile_of(table, ALIGNMENT)
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    scale, _ = _scales(agreed, first_block, size, levels, most, BLOCK, ROWS)
    total = nothing([ROWS, WIDTH])
    for _ in range(RANKS):
        total += tl.load(payloads + start + place, is_there, other=0).to(tl.float32) * scale
        payloads += elements
    tl.store(out + start + place, total * factor, is_there)


def propose(
    compressor: SharedInt8,
    bucket: Tensor,
    residual: Tensor | None,
    segments: tuple[int, ...],
    state: Tensor | None,
    out: Tensor,
) -> bool:
    tiles = cut(segments, compressor.block, 1, bucket.device)
    launch(_propose, len(tiles), bucket, residual, out, tiles.table, warps=tiles.warps, **tiles.constants)
    return True


def _numbers(compressor: SharedInt8) -> tuple[float, float]:
    return float(compressor.levels), most_scale(compressor.levels)


def encode(
    compressor: SharedInt8,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    tiles = cut(segments, compressor.block, 1, bucket.device)
    arguments = (bucket, residual, payload, state, agreed, tiles.table, *_numbers(compressor))
    launch(_encode, len(tiles), *arguments, warps=tiles.warps, **tiles.constants)
    raise_step(state)
    return True


def decode(
    compressor: SharedInt8,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    tiles = cut(segments, compressor.block, 1, out.device)
    arguments = (payloads, agreed, out, tiles.table, len(out), *_numbers(compressor), 1.0 / ranks)
    launch(_decode, len(tiles), *arguments, RANKS=ranks, warps=tiles.warps, **tiles.constants)
    return True
