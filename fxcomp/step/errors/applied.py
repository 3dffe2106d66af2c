"""Measure what a step's plan really lost: of the mean that was applied, after all shots, over all ranks.

    v       = gradient + what is owed before the step          applied = mean v - mean of what is owed after it
    error   = |sum over ranks of what is owed after|² / |sum over ranks of v|²

No rank has these sums. Each takes a sketch of its own part, which adds up as the parts do: values get random signs, the
same on all ranks, and every 256th one is added into the same place. The sketch's square is |x|² on average, and within
9 % (standard deviation), so one all_reduce of 2 * 256 numbers a gradient is enough. What has no error feedback owes
nothing, and looks as if it lost nothing.

If a rank has no room for what is owed, or runs out of memory here, it says so in that all_reduce, and no rank counts
the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxcomp.compressors import PowerSGD
from fxcomp.error_tables import ErrorTable
from fxcomp.error_tables.table import LEAST_LAG
from fxcomp.plan.plan import Plan
from fxcomp.runtime.runtime import Runtime
from fxcomp.step.errors.look import MARGIN, ExtraWork

_PLACES = 256
_ROUNDING = 1e-3


class Applied(NamedTuple):
    """The error of a step on a gradient, and its squares, summed over ranks."""

    error: float
    squares: float


def lags(known: Mapping[str, float], errors: Mapping[str, float], plan: Plan, table: ErrorTable) -> dict[str, float]:
    """Say for gradients that powersgd carries which power of the best rank's error it loses, and keep what is known.

    Half of what is known stays. `table` has the errors of the best matrices.
    """
    found = dict(known)
    for bucket in plan.buckets:
        compressor = bucket.strategy.compressor
        if not isinstance(compressor, PowerSGD):
            continue
        for name in bucket.names:
            best, lost = table.error_of(name, compressor).value, errors.get(name, 0.0)
            if _ROUNDING < best < 1 - _ROUNDING and _ROUNDING < lost < 1 - _ROUNDING:
                lag = min(1.0, max(LEAST_LAG, math.log(lost) / math.log(best)))
                found[name] = (lag + found.get(name, lag)) / 2
    return found


class AppliedError:
    """One step's sketches; every rank makes one, with the same seed."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device, seed: int):
        self.work = ExtraWork(device, needed_bytes(sizes))
        self.is_void = False
        """Nothing was applied, because the step was left out; or not all ranks had room."""
        self._signs = torch.empty(0, device=device)
        with self.work.tried():
            self._signs = _signs(0 if self.work.lacks_room else max(sizes.values(), default=0), device, seed)
        self._given = torch.zeros(len(sizes), _PLACES, device=device)
        self._squares = torch.zeros(len(sizes), 1, device=device)
        """|gradient|² of this rank."""
        self._number = {name: number for number, name in enumerate(sizes)}

    def owes(self, owed: Mapping[str, Tensor]) -> None:
        """Take in what this rank owes before the step, flat, by parameter."""
        with self.work.tried():
            self._given += self._sketch(owed)

    def before(self, runtime: Runtime) -> None:
        """See the gradients of the step that is about to run."""
        runtime.gradients.on_gradient = self.see

    def after(self, runtime: Runtime) -> None:
        """Let nothing count if the step was left out."""
        self.is_void = runtime.counters.skipped

    def see(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Take in a gradient, or the part of one from element `start` on."""
        if self.work.lacks_room:
            return
        with self.work.tried():
            flat = gradient.detach().flatten().float()
            self._add(self._given[self._number[name]], flat, start)
            self._squares[self._number[name]] += flat.dot(flat)

    def applied(self, owed: Mapping[str, Tensor], all_reduce: Callable[[Tensor], object]) -> dict[str, Applied]:
        """Tell of each gradient what was lost, from what this rank owes now; every rank calls it."""
        left = torch.zeros_like(self._given)
        with self.work.tried():
            left = self._sketch(owed)
        lacking = torch.full_like(self._squares, float(self.work.lacks_room))
        sums = torch.cat([left, self._given, self._squares, lacking], dim=1)
        all_reduce(sums)
        whole_sums: Any = sums.double()
        left_out, given, squares, lacking = whole_sums.split([_PLACES, _PLACES, 1, 1], dim=1)
        self.is_void = self.is_void or bool((lacking > 0).any())
        lost, whole, own = (each.tolist() for each in (left_out.square().sum(1), given.square().sum(1), squares[:, 0]))
        return {name: Applied(lost[k] / whole[k] if whole[k] > 0 else 0.0, own[k]) for name, k in self._number.items()}

    def _sketch(self, values: Mapping[str, Tensor]) -> Tensor:
        found = torch.zeros_like(self._given)
        for name, number in self._number.items():
            if name in values and not self.work.lacks_room:
                self._add(found[number], values[name], 0)
        return found

    def _add(self, sketch: Tensor, flat: Tensor, start: int) -> None:
        signed = flat * self._signs[start : start + len(flat)]
        first = start % _PLACES
        padded = torch.nn.functional.pad(signed, (first, -(first + len(flat)) % _PLACES))
        sketch += padded.view(-1, _PLACES).sum(0)


def needed_bytes(sizes: Mapping[str, int]) -> int:
    """Count what a check holds beside the step: what is owed, the signs, and copies of the largest gradient."""
    return int(MARGIN * 4 * (sum(sizes.values()) + 4 * max(sizes.values(), default=0)))


def _signs(count: int, device: torch.device, seed: int) -> Tensor:
    bits = torch.randint(2, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    return bits.to(device).float().mul_(2).sub_(1)
