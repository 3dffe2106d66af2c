"""Notice that steps take another time than when their plan was settled. It never switches.

    every WINDOW steps under a plan     the median of their times, on the slowest rank
    the first of these medians          the settled time, until another plan is followed
    a later one that is FACTOR off      drift: links are measured again, and plans race

All ranks judge the same medians after the same steps, so they find the same.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fxcomp.site import Site
from fxcomp.step.calendar import WINDOW, Calendar
from fxcomp.step.step_times import StepTimes

FACTOR = 1.25
"""Relative change of the median of WINDOW steps that is drift. A busy machine varies by less (assumed)."""

LEAST = WINDOW // 4
"""Steps of a window that every rank must have timed. Verified steps and batches of another kind are not timed."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A change of the step's time: the median when its plan was settled, and that of the last window, in ms."""

    step: int
    """Number of steps taken when it was noticed."""
    settled_ms: float
    now_ms: float

    def __str__(self) -> str:
        return (
            f"step {self.step}: steps take {self.now_ms:.4g} ms, and took {self.settled_ms:.4g} when their plan was"
            " settled."
        )


def has_drifted(settled_ms: float, now_ms: float) -> bool:
    """Return whether a median is off by more than FACTOR, up or down."""
    return max(settled_ms, now_ms) > FACTOR * min(settled_ms, now_ms)


class DriftWatch:
    """Compare each window of steps with the first one under the same plan."""

    def __init__(self, calendar: Calendar, times: StepTimes, site: Site) -> None:
        self._calendar, self._times, self._site = calendar, times, site
        self._settled_ms: float | None = None
        """None until a window under the plan has been timed."""

    def follow(self, step: int) -> None:
        """Begin again at a step: earlier times say nothing of those to come."""
        self._calendar.followed_from = step
        self._times.forget()
        self._settled_ms = None

    def judge(self, step: int) -> Drift | None:
        """Compare the window that ends here with the settled one; every rank calls it after the same step.

        A window without enough timed steps on some rank is left out. Patience postpones the verdict, not the settling.
        """
        known_ms = self._times.since(step - WINDOW)
        median_ms = statistics.median(known_ms) if len(known_ms) >= LEAST else -1.0
        everyone = [ms for (ms,) in self._site.gather_numbers("how long steps take", [median_ms])]
        if min(everyone) < 0:
            return None
        now_ms = max(everyone)
        if self._settled_ms is None:
            self._settled_ms = now_ms
        if step < self._calendar.patient_until or not has_drifted(self._settled_ms, now_ms):
            return None
        return Drift(step, self._settled_ms, now_ms)
