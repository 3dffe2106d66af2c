"""Send each value as eight bits of floating point, and one fp32 scale a block: fp8_e4m3 and fp8_e5m2.

    scale   = max|v| / (the largest number of the format) over the block; 0 if that is below 2^-126
    code    = fp8(v * (1 / scale)), clamped first, rounded to nearest, ties to even; 1 / scale is 0 if scale is
    decoded = fp32(code) * scale

Payload and blocks as in `block_codes.py`, one byte a code: torch's own float8 of the product, bit for bit.

The clamp comes before the cast, for e4m3 has no infinity to round to and 1 / scale may be rounded up. A block with a
value that is not finite decodes to NaN, and its residual stays as it was.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors import (
    Bias,
    Facts,
    Feedback,
    Parameter,
    register,
)
from fxcomp.compressors.block_codes import BlockCompressor

DEFAULT_BLOCK = 128  # 1/32 byte a value for scales; a block's small values keep their precision
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal  # 1 / scale must be finite


class FP8(BlockCompressor):
    """A subclass says which float8 it is."""

    __slots__ = ()

    @property
    def bits(self) -> int:
        return 8

    @property
    def largest_value(self) -> float:
        return torch.finfo(self.float8).max

    @property
    @abstractmethod
    def float8(self) -> torch.dtype:
        """Torch's name of it."""

    def scales(self, rows: Tensor, sizes: Tensor) -> Tensor:
        scale = rows.abs().amax(dim=1, keepdim=True) / torch.finfo(self.float8).max
        return torch.where(scale < _SMALLEST_SCALE, 0.0, scale)

    def codes(self, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
        most = torch.finfo(self.float8).max
        inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
        return (rows * inverse).clamp(-most, most).to(self.float8).view(torch.uint8)

    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.view(self.float8).float() * scale


@register
@dataclass(frozen=True, slots=True)
class FP8E4M3(FP8):
    """A quarter of the bytes; small values beside large ones keep three bits. Ends at 448 and has no infinity.

    The relative squared error is 6.6e-4 for Gaussian values and 6.3e-4 for Laplace, whatever their spread within a
    block: more than int8's on values of one size, less where a few are a hundred times the others.
    """

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


@register
@dataclass(frozen=True, slots=True)
class FP8E5M2(FP8):
    """A quarter of the bytes; values a billion times smaller than the largest keep two bits. Ends at 57344.

    Its infinity and NaN are never used. The relative squared error is 2.6e-3 for Gaussian values and 2.4e-3 for
    Laplace, four times that of e4m3, over a range within a block of nine powers of ten instead of five.
    """

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
