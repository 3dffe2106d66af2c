"""Measure compression errors in single steps (*looks*), and average them to an error table.

    look at one family of compressors ─► average ─► `table`, the same on every rank
    next look, at another family: after max(20, ⌈time of look / (0.007 · step time)⌉) steps

These waits keep the time of looks, on the slowest rank, below LOOKS_SHARE of the job's time. The first
looks, one per family, are FIRST steps apart; a longer wait follows. Every rank calls the methods at the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from fxcomp.error_tables import ASSUMED, FAMILIES, ErrorTable, Rows, averaged, joined
from fxcomp.site import Site
from fxcomp.step.calendar import Use
from fxcomp.step.errors.look import ErrorLook, needed_bytes
from fxcomp.step.observer import Observer, StepUnderWay
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.step_times import StepTimes

LOOKS, LOOKS_SHARE = 20, 0.007
"""Minimum number of steps between looks, and maximum fraction of a job's time for looks."""

AT_ONCE, FIRST = 20.0, 2
"""Time of the first looks after which a long wait follows, in step times; number of steps between first looks."""


def steps_after_look(unpaid_us: float, step_us: float, *, more_come_first: bool) -> tuple[int, float]:
    """Return the number of steps to the next look, and the new `unpaid_us`.

    `unpaid_us` is the time of looks that no wait has made up for, `step_us` a step's time without a look (0: unknown).
    `more_come_first`: some families have not been measured.
    """
    if more_come_first and unpaid_us < AT_ONCE * step_us:
        return FIRST, unpaid_us
    return max(LOOKS, ceil(unpaid_us / (LOOKS_SHARE * step_us))) if step_us else LOOKS, 0.0


class ErrorLooks(Observer):
    wants = frozenset({Use.LOOK})

    def __init__(self, force: PlanInForce, site: Site, times: StepTimes, note: Callable[[str], None], steps: int = 0):
        self._force, self._site, self._times, self._note = force, site, times, note
        self._shapes = {name: tuple(force.inputs.shapes[name]) for name in force.plan.names}
        self._has_noted = False
        self.begin_at(steps)

    def begin_at(self, steps: int) -> None:
        """Measure each family again, from this step on."""
        self.looks = 0
        """Number of successful looks."""
        self._means: list[Rows] = [{} for _ in FAMILIES]
        """Mean errors of each family."""
        self._next = 0
        """Index of the family of the next look."""
        self.table: ErrorTable = ASSUMED
        """Averaged errors of all families; ASSUMED until each has been measured."""
        self._step_us = 0.0
        """Step time without a look, on the fastest rank; 0 if unknown."""
        self._looked_us = self._unpaid_us = 0.0
        self._refusals = 0
        self._under_way: ErrorLook | None = None
        self._begun = self._steps = self._look_from = steps

    # In a step

    def before(self, step: StepUnderWay) -> None:
        residuals, family = self._force.state.residuals, FAMILIES[self._next]
        look = ErrorLook(family, self.looks, self._shapes, residuals, self._site, wants=step.is_like_first)
        step.runtime.gradients.on_gradient, step.runtime.gradients.on_update = look.see, look.measure
        self._under_way = look

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:  # noqa: ARG002
        """Discard the look if the step was skipped."""
        if self._under_way is not None:
            self._under_way.is_left_out = bool(step.runtime.counters.skipped)

    def between(self, steps: int) -> int:
        """Average a finished look into the table. Return the earliest step of the next look."""
        look, self._under_way, self._steps = self._under_way, None, steps
        if look is not None:
            wait = self._be_refused(look) if look.rows is None else self._take_in(look, look.rows)
            self._look_from = steps - 1 + wait
        return self._look_from

    def _take_in(self, look: ErrorLook, rows: Rows) -> int:
        took_us = self._slowest(look)
        self._looked_us += took_us
        if not look.is_left_out:
            self.looks += 1
            self._means[self._next] = averaged(self._means[self._next], rows)
        self._next = (self._next + 1) % len(FAMILIES)
        has_looked_at_all = all(self._means)
        if has_looked_at_all and not look.is_left_out:
            self.table = joined(self._means)
        wait, self._unpaid_us = steps_after_look(
            self._unpaid_us + took_us, self._step_us, more_come_first=not has_looked_at_all
        )
        return wait

    def _be_refused(self, look: ErrorLook) -> int:
        """Return a varying number of steps to the next attempt, because every n-th batch may be unlike the first."""
        self._refusals += 1
        if look.some_lack_room and not self._has_noted:
            self._has_noted = True
            self._note(
                f"step {self._steps - 1} measured no gradient errors, for lack of memory on some rank: it needs"
                f" {needed_bytes(self._shapes) / 1e6:.0f} MB here besides the step"
            )
        return 1 + LOOKS + self._refusals % LOOKS

    def _slowest(self, look: ErrorLook) -> float:
        """Return the look's time on the slowest rank, in µs. Update the fastest rank's step time."""
        mine = [look.took_us(), 1e3 * self._times.median_ms if self._times.step_ms else 0.0]
        everyone = self._site.gather_numbers("the time of a look", mine)
        self._step_us = min(step for _, step in everyone) or self._step_us
        return max(took for took, _ in everyone)

    @property
    def said(self) -> str:
        """Describe the source of the table's errors."""
        if not self.table.is_measured:
            return "errors of Gaussian values are assumed until each family of compressors has been looked at"
        passed_us = (self._steps - self._begun) * self._step_us
        share = self._looked_us / passed_us if passed_us else 0.0
        return f"errors are measured: {self.looks} looks at gradients took {share:.1%} of the time"
