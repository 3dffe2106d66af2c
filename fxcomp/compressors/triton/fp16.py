"""Half precision: the bits of `fxcomp/compressors/fp16.py`, rounded with integers as bf16's are."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.fp16 import FP16
from fxcomp.compressors.triton.blocks import INFINITY, compensated
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.small_floats import rounded, widened

TILE = 2048  # 16 values a thread of 4 warps  # assumed
OVERFLOW = constant(0x477FF000)  # 65520, from which on rounding gives infinity


@jit
def _to_half(value: Value):
    """The code, as int32."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    other = tl.where(magnitude > INFINITY, 0x7E00, 0x7C00)
    return tl.where(magnitude < OVERFLOW, rounded(magnitude, 10, 15), other) | ((bits >> 16) & 0x8000)


@jit
def _of_half(code: Value):
    magnitude = code & 0x7FFF
    finite = widened(magnitude, 10, 15).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 0x7C00, finite, (magnitude << 13) | INFINITY) | ((code & 0x8000) << 16)
    return bits.to(tl.float32, bitcast=True)


@jit
def _load(payload: Value, place: Value, is_there: Value):
    return _of_half(tl.load(payload + place, is_there, other=0).to(tl.int32))


@jit
def _encode(bucket: Value, residual: Value, payload: Value, elements: Value, TILE: constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_there = place < elements
    value, old = compensated(bucket, residual, place, is_there)
    code = _to_half(value)
    tl.store(payload + place, code.to(tl.int16), is_there)
    if residual is not None:
        is_finite = (code & 0x7FFF) < 0x7C00
        tl.store(residual + place, tl.where(is_finite, value - _of_half(code), old), is_there)


@jit
def _decode(payloads: Value, out: Value, elements: Value, factor: Value, RANKS: constexpr, TILE: constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_there = place < elements
    total = _load(payloads, place, is_there)
    for _ in range(1, RANKS):
        payloads += elements
        total += _load(payloads, place, is_there)
    tl.store(out + place, total * factor, is_there)


def encode(
    compressor: FP16,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    codes = payload.view(torch.int16)
    launch(_encode, -(-len(bucket) // TILE), bucket, residual, codes, len(bucket), TILE=TILE)
    return True


def decode(
    compressor: FP16,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    codes = payloads.view(torch.int16)
    launch(_decode, -(-len(out) // TILE), codes, out, len(out), 1.0 / ranks, RANKS=ranks, TILE=TILE)
    return True
