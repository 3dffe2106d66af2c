"""Send each value as IEEE half precision.

    payload = fp16(v), rounded to nearest, ties to even        decoded = fp32(payload)

Payload: one fp16 a value, 2n bytes. Linear: payloads can be summed on the wire, in fp16.

The bucket comes divided by the number of ranks, as every linear compressor's; only so does a sum of 60000 from each of
four ranks stay within fp16, which ends at 65504. What is larger becomes inf, so every rank sees it, and its residual
stays as it was. Below 6e-5 values lose precision, below 3e-8 they become zero; a scaled loss has its gradients above
that, and a residual keeps what is lost.

The relative squared error is 4e-8 for Gaussian and Laplace values of unit size, so no error feedback is needed.
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


@register
@dataclass(frozen=True, slots=True)
class FP16(Compressor):
    """Two bytes a value with three more bits of precision than bf16, and a range that a gradient can leave."""

    facts: ClassVar[Facts] = Facts(
        name="fp16",
        summary="half precision",
        payload="2n",
        payload_dtype=torch.float16,
        is_linear=True,
        bias=Bias.ROUNDING,
        feedback=Feedback.OPTIONAL,
        use="Where a scaled loss keeps gradients between 1e-4 and 1e4, and bf16 is too coarse.",
        avoid="Gradients of unknown size: bf16 has fp32's range for the same bytes.",
        source="IEEE 754 binary16, round to nearest even",
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
        value = bucket if residual is None else bucket + residual
        payload = value.to(torch.float16)
        left_out = None if residual is None else torch.where(payload.isfinite(), value - payload.float(), residual)
        return Compressed(payload, empty_like_none(bucket, left_out), empty_like_none(bucket, state))

    def decompress_reference(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> Tensor:
        return mean_over_ranks([payload.float() for payload in payloads.view(ranks, -1)])

    def encode_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        kernels.run("fxcomp_fp16_encode", bucket, residual, payload, len(payload))
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
        kernels.run("fxcomp_fp16_decode", payloads, ranks, len(out), out)
        return True
