"""Send the upper half of each fp32.

    payload = bf16(v), rounded to nearest, ties to even        decoded = fp32(payload)

Payload: one bf16 a value, 2n bytes. Linear: payloads can be summed on the wire, in bf16.

The relative squared error is 3e-6 whatever the distribution, so no error feedback is needed; given a residual, the
compressor feeds it back like the others. Unlike fp16 it has fp32's range, so no gradient overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors import kernels
from fxcomp.compressors.base import Compressed, Compressor, empty_like_none, mean_over_ranks
from fxcomp.compressors.facts import Bias, Facts, Feedback
from fxcomp.compressors.registration import register


def _compress(bucket: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    value = bucket if residual is None else bucket + residual
    payload = value.to(torch.bfloat16)
    if residual is None:
        return payload, bucket.new_empty(0)
    return payload, torch.where(payload.isfinite(), value - payload.float(), residual)


def _decompress(payloads: Tensor, ranks: int) -> Tensor:
    return mean_over_ranks([payload.float() for payload in payloads.view(ranks, -1)])


@register
@dataclass(frozen=True, slots=True)
class BF16(Compressor):
    """Two bytes a value, and the plain all_reduce."""

    facts: ClassVar[Facts] = Facts(
        name="bf16",
        summary="the upper half of each fp32",
        payload="2n",
        payload_dtype=torch.bfloat16,
        is_linear=True,
        bias=Bias.ROUNDING,
        feedback=Feedback.OPTIONAL,
        use="Always worth a try: half the bytes, no state, the plain all_reduce.",
        avoid="Where compute hides the dense collective anyway.",
        source="IEEE fp32 cut to bfloat16, round to nearest even",
    )

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(segments)

    def compress_reference(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> Compressed:
        payload, left_out = _compress(bucket, residual)
        return Compressed(payload, left_out, empty_like_none(bucket, state))

    def decompress_reference(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> Tensor:
        return _decompress(payloads, ranks)

    def encode_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        kernels.run("fxcomp_bf16_encode", bucket, residual, payload, len(payload))
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
        kernels.run("fxcomp_bf16_decode", payloads, ranks, len(out), out)
        return True
