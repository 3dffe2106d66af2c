"""Send -1, 0 or 1 for each value, drawn at random, and one fp32 scale a block.

    scale   = max|v| over the block, at most `clip` times the root of the mean square
    code    = sign(v) with probability min(|v| / scale, 1), else 0
    decoded = code * scale

As floor(v / scale + u), u uniform in [0, 1). Payload and blocks as in `block_codes.py`, 2 bits a code in two's
complement, four a byte. A block is a multiple of four values. Squares are summed in fp64, in a fixed order.

A block of zeros has scale 0. A block with a value that is not finite decodes to NaN, and its residual stays as it was.

The variance of a value is |v| (scale - |v|), so a large scale costs much: the paper clips at 2.5 standard deviations of
a layer, here of a block, about zero. What is above comes out too small, which is a bias; `clip=0` has none. Relative
squared errors, 131072 samples in blocks of 512:

    clip                    0      4      2.5    1.5
    Gaussian               1.6    1.6    1.0     .38
    Laplace                2.4    1.8     .87    .43
    log-normal * Gaussian  1.1     .75    .79    .85

Feeding the error back is refused: it can exceed what is sent, and with clipping it does so for values of one size
beside few large ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors.base import BadCompressor
from fxcomp.compressors.block_codes import BlockCompressor, sum_in_lanes, whole_codes, whole_values
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter
from fxcomp.compressors.registration import register

DEFAULT_BLOCK = 512


@register
@dataclass(frozen=True, slots=True)
class TernGrad(BlockCompressor):
    """A sixteenth of the bytes without a residual, at an error as large as the gradient."""

    block: int = DEFAULT_BLOCK
    clip: float = 2.5

    facts: ClassVar[Facts] = Facts(
        name="terngrad",
        summary="the sign of each value or nothing, drawn at random, a scale a block",
        payload="⌈n/4⌉ + 4⌈n/B⌉, up to a multiple of 4",
        bias=Bias.BIASED,
        feedback=Feedback.FORBIDDEN,
        parameters=(
            Parameter("block", "values that share a scale", 4, 65536),
            Parameter("clip", "most root mean squares that a scale has, from 1 on; 0 clips nothing: unbiased", 0, 100),
        ),
        state="16 a segment",
        state_dtype=torch.int64,
        use="To compare with published results; many ranks, whose errors average out, and no memory for residuals.",
        avoid="Otherwise: int2 with error feedback has the same bytes and follows the dense loss.",
        source="Wen et al. 2017, TernGrad; a scale a block, and two bits a value",
    )

    def __post_init__(self) -> None:
        BlockCompressor.__post_init__(self)
        if 0 < self.clip < 1:
            raise BadCompressor(f"terngrad needs clip=0, which clips nothing, or 1 and more, not {self.clip}")

    @property
    def bits(self) -> int:
        return 2

    @property
    def is_random(self) -> bool:
        return True

    @property
    def kernel_parameters(self) -> tuple[float, ...]:
        return (float(self.clip),)

    @property
    def bias(self) -> Bias:
        return Bias.BIASED if self.clip else Bias.UNBIASED

    def scales(self, rows: Tensor, sizes: Tensor) -> Tensor:
        largest = rows.abs().amax(dim=1, keepdim=True)
        if not self.clip:
            return largest
        root_mean_square = (sum_in_lanes(rows.double().square()) / sizes).sqrt().float()
        return torch.minimum(largest, root_mean_square * self.clip)

    def codes(self, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
        return whole_codes(rows, scale, uniform, 1, self.bits, at_random=True)

    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        return whole_values(codes, scale, self.bits)
