"""Send one signed byte a value, and one fp32 scale a block.

    scale   = max|v| / 127 over the block
    code    = v / scale, rounded to nearest, ties to even, within -127..127
    decoded = code * scale

Payload, as bytes: the fp32 scales of all blocks, then the codes of all values, then zeros up to a multiple of four, so
that gathered payloads stay aligned. 4 * blocks + round_up(n, 4) bytes. Blocks start anew with each segment; the last
block of a segment may be short.

A block of zeros has scale 0. A block with a value that is not finite has scale NaN and codes 0: it decodes to NaN,
and its residual stays as it was.

127 levels on both sides keep the largest value exact; 128 on one side would make the other saturate. The relative
squared error is about 5e-5 for Gaussian values and 1e-4 for Laplace, so training follows the dense loss even without
error feedback; with it, nothing is lost at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxcomp.compressors import kernels
from fxcomp.compressors.base import BadCompressor, check_decode, check_encode, mean_over_ranks
from fxcomp.compressors.blocks import count_blocks, from_blocks, split, to_blocks
from fxcomp.compressors.registration import register_compress, register_decompress

DEFAULT_BLOCK = 512  # 2 KB of fp32 stay in the first-level cache between the two reads; scales add 1/128 byte a value


def compress_reference(
    bucket: Tensor, residual: Tensor | None, segments: Sequence[int], block: int
) -> tuple[Tensor, Tensor]:
    value = bucket if residual is None else bucket + residual
    rows = to_blocks(value, segments, block)
    largest = rows.abs().amax(dim=1, keepdim=True)
    is_finite = largest.isfinite()
    scale = torch.where(is_finite, largest / 127, torch.nan)
    codes = (rows / torch.where(scale > 0, scale, 1.0)).clamp(-127, 127).round()
    codes = torch.where(is_finite, codes, 0.0).to(torch.int8)

    code_bytes = from_blocks(codes, segments, block).view(torch.uint8)
    filling = code_bytes.new_zeros(-len(code_bytes) % 4)
    payload = torch.cat([scale.flatten().view(torch.uint8), code_bytes, filling])
    if residual is None:
        return payload, bucket.new_empty(0)
    left_out = torch.where(is_finite, rows - codes * scale, to_blocks(residual, segments, block))
    return payload, from_blocks(left_out, segments, block)


def decompress_reference(payloads: Tensor, ranks: int, segments: Sequence[int], block: int) -> Tensor:
    return mean_over_ranks([_decompress_one(payload, segments, block) for payload in payloads.view(ranks, -1)])


def _decompress_one(payload: Tensor, segments: Sequence[int], block: int) -> Tensor:
    scale_bytes, code_bytes, _ = split(payload, _sections(segments, block))
    scale = scale_bytes.clone().view(torch.float32).view(-1, 1)
    codes = to_blocks(code_bytes.view(torch.int8).float(), segments, block)
    return from_blocks(codes * scale, segments, block)


def _sections(segments: Sequence[int], block: int) -> list[int]:
    """Bytes of scales, of codes and of filling."""
    elements = sum(segments)
    return [4 * count_blocks(segments, block), elements, -elements % 4]


def _make(block: int) -> Int8:
    return Int8(block)


@dataclass(frozen=True, slots=True)
class Int8:
    """A quarter of the bytes, at an error that training does not notice."""

    block: int = DEFAULT_BLOCK

    name: ClassVar[str] = "int8"
    is_linear: ClassVar[bool] = False
    needs_error_feedback: ClassVar[bool] = True
    payload_dtype: ClassVar[torch.dtype] = torch.uint8
    compress_op: ClassVar[OpOverload] = register_compress("int8", "int block", _make)
    decompress_op: ClassVar[OpOverload] = register_decompress("int8", "int block", _make)

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadCompressor(f"int8 needs a block of at least one value, not block={self.block}")

    @property
    def parameters(self) -> tuple[int | float, ...]:
        return (self.block,)

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(_sections(segments, self.block))

    def payload_bytes(self, segments: Sequence[int]) -> int:
        return self.payload_elements(segments)

    def encode(self, bucket: Tensor, residual: Tensor | None, payload: Tensor, segments: Sequence[int]) -> None:
        check_encode(self, bucket, residual, payload, segments)
        if kernels.can_run_on(bucket):
            kernels.run("fxcomp_int8_encode", bucket, residual, payload, tuple(segments), len(segments), self.block)
            return
        new_payload, new_residual = compress_reference(bucket, residual, segments, self.block)
        payload.copy_(new_payload)
        if residual is not None:
            residual.copy_(new_residual)

    def decode(self, payloads: Tensor, ranks: int, segments: Sequence[int], out: Tensor) -> None:
        check_decode(self, payloads, ranks, segments, out)
        if kernels.can_run_on(out):
            kernels.run("fxcomp_int8_decode", payloads, ranks, tuple(segments), len(segments), self.block, out)
        else:
            out.copy_(decompress_reference(payloads, ranks, segments, self.block))

    def __str__(self) -> str:
        return "int8" if self.block == DEFAULT_BLOCK else f"int8(block={self.block})"
