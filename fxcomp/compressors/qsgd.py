"""Send whole numbers of at most eight bits a value, rounded at random, and one fp32 scale a block: its L2 norm.

    scale   = sqrt(sum v^2) / levels over the block, summed in fp64
    code    = floor(v / scale + u), u uniform in [0, 1), within -levels..levels
    decoded = code * scale

Payload and blocks as in `block_codes.py`, codes in two's complement: 2 bits a code for 1 level, 4 up to 7 levels, 8 up
to 127. Rounding down after adding u is the same as rounding the magnitude at random and keeping the sign.

A block of zeros has scale 0. A block with a value that is not finite, or whose norm is not, decodes to NaN, and its
residual stays as it was.

It is unbiased. A value's variance is at most a quarter of a squared step, and at most a step times the value; so the
relative squared error is at most min(B / (4 levels^2), sqrt(B) / levels) in the mean. Error feedback could grow from
step to step where that reaches 1: it is refused from B = 4 levels^2 on. Measured, 131072 samples:

    levels, B          127, 512   127, 128   7, 512   7, 128   7, 32   1, 512   1, 8
    Gaussian            .0053      .0013      1.6      .44      .11     17       1.3
    Laplace             .0053      .0013      1.3      .40      .11     15       1.1

The norm of B values of one size is sqrt(B) times that size, so most levels stay unused: int8(stochastic=true), which
divides by the largest value, has a fiftieth of the error on Gaussian values for the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors.block_codes import BlockCompressor, sum_in_lanes, whole_codes, whole_values
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter
from fxcomp.compressors.registration import register

DEFAULT_BLOCK = 512


@register
@dataclass(frozen=True, slots=True)
class QSGD(BlockCompressor):
    """The quantiser of which most is proven: unbiased, with a bound of its variance."""

    levels: int = 127
    block: int = DEFAULT_BLOCK

    facts: ClassVar[Facts] = Facts(
        name="qsgd",
        summary="whole numbers rounded at random, an L2 norm a block",
        payload="⌈bn/8⌉ + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.UNBIASED,
        feedback=Feedback.OPTIONAL,
        parameters=(
            Parameter(
                "levels", "whole numbers on either side of zero; b is 2 bits for 1, 4 up to 7 and 8 beyond", 1, 127
            ),
            Parameter("block", "values that share a norm, fewer than 4 levels² to allow error feedback", 4, 65536),
        ),
        state="16 a segment",
        state_dtype=torch.int64,
        use="To compare with published results, and where the bound of its variance is wanted.",
        avoid="Otherwise: int8(stochastic=true) and int4(stochastic=true) lose less for the same bytes.",
        source="Alistarh et al. 2017, QSGD, in buckets; a fixed number of bits instead of Elias codes",
    )

    @property
    def bits(self) -> int:
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    @property
    def largest_value(self) -> float:
        return self.levels

    @property
    def is_random(self) -> bool:
        return True

    @property
    def kernel_parameters(self) -> tuple[float, ...]:
        return (self.levels,)

    @property
    def feedback(self) -> Feedback:
        return Feedback.OPTIONAL if self.block < 4 * self.levels**2 else Feedback.FORBIDDEN

    def scales(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return sum_in_lanes(rows.double().square()).sqrt().float() / self.levels

    def codes(self, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
        return whole_codes(rows, scale, uniform, self.levels, self.bits, at_random=True)

    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        return whole_values(codes, scale, self.bits)
