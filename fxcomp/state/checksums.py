"""Sum up the bits of tensors, to compare them between ranks without sending them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Sum each tensor's bits, read as whole numbers: a value that differs changes the sum. One copy a device."""
    sums: list[int] = [0] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for place, each in enumerate(tensors):
        places.setdefault(each.device, []).append(place)
    for here in places.values():
        found = torch.stack([_sum(tensors[place]) for place in here])
        for place, one in zip(here, map(int, found.cpu()), strict=True):
            sums[place] = one
    return sums


def _sum(value: Tensor) -> Tensor:
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.view(_WHOLE[value.element_size()]).sum(dtype=torch.int64)
