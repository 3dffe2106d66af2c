"""Send one bit a value, and one fp32 scale a block.

    scale   = mean|v| over the block
    bit     = v >= 0
    decoded = scale where the bit is set, -scale where it is not

Payload, as bytes: the fp32 scales of all blocks, then the bits, the first value in the lowest bit of the first byte,
then zeros up to a multiple of four. The bits of a segment start with a new byte. 4 * blocks + round_up(sum of
ceil(n / 8) over the segments, 4) bytes. Blocks start anew with each segment; the last one of a segment may be short.

The mean of magnitudes is the scale of least squared error for given signs. What it leaves out is
1 - (mean|v|)^2 / mean(v^2): 0.36 for Gaussian values, 0.50 for Laplace. So error feedback is a must. A scale a block
instead of one for everything costs 1/16 bit a value and lets one pass do all the work (EF-SignSGD, Karimireddy 2019).

A block whose magnitudes do not sum to a finite value has scale NaN and bits 0: it decodes to NaN, and its residual
stays as it was. The sum has a fixed order: 64 strided lanes, folded in halves; the result divided by the block's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors import kernels
from fxcomp.compressors.base import BadCompressor, Compressed, Compressor, empty_like_none, mean_over_ranks
from fxcomp.compressors.blocks import block_sizes, count_blocks, from_blocks, split, to_blocks
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter
from fxcomp.compressors.registration import register

DEFAULT_BLOCK = 512
_LANES = 64  # the same number as in csrc/sign.cpp


def _compress(bucket: Tensor, residual: Tensor | None, segments: Sequence[int], block: int) -> tuple[Tensor, Tensor]:
    value = bucket if residual is None else bucket + residual
    rows = to_blocks(value, segments, block)
    mean = _sum_magnitudes(rows) / block_sizes(segments, block, device=rows.device)
    is_finite = mean.isfinite()
    scale = torch.where(is_finite, mean, torch.nan)
    is_positive = rows >= 0

    bits = from_blocks(is_positive & is_finite, segments, block)
    bit_bytes = torch.cat([bits.new_empty(0, dtype=torch.uint8), *map(_pack, split(bits, segments))])
    filling = bit_bytes.new_zeros(-len(bit_bytes) % 4)
    payload = torch.cat([scale.flatten().view(torch.uint8), bit_bytes, filling])
    if residual is None:
        return payload, bucket.new_empty(0)
    left_out = rows - torch.where(is_positive, scale, -scale)
    left_out = torch.where(is_finite, left_out, to_blocks(residual, segments, block))
    return payload, from_blocks(left_out, segments, block)


def _decompress(payloads: Tensor, ranks: int, segments: Sequence[int], block: int) -> Tensor:
    return mean_over_ranks([_decompress_one(payload, segments, block) for payload in payloads.view(ranks, -1)])


def _decompress_one(payload: Tensor, segments: Sequence[int], block: int) -> Tensor:
    scale_bytes, bit_bytes, _ = split(payload, _sections(segments, block))
    scale = scale_bytes.clone().view(torch.float32).view(-1, 1)
    pieces = split(bit_bytes, [_bytes_of_bits(size) for size in segments])
    bits = [_unpack(piece)[:size] for piece, size in zip(pieces, segments, strict=True)]
    rows = to_blocks(torch.cat([bit_bytes.new_empty(0, dtype=torch.bool), *bits]), segments, block)
    return from_blocks(torch.where(rows, scale, -scale), segments, block)


def _sum_magnitudes(rows: Tensor) -> Tensor:
    magnitudes = pad(rows.abs(), (0, -rows.shape[1] % _LANES))
    lanes = rows.new_zeros(len(rows), _LANES)
    for start in range(0, magnitudes.shape[1], _LANES):
        lanes = lanes + magnitudes[:, start : start + _LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


def _pack(bits: Tensor) -> Tensor:
    eights = pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (eights.to(torch.uint8) << _shifts(bits)).sum(dim=1, dtype=torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    return ((packed.view(-1, 1) >> _shifts(packed)) & 1).flatten().bool()


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _bytes_of_bits(size: int) -> int:
    return -(-size // 8)


def _sections(segments: Sequence[int], block: int) -> list[int]:
    """Bytes of scales, of bits and of filling."""
    bit_bytes = sum(map(_bytes_of_bits, segments))
    return [4 * count_blocks(segments, block), bit_bytes, -bit_bytes % 4]


@register
@dataclass(frozen=True, slots=True)
class Sign(Compressor):
    """A thirtieth of the bytes; only with error feedback."""

    block: int = DEFAULT_BLOCK

    facts: ClassVar[Facts] = Facts(
        name="sign",
        summary="the sign of each value, a scale a block",
        payload="⌈n/8⌉ + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(Parameter("block", "values that share a scale", 8, 65536),),
        use="Very slow links, with error feedback and stochastic gradient descent.",
        avoid="Adam, and learning rates near the edge of stability.",
        source="Karimireddy et al. 2019, error feedback fixes SignSGD; a scale a block",
    )

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        if self.block % 8:
            raise BadCompressor(f"{self.name} needs a block of whole bytes, a multiple of 8, not block={self.block}")

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(_sections(segments, self.block))

    def compress_reference(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> Compressed:
        payload, left_out = _compress(bucket, residual, segments, self.block)
        return Compressed(payload, left_out, empty_like_none(bucket, state))

    def decompress_reference(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> Tensor:
        return _decompress(payloads, ranks, segments, self.block)

    def encode_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        kernels.run("fxcomp_sign_encode", bucket, residual, payload, tuple(segments), len(segments), self.block)
        return True

    def decode_on_cpu(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        out: Tensor,
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> bool:
        kernels.run("fxcomp_sign_decode", payloads, ranks, tuple(segments), len(segments), self.block, out)
        return True
