"""Send the upper half of each fp32.

    payload = bf16(v), rounded to nearest, ties to even        decoded = fp32(payload)

Payload: one bf16 a value, 2n bytes. Linear: payloads can be summed on the wire, in bf16.

The relative squared error is 3e-6 whatever the distribution, so no error feedback is needed; given a residual, the
compressor feeds it back like the others. Unlike fp16 it has fp32's range, so no gradient overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxcomp.compressors.casts import CastCompressor
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Case, Facts, Feedback


@register
@dataclass(frozen=True, slots=True)
class BF16(CastCompressor):
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
        case=Case.MODE,
    )
