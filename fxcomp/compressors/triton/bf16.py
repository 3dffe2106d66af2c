"""bf16: the codec of `fxcomp/compressors/casts.py`, two functions.

    code(value)    bf16 rounded to nearest, ties to even, in an integer's lowest 16 bits
    value(code)    its value in fp32

Both use integers, because Triton's interpreter rounds ties of a cast down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors.casts import CastCompressor
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.triton.language import constexpr, jit, launch, tl
from fxcomp.compressors.triton.tiles import TILE, compensated, is_finite


def cast_kernels(
    code: Any, value: Any, *, divides: bool = False
) -> tuple[
    Callable[[CastCompressor, EncoderInput, Tensor], None], Callable[[CastCompressor, DecoderInput, Tensor], None]
]:

    def encode(compressor: CastCompressor, given: EncoderInput, payload: Tensor) -> None:
        elements = len(given.bucket)
        arguments = (given.bucket, given.residual, payload.view(torch.int16), elements)
        launch(_encode, -(-elements // TILE), *arguments, CODE=code, VALUE=value, TILE=TILE)

    def decode(compressor: CastCompressor, received: DecoderInput, out: Tensor) -> None:
        elements = len(out)
        arguments = (received.payloads.view(torch.int16), out, elements)
        launch(_decode, -(-elements // TILE), *arguments, VALUE=value, RANKS=received.ranks, DIVIDES=divides, TILE=TILE)

    return encode, decode


@jit
def _encode(bucket, residual, payload, elements, CODE: constexpr, VALUE: constexpr, TILE: constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    if first + TILE <= elements:  # the size is a constant here, so the compiler vectorises
        _encode_tile(bucket, residual, payload, first, TILE, CODE, VALUE, TILE)
    else:
        _encode_tile(bucket, residual, payload, first, elements - first, CODE, VALUE, TILE)


@jit
def _encode_tile(bucket, residual, payload, first, size, CODE: constexpr, VALUE: constexpr, TILE: constexpr):
    number = tl.arange(0, TILE)
    place, is_there = first + number, number < size
    value, old = compensated(bucket, residual, place, is_there)
    code = CODE(value)
    tl.store(payload + place, code.to(tl.int16), is_there)
    if residual is not None:
        sent = VALUE(code)
        tl.store(residual + place, tl.where(is_finite(sent), value - sent, old), is_there)


@jit
def _decode(payloads, out, elements, VALUE: constexpr, RANKS: constexpr, DIVIDES: constexpr, TILE: constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    if first + TILE <= elements:
        _decode_tile(payloads, out, elements, first, TILE, VALUE, RANKS, DIVIDES, TILE)
    else:
        _decode_tile(payloads, out, elements, first, elements - first, VALUE, RANKS, DIVIDES, TILE)


@jit
def _decode_tile(
    payloads, out, elements, first, size, VALUE: constexpr, RANKS: constexpr, DIVIDES: constexpr, TILE: constexpr
):
    number = tl.arange(0, TILE)
    place, is_there = first + number, number < size
    FIRST: constexpr = 1.0 / RANKS if DIVIDES and (RANKS & (RANKS - 1)) == 0 else 1.0
    total = VALUE(tl.load(payloads + place, is_there, other=0).to(tl.int32)) * FIRST
    for _ in range(1, RANKS):
        payloads += elements
        total += VALUE(tl.load(payloads + place, is_there, other=0).to(tl.int32)) * FIRST
    if not DIVIDES:
        total *= 1.0 / RANKS
    elif FIRST == 1.0:
        total = tl.div_rn(total, 1.0 * RANKS)
    tl.store(out + place, total, is_there)


@jit
def bf16_code(value):
    bits = value.to(tl.uint32, bitcast=True)
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)
    return (tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, nearest) >> 16).to(tl.int32)


@jit
def bf16_value(code):
    return (code << 16).to(tl.float32, bitcast=True)


encode, decode = cast_kernels(bf16_code, bf16_value)
