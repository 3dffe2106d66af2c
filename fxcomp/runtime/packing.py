"""Lay tensors one after the other in one flat buffer, as they travel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_AS_THEY_ARE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def packed_dtype(values: Sequence[Tensor]) -> torch.dtype:
    """Choose the buffer's type: numbers of one floating type travel as that, everything else as bytes."""
    first = values[0].dtype
    return first if first in _AS_THEY_ARE and all(value.dtype is first for value in values) else torch.uint8


def packed_sizes(values: Sequence[Tensor]) -> list[int]:
    """Count the elements of the flat buffer that each tensor takes."""
    size = packed_dtype(values).itemsize
    return [value.numel() * value.element_size() // size for value in values]


def slots(flat: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """View the parts of a flat buffer in the tensors' types and shapes. Wider types must come first, to be aligned."""
    sizes = packed_sizes(values)
    ends = itertools.accumulate(sizes)
    parts = zip(ends, sizes, values, strict=True)
    return [flat[end - size : end].view(value.dtype).view(value.shape) for end, size, value in parts]


def copy_scaled(values: Sequence[Tensor], scale: float, out: Sequence[Tensor]) -> None:
    """Write each value times `scale` into its place."""
    for value, place in zip(values, out, strict=True):
        if scale == 1.0:
            place.copy_(value)
        else:
            torch.mul(value, scale, out=place)
