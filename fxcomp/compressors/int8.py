"""Send one signed byte per value, and one fp32 scale per block.

    scale   = max|v| / 127 over the block
    code    = v / scale, rounded to nearest, ties to even, within -127..127
            = floor(v / scale + u), u uniform in [0, 1), if stochastic
    decoded = code * scale

`block_codes.py` defines blocks, payload and the treatment of values that are not finite. Codes are two's complement.

The relative squared error is about 5.5e-5 for Gaussian values and 1.2e-4 for Laplace, twice that if stochastic.
Training follows the dense loss without error feedback (docs/benchmarks/convergence.md), so feedback is optional.
Rounding to nearest loses values below half a step, at most (B - 1) / (4 127^2) of the squared norm of a block of B
values: 0.8 % for B = 512. Larger blocks need feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxcomp.compressors.block_codes import SymmetricCompressor, feedback_at_random
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter

DEFAULT_BLOCK = 512  # 2 KB of fp32 stay in the L1 cache between two reads; scales add 1/128 byte per value


@register
@dataclass(frozen=True, slots=True)
class Int8(SymmetricCompressor):
    """One byte a value: a quarter of fp32, accurate enough to train without error feedback."""

    block: int = DEFAULT_BLOCK
    stochastic: bool = False

    facts: ClassVar[Facts] = Facts(
        name="int8",
        summary="eight bits per value, one scale per block",
        payload="n + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.ROUNDING,
        feedback=Feedback.OPTIONAL,
        parameters=(
            Parameter(
                "block", "values that share a scale; rounding to nearest needs error feedback above 512", 1, 65536
            ),
            Parameter("stochastic", "round at random, which is unbiased", 0, 1),
        ),
        state="16 a segment if stochastic",
        state_dtype=torch.int64,
        grain="block",
        use="The first choice where bf16 does not save enough.",
        avoid="Where a quarter of the bytes still takes too long.",
        source="block-wise symmetric quantisation",
    )

    @property
    def bits(self) -> int:
        return 8

    @property
    def feedback(self) -> Feedback:
        if self.stochastic:
            return feedback_at_random(self.block, self.levels)
        return Feedback.OPTIONAL if self.block <= DEFAULT_BLOCK else Feedback.REQUIRED
