"""Send each value as fp8 with five bits of exponent and two of mantissa, and one fp32 scale a block.

`fp8.py` has the formulas and the layout. The format ends at 57344; its infinity and NaN are never used.

The relative squared error is 2.6e-3 for Gaussian values and 2.4e-3 for Laplace, four times that of e4m3, over a range
within a block of nine powers of ten instead of five.
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
class FP8E5M2(FP8):
    """A quarter of the bytes; values a billion times smaller than the largest keep two bits."""

    block: int = DEFAULT_BLOCK

    facts: ClassVar[Facts] = Facts(
        name="fp8_e5m2",
        summary="fp8 with two bits of mantissa, a scale a block",
        payload="n + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.ROUNDING,
        feedback=Feedback.OPTIONAL,
        parameters=(Parameter("block", "values that share a scale", 1, 65536),),
        grain="block",
        use="Without error feedback, values of which some are 400,000 times the others: e4m3 rounds those to 0.",
        avoid="Elsewhere: fp8_e4m3 has half its error for the same bytes.",
        source="OCP 8-bit floating point, E5M2; a scale a block",
    )

    @property
    def float8(self) -> torch.dtype:
        return torch.float8_e5m2
