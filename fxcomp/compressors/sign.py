"""Send one bit per value, and one fp32 scale per block.

    scale   = mean|v| over the block
    bit     = v >= 0
    decoded = scale where the bit is set, -scale where it is not

`block_codes.py` defines blocks and payload. A block is a multiple of eight values. The mean is summed in a fixed order.

The scale minimises the relative squared error, to 1 - (mean|v|)^2 / mean(v^2): 0.36 for Gaussian values, 0.50 for
Laplace. So error feedback is required. EF-SignSGD (Karimireddy 2019) has one scale per tensor; scales per block need
only one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors.block_codes import BlockCompressor, mean_magnitude
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter

DEFAULT_BLOCK = 512


@register
@dataclass(frozen=True, slots=True)
class Sign(BlockCompressor):
    """The sign of each value: about a thirtieth of the bytes of fp32."""

    block: int = DEFAULT_BLOCK

    facts: ClassVar[Facts] = Facts(
        name="sign",
        summary="the sign of each value, one scale per block",
        payload="⌈n/8⌉ + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(Parameter("block", "values that share a scale", 8, 65536),),
        grain="block",
        use="Very slow links, with error feedback and stochastic gradient descent.",
        avoid="Adam, and learning rates near the edge of stability.",
        source="Karimireddy et al. 2019, error feedback fixes SignSGD; one scale per block",
    )

    @property
    def bits(self) -> int:
        return 1

    def scales(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return mean_magnitude(rows, sizes)

    def codes(self, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
        return (rows >= 0).to(torch.uint8)

    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        return torch.where(codes.bool(), scale, -scale)
