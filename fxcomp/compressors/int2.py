"""Send two bits per value, and one fp32 scale per block.

    scale   = 1.5 mean|v| over the block                    max|v| / 1.5 if stochastic
    code    = 0 1 2 3 for v <= -scale, < 0, < scale, other  floor(v / scale + 1.5 + u), u uniform in [0, 1)
    decoded = (code - 1.5) * scale

`block_codes.py` defines blocks and payload. A block is a multiple of four values.

With scale c mean|v|, a block of n values has a squared error of at most |v|^2 - (c - c^2/4) n mean|v|^2, so error
feedback converges for c below 4. Relative squared errors, 131072 samples in blocks of 512:

                c = 1.0   1.25   1.5   1.75   2.0
    Gaussian       .14    .12    .13   .17    .21
    Laplace        .26    .21    .20   .20    .23
    Student t3     .40    .36    .34   .33    .34

Stochastic rounding is unbiased, with relative squared errors of 0.8 for Gaussian values and 2.2 for Laplace. Error
feedback diverges if this error may exceed 1, so it is forbidden for blocks of 12 and more values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors.block_codes import BlockCompressor, feedback_at_random, mean_magnitude
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter

DEFAULT_BLOCK = 512
OUTER = 1.5  # outer level, in units of the scale


@register
@dataclass(frozen=True, slots=True)
class Int2(BlockCompressor):
    """Two bits a value: a sixteenth of fp32, at a third of the error of `sign`."""

    block: int = DEFAULT_BLOCK
    stochastic: bool = False

    facts: ClassVar[Facts] = Facts(
        name="int2",
        summary="two bits per value, one scale per block",
        payload="⌈n/4⌉ + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(
            Parameter("block", "values that share a scale", 4, 65536),
            Parameter("stochastic", "round at random, unbiased, and without error feedback", 0, 1),
        ),
        state="16 a segment if stochastic",
        state_dtype=torch.int64,
        grain="block",
        use="Slow links, with error feedback: half of int4's bytes.",
        avoid="Stochastic: its error is as large as the gradient; take int4.",
        source="mid-rise uniform quantiser, scaled by the mean magnitude as in EF-SignSGD",
    )

    @property
    def bits(self) -> int:
        return 2

    @property
    def largest_value(self) -> float:
        return OUTER

    @property
    def is_random(self) -> bool:
        return self.stochastic

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED if self.stochastic else Bias.BIASED

    @property
    def feedback(self) -> Feedback:
        return feedback_at_random(self.block, OUTER) if self.stochastic else Feedback.REQUIRED

    def scales(self, rows: Tensor, sizes: Tensor) -> Tensor:
        if self.stochastic:
            return rows.abs().amax(dim=1, keepdim=True) / 1.5
        return mean_magnitude(rows, sizes) * 1.5

    def codes(self, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
        if not self.stochastic:
            return torch.where(rows.abs() >= scale, 3, 2).to(torch.uint8) ^ torch.where(rows < 0, 3, 0).to(torch.uint8)
        quotient = rows / torch.where(scale > 0, scale, 1.0)
        return (quotient + OUTER + uniform).floor().clamp(0, 3).to(torch.uint8)

    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        return (codes.float() - OUTER) * scale
