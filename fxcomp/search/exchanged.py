"""Price a whole job, stage by stage, and hold what comparing gradients with momenta came to.

gradients   1 stage                     steps * step
momenta     warm-up, then the plan      warm * warm-up's step + (steps - warm) * step
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fxcomp.plan.plan import Plan

_HOUR, _MINUTE = 3600.0, 60.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps of a job under one plan."""

    plan: Plan
    steps: int
    step_us: float

    @property
    def us(self) -> float:
        return self.steps * self.step_us


def stretches(stages: Mapping[int, Plan], steps: int, price: Callable[[Plan], float]) -> list[Stretch]:
    """Cut a job of so many steps where its stages begin, and price a step of each; none is longer than the job."""
    ends = [*list(stages)[1:], steps]
    cut = [(plan, min(end, steps) - first) for (first, plan), end in zip(stages.items(), ends, strict=True)]
    return [Stretch(plan, count, price(plan)) for plan, count in cut if count > 0]


def job_us(found: Sequence[Stretch]) -> float:
    """The time of all steps."""
    return sum(each.us for each in found)


def long(us: float) -> str:
    """Write the time of a job: `2.25 h`, `14.2 min`, `31.5 s`."""
    seconds = us / 1e6
    if seconds >= _HOUR:
        return f"{seconds / _HOUR:.3g} h"
    return f"{seconds / _MINUTE:.3g} min" if seconds >= _MINUTE else f"{seconds:.3g} s"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The time of a job, by the fastest plan that exchanges gradients and by the fastest that exchanges momenta."""

    steps: int
    gradients_us: float
    momenta_us: float
    pays_from: int | None
    """The number of steps from which a job with momenta is the shorter one; None if none is."""

    @property
    def pays(self) -> bool:
        """This job is over sooner by momenta."""
        return self.momenta_us < self.gradients_us

    @property
    def reason(self) -> str:
        """Say which of the two is shorter."""
        both = f"{long(self.momenta_us)} by exchanging momenta and {long(self.gradients_us)} by gradients"
        since = "no job is shorter by it" if self.pays_from is None else f"it pays from {self.pays_from:,} steps on"
        return f"a job of {self.steps:,} steps is predicted to take {both}; {since}"


LONGEST = 10_000_000
"""Steps of the longest job that is asked about."""


def first_that_pays(pays: Callable[[int], bool]) -> int | None:
    """Find the shortest job for which something pays that costs more at first, and less later."""
    high = 1
    while not pays(high):
        high *= 2
        if high > LONGEST:
            return None
    return bisect_left(range(high), True, lo=max(1, high // 2), key=pays)
