"""Lay tensors one after the other in one flat buffer, as they travel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_AS_THEY_ARE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def packed_dtype(values: Sequence[Tensor]) -> torch.dtype:
    """Numbers of one floating type travel as that; of several types, or any other, the bytes do."""
    first = values[0].dtype
    return first if first in _AS_THEY_ARE and all(value.dtype is first for value in values) else torch.uint8


def packed_sizes(values: Sequence[Tensor]) -> list[int]:
    """How many elements of the flat buffer each tensor takes."""
    size = packed_dtype(values).itemsize
    return [value.numel() * value.element_size() // size for value in values]


def slots(flat: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat buffer, in the tensors' types and shapes. Wider types come first, or none fits its place."""
    sizes = packed_sizes(values)
    ends = itertools.accumulate(sizes)
    parts = zip(ends, sizes, values, strict=True)
    return [flat[end - size : end].view(value.dtype).view(value.shape) for end, size, value in parts]
