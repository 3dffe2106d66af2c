"""Lay tensors one after the other in one flat buffer, as they travel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_AS_THEY_ARE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def packed_dtype(values: Sequence[Tensor], wanted: torch.dtype | None = None) -> torch.dtype:
    """Choose the buffer's type, unless one is wanted: numbers of one floating type as that, all else as bytes."""
    first = values[0].dtype
    if wanted is not None:
        return wanted
    return first if first in _AS_THEY_ARE and all(value.dtype is first for value in values) else torch.uint8


def packed_sizes(values: Sequence[Tensor], wanted: torch.dtype | None = None) -> list[int]:
    """Count the elements of the flat buffer that each tensor takes."""
    if wanted is not None:
        return [value.numel() for value in values]
    size = packed_dtype(values).itemsize
    return [value.numel() * value.element_size() // size for value in values]


def slots(flat: Tensor, values: Sequence[Tensor], wanted: torch.dtype | None = None) -> list[Tensor]:
    """View the parts of a flat buffer in the tensors' shapes, and types if none is wanted.

    Wider types must come first, to be aligned.
    """
    sizes = packed_sizes(values, wanted)
    ends = itertools.accumulate(sizes)
    parts = zip(ends, sizes, values, strict=True)
    return [flat[end - size : end].view(wanted or value.dtype).view(value.shape) for end, size, value in parts]


def copy_scaled(values: Sequence[Tensor], scale: float, out: Sequence[Tensor], factor: Tensor | None = None) -> None:
    """Write each value times `scale`, and times a live factor if there is one, into its place."""
    whole = None if factor is None else factor * scale
    for value, place in zip(values, out, strict=True):
        if whole is None and scale == 1.0:
            place.copy_(value)
        elif value.dtype is not place.dtype:  # a product in the narrower type would be rounded to it
            place.copy_(value).mul_(scale if whole is None else whole)
        else:
            torch.mul(value, scale if whole is None else whole, out=place)
