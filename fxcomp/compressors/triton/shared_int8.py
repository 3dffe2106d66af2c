"""One signed byte a value on scales that the ranks share: the bits of `fxcomp/compressors/shared_int8.py`."""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.block_codes import most_scale
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.shared_int8 import SharedInt8
from fxcomp.compressors.triton.blocks import ROUND, clamped, quotient_of
from fxcomp.compressors.triton.language import constexpr, jit, tl
from fxcomp.compressors.triton.randomness import raise_step
from fxcomp.compressors.triton.tiles import (
    INFINITY,
    blocks_of,
    compensated,
    cut,
    draw,
    is_finite,
    magnitude_of,
    nothing,
    places,
    tile_of,
)


def propose(compressor: SharedInt8, given: EncoderInput, out: Tensor) -> None:
    tiles = cut(given.segments, compressor.block, given.bucket.device)
    tiles.launch(_propose, given.bucket, given.residual, out)


def encode(compressor: SharedInt8, given: EncoderInput, payload: Tensor) -> None:
    levels, tiles = compressor.levels, cut(given.segments, compressor.block, given.bucket.device)
    arguments = (given.bucket, given.residual, payload, given.state, given.agreed, float(levels), most_scale(levels))
    tiles.launch(_encode, *arguments)
    raise_step(given.state)


def decode(compressor: SharedInt8, received: DecoderInput, out: Tensor) -> None:
    levels, tiles = compressor.levels, cut(received.segments, compressor.block, out.device)
    arguments = (received.payloads, received.agreed, out, len(out), float(levels), most_scale(levels))
    tiles.launch(_decode, *arguments, RANKS=received.ranks)


@jit
def _propose(table, bucket, residual, proposal, SHAPE: constexpr):
    start, size, first_block, _ = tile_of(table, SHAPE)
    place, is_there = places(size, SHAPE)
    value, _ = compensated(bucket, residual, start + place, is_there)
    largest = tl.minimum(tl.max(magnitude_of(value), axis=1), INFINITY).to(tl.float32, bitcast=True)
    block, is_block = blocks_of(size, SHAPE)
    tl.store(proposal + first_block + block, largest, is_block)


@jit
def _scales(agreed, first_block, size, levels, most_scale, SHAPE: constexpr):
    """Return the scales of a tile's blocks as a column, and which of them are finite."""
    block, is_block = blocks_of(size, SHAPE)
    largest = tl.load(agreed + first_block + block, is_block, other=0.0)
    is_sent = is_finite(largest)
    scale = tl.where(is_sent, tl.minimum(tl.div_rn(largest, levels), most_scale), float("nan"))
    return scale[:, None], is_sent[:, None]


@jit
def _encode(table, bucket, residual, payload, state, agreed, levels, most_scale, SHAPE: constexpr):
    start, size, first_block, _ = tile_of(table, SHAPE)
    place, is_there = places(size, SHAPE)
    value, old = compensated(bucket, residual, start + place, is_there)
    scale, is_sent = _scales(agreed, first_block, size, levels, most_scale, SHAPE)
    quotient = clamped(quotient_of(value, scale), levels)
    code = (quotient + ROUND) - ROUND
    if state is not None:
        above = quotient - code
        drawn = draw(state, table, place)
        code = code + (drawn < above).to(tl.float32) - (drawn < -above).to(tl.float32)
    code = tl.where(is_sent, code, 0.0)
    tl.store(payload + start + place, code.to(tl.int32).to(tl.int8), is_there)
    if residual is not None:
        tl.store(residual + start + place, tl.where(is_sent, value - code * scale, old), is_there)


@jit
def _decode(table, payloads, agreed, out, elements, levels, most_scale, RANKS: constexpr, SHAPE: constexpr):
    WIDTH: constexpr = SHAPE[1]
    ROWS: constexpr = SHAPE[2]
    start, size, first_block, _ = tile_of(table, SHAPE)
    place, is_there = places(size, SHAPE)
    scale, _ = _scales(agreed, first_block, size, levels, most_scale, SHAPE)
    total = nothing([ROWS, WIDTH])
    for _ in range(RANKS):
        total += tl.load(payloads + start + place, is_there, other=0).to(tl.float32) * scale
        payloads += elements
    tl.store(out + start + place, total * (1.0 / RANKS), is_there)
