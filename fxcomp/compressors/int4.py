"""Send four bits per value, and one fp32 scale per block.

    scale   = max|v| / 7 over the block
    code    = v / scale, rounded to nearest, ties to even, within -7..7
            = floor(v / scale + u), u uniform in [0, 1), if stochastic
    decoded = code * scale

`block_codes.py` defines blocks, payload and the treatment of values that are not finite. Codes are two's complement. A
block is an even number of values.

The relative squared error in blocks of 128 is about 0.014 for Gaussian values and 0.026 for Laplace, twice that if
stochastic. In blocks of more than 196 values, the error of stochastic rounding may exceed 1, so feedback is forbidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxcomp.compressors.block_codes import SymmetricCompressor
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter

DEFAULT_BLOCK = 128  # scales add 1/32 byte per value


@register
@dataclass(frozen=True, slots=True)
class Int4(SymmetricCompressor):
    """Four bits a value: an eighth of fp32."""

    block: int = DEFAULT_BLOCK
    stochastic: bool = False

    facts: ClassVar[Facts] = Facts(
        name="int4",
        summary="four bits per value, one scale per block",
        payload="n/2 + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.ROUNDING,
        feedback=Feedback.REQUIRED,
        parameters=(
            Parameter("block", "values that share a scale", 2, 65536),
            Parameter("stochastic", "round at random, which is unbiased and needs no error feedback", 0, 1),
        ),
        state="16 a segment if stochastic",
        state_dtype=torch.int64,
        grain="block",
        use="Slow links: an eighth of the bytes at the dense loss.",
        avoid="Where compute hides int8 already.",
        source="block-wise symmetric quantisation",
    )

    @property
    def bits(self) -> int:
        return 4
