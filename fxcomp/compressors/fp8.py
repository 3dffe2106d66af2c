"""Share the base of fp8_e4m3 and fp8_e5m2: eight bits of floating point a value, and one fp32 scale a block.

    scale   = max|v| / (the largest number of the format) over the block; 0 if that is below 2^-126
    code    = fp8(v * (1 / scale)), clamped first, rounded to nearest, ties to even; 1 / scale is 0 if scale is
    decoded = fp32(code) * scale

Payload and blocks as in `block_codes.py`, one byte a code: torch's own float8 of the product, bit for bit.

The clamp comes before the cast, for e4m3 has no infinity to round to and 1 / scale may be rounded up. A block with a
value that is not finite decodes to NaN, and its residual stays as it was.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

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
