"""Send each value as fp8 with four bits of exponent and three of mantissa, and one fp32 scale a block.

`fp8.py` has the formulas and the layout. The format ends at 448 and has no infinity.

The relative squared error is 6.6e-4 for Gaussian values and 6.3e-4 for Laplace, whatever their spread within a block:
more than int8's on values of one size, less where a few are a hundred times the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter
from fxcomp.compressors.fp8 import DEFAULT_BLOCK, FP8


@register
@dataclass(frozen=True, slots=True)
class FP8E4M3(FP8):
    """A quarter of the bytes; small values beside large ones keep three bits."""

    block: int = DEFAULT_BLOCK

    facts: ClassVar[Facts] = Facts(
        name="fp8_e4m3",
        summary="fp8 with three bits of mantissa, a scale a block",
        payload="n + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.ROUNDING,
        feedback=Feedback.OPTIONAL,
        parameters=(Parameter("block", "values that share a scale", 1, 65536),),
        grain="block",
        use="Gradients whose sizes differ much within a block; hardware that reads fp8.",
        avoid="Gaussian gradients: int8 is ten times as exact for the same bytes.",
        source="OCP 8-bit floating point, E4M3; a scale a block",
    )

    @property
    def float8(self) -> torch.dtype:
        return torch.float8_e4m3fn
