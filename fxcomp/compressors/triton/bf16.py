"""The upper half of each fp32: the bits of `fxcomp/compressors/bf16.py`.

Rounds with integers, for a cast's bits depend on where it runs: Triton's interpreter breaks ties downwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.bf16 import BF16
from fxcomp.compressors.triton.blocks import compensated
from fxcomp.compressors.triton.language import Value, constexpr, jit, launch, tl

TILE = 2048  # 16 values a thread of 4 warps  # assumed


@jit
def _rounded(value: Value):
    """To the nearest bfloat16, ties to even, as the upper half of 32 bits; a NaN stays one."""
    bits = value.to(tl.uint32, bitcast=True)
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, nearest & 0xFFFF0000).to(tl.uint32)


@jit
def _load(payload: Value, place: Value, is_there: Value):
    code = tl.load(payload + place, is_there, other=0).to(tl.int32)
    return (code << 16).to(tl.float32, bitcast=True)


@jit
def _encode(bucket: Value, residual: Value, payload: Value, elements: Value, TILE: constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_there = place < elements
    value, old = compensated(bucket, residual, place, is_there)
    rounded = _rounded(value)
    tl.store(payload + place, (rounded >> 16).to(tl.uint16).to(tl.int16, bitcast=True), is_there)
    if residual is not None:
        is_finite = (rounded & 0x7F800000) < 0x7F800000
        left_out = tl.where(is_finite, value - rounded.to(tl.float32, bitcast=True), old)
        tl.store(residual + place, left_out, is_there)


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
    compressor: BF16,
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
    compressor: BF16,
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
