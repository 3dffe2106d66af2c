"""Predict the time of whole jobs, to compare exchanging gradients and momenta.

gradients   one plan                    steps · step time
momenta     warm-up, then the plan      warm-up steps · step time + other steps · step time with the plan
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fxcomp.plan.plan import Plan

_HOUR, _MINUTE = 3600.0, 60.0


@dataclass(frozen=True, slots=True)
class Stretch:
    plan: Plan
    steps: int
    step_us: float

    @property
    def us(self) -> float:
        return self.steps * self.step_us


def stretches(stages: Mapping[int, Plan], steps: int, price: Callable[[Plan], float]) -> list[Stretch]:
    """Return a job's stages with their step counts and predicted step times."""
    ends = [*list(stages)[1:], steps]
    cut = [(plan, min(end, steps) - first) for (first, plan), end in zip(stages.items(), ends, strict=True)]
    return [Stretch(plan, count, price(plan)) for plan, count in cut if count > 0]


def job_us(found: Sequence[Stretch]) -> float:
    return sum(each.us for each in found)


def long(us: float) -> str:
    """Format the time of a job: `2.25 h`, `14.2 min`, `31.5 s`."""
    seconds = us / 1e6
    if seconds >= _HOUR:
        return f"{seconds / _HOUR:.3g} h"
    return f"{seconds / _MINUTE:.3g} min" if seconds >= _MINUTE else f"{seconds:.3g} s"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Predicted time of a job with the fastest plan for gradients, and for momenta."""

    steps: int
    gradients_us: float
    momenta_us: float
    pays_from: int | None
    """Smallest number of steps with which momenta shorten the job; None if they never do."""

    @property
    def pays(self) -> bool:
        return self.momenta_us < self.gradients_us

    @property
    def reason(self) -> str:
        both = f"{long(self.momenta_us)} by exchanging momenta and {long(self.gradients_us)} by gradients"
        since = "no job is shorter by it" if self.pays_from is None else f"it pays from {self.pays_from:,} steps on"
        return f"a job of {self.steps:,} steps is predicted to take {both}; {since}"


LONGEST = 10_000_000


def first_that_pays(pays: Callable[[int], bool]) -> int | None:
    """Return the smallest number of steps for which the monotonic `pays` is true; None above LONGEST."""
    high = 1
    while not pays(high):
        high *= 2
        if high > LONGEST:
            return None
    return bisect_left(range(high), True, lo=max(1, high // 2), key=pays)
