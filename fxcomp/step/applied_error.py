"""Measure what a step's plan really lost: of the mean that was applied, after all shots, over all ranks.

    v       = gradient + what is owed before the step          applied = mean v - mean of what is owed behind it
    error   = |sum over ranks of what is owed behind|² / |sum over ranks of v|²

No rank has these sums. Each takes a sketch of its own part, which adds up as the parts do: values get random signs, the
same on all ranks, and every 256th one is added into the same place. The sketch's square is |x|² on average, and within
9 % (standard deviation), so one all_reduce of 2 * 256 numbers a gradient is enough. What has no error feedback owes
nothing, and looks as if it lost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_PLACES = 256


class AppliedError:
    """One step's sketches; every rank makes one, with the same seed."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device, seed: int):
        self._sizes = sizes
        draw = torch.Generator().manual_seed(seed)
        largest = max(sizes.values(), default=0)
        bits = torch.randint(2, (largest,), generator=draw, dtype=torch.int8)
        self._signs = bits.to(device).float().mul_(2).sub_(1)
        self._given = torch.zeros(len(sizes), _PLACES, device=device)
        self._number = {name: number for number, name in enumerate(sizes)}

    def owes(self, owed: Mapping[str, Tensor]) -> None:
        """Take in what this rank owes before the step, flat, by parameter."""
        self._given += self._sketch(owed)

    def see(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Take in a gradient, or the part of one from element `start` on."""
        self._add(self._given[self._number[name]], gradient.detach().flatten().float(), start)

    def errors(self, owed: Mapping[str, Tensor], all_reduce: Callable[[Tensor], object]) -> dict[str, float]:
        """Return the error of each gradient, from what this rank owes now; every rank calls it."""
        both = torch.stack([self._sketch(owed), self._given])
        all_reduce(both)
        lost, whole = both.double().square().sum(dim=2).tolist()
        return {name: lost[k] / whole[k] if whole[k] > 0 else 0.0 for name, k in self._number.items()}

    def _sketch(self, values: Mapping[str, Tensor]) -> Tensor:
        found = torch.zeros_like(self._given)
        for name, number in self._number.items():
            if name in values:
                self._add(found[number], values[name], 0)
        return found

    def _add(self, sketch: Tensor, flat: Tensor, start: int) -> None:
        signed = flat * self._signs[start : start + len(flat)]
        first = start % _PLACES
        padded = torch.nn.functional.pad(signed, (first, -(first + len(flat)) % _PLACES))
        sketch += padded.view(-1, _PLACES).sum(0)
