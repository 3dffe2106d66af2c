"""Measure what keeping the largest values loses, for all densities at once, and exactly.

    1/4 of all values  -->  the largest 10 % of all among them  -->  the largest 3 % among these  --> ...

top-k's own kernel selects. What it leaves out of one selection adds to what the selections before it have left out, so
no number is the difference of two large ones. Each selection reads what the one before it has kept, so all of them
together read little more than a gradient once. Few values are sorted instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors import TopK
from fxcomp.error_tables.norms import squares

_SORTED = 1 << 12
"""A sort of so many values takes as long as starting the selections."""


def lost_by_largest(value: Tensor, kept: Sequence[int]) -> list[float]:
    """Return |v|² of what is left when the `kept` largest magnitudes are taken; `kept` rises."""
    lost, left, rest = list[float](), 0.0, value
    for number, count in reversed(list(enumerate(kept, 1))):
        if len(rest) <= _SORTED:
            added: Any = rest.double().square().sort().values.cumsum(0)
            rising: list[float] = added.tolist()
            lost += [left + (rising[len(rest) - k - 1] if k < len(rest) else 0.0) for k in reversed(kept[:number])]
            break
        if count < len(rest):
            rest, missed = _largest_of(rest, count)
            left += missed
        lost.append(left)
    return lost[::-1]


def _largest_of(value: Tensor, count: int) -> tuple[Tensor, float]:
    """Select so many of the largest magnitudes; also |v|² of the others."""
    segments = (len(value),)
    topk = TopK(min(1.0, (count - 0.5) / len(value)))  # rounds up to `count`
    payload = torch.empty(topk.payload_elements(segments), dtype=topk.payload_dtype, device=value.device)
    others = torch.zeros_like(value)
    topk.encode(value, others, payload, segments)
    return payload[: 4 * count].clone().view(torch.float32), squares(others)
