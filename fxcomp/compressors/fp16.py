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

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxcomp.compressors.casts import CastCompressor
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback


@register
@dataclass(frozen=True, slots=True)
class FP16(CastCompressor):
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
