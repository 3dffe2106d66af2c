"""Keep what compressors lose of a running step's gradients: look at some steps, and average the looks.

    a look at a family of compressors ─► its table, smoothed ─► `table`, the same on every rank
                ▲                                                  │
                └── after max(20, ⌈look / (0.007 · step)⌉) steps ◄─┘

Families take turns, each in a look of its own. What a look took on the slowest rank is paid for by the steps after it;
the first looks come one after the other, as long as they have taken AT_ONCE steps at most, and are paid for together.
Every rank calls all of this at the same steps.
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
"""Steps between looks at least, and the share of a job's time that looks may take."""

AT_ONCE, FIRST = 20.0, 2
"""Steps that the first looks may take to follow each other, and how far they are apart."""


def steps_after_look(unpaid_us: float, step_us: float, *, more_come_first: bool) -> tuple[int, float]:
    """Count the steps from a look to the next one; also what is then still to be paid for.

    `unpaid_us` is what looks took that no steps have paid for, `step_us` a step's time without a look, 0 if that is not
    known, and `more_come_first` until all families were looked at.
    """
    if more_come_first and unpaid_us < AT_ONCE * step_us:
        return FIRST, unpaid_us
    return max(LOOKS, ceil(unpaid_us / (LOOKS_SHARE * step_us))) if step_us else LOOKS, 0.0


class ErrorLooks(Observer):
    """The looks at one step function's gradients, and the error table that is from them."""

    wants = frozenset({Use.LOOK})

    def __init__(self, force: PlanInForce, site: Site, times: StepTimes, note: Callable[[str], None], steps: int = 0):
        """Take looks from the step of this number on; the schedule says when."""
        self._force, self._site, self._times, self._note = force, site, times, note
        self._shapes = {name: tuple(force.inputs.shapes[name]) for name in force.plan.names}
        self._has_noted = False
        self.begin_at(steps)

    def begin_at(self, steps: int) -> None:
        """Look at each family again, from this step of the job on: gradients may be of another time."""
        self.looks = 0
        """The number of looks that were measured."""
        self._means: list[Rows] = [{} for _ in FAMILIES]
        """Of each family's looks."""
        self._next = 0
        """The family whose turn it is."""
        self.table: ErrorTable = ASSUMED
        """The mean of looks, with shares of all squares; without data until every family has been looked at."""
        self._step_us = 0.0
        """A step's time without a look, on the fastest rank; 0 while some rank has timed none."""
        self._looked_us = self._unpaid_us = 0.0
        self._refusals = 0
        self._under_way: ErrorLook | None = None
        self._begun = self._steps = self._look_from = steps

    # In a step

    def before(self, step: StepUnderWay) -> None:
        """Begin the look that the step is for; not if the batch is unlike the first one on some rank."""
        residuals, family = self._force.state.residuals, FAMILIES[self._next]
        look = ErrorLook(family, self.looks, self._shapes, residuals, self._site, wants=step.is_like_first)
        step.runtime.gradients.on_gradient, step.runtime.gradients.on_update = look.see, look.measure
        self._under_way = look

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:  # noqa: ARG002
        """Let what was seen not count if the step was left out."""
        if self._under_way is not None:
            self._under_way.is_left_out = bool(step.runtime.counters.skipped)

    def between(self, steps: int) -> int:
        """Take in the look of the step that has ended. Returns the first step that may take the next one."""
        look, self._under_way, self._steps = self._under_way, None, steps
        if look is not None:
            wait = self._be_refused(look) if look.rows is None else self._take_in(look, look.rows)
            self._look_from = steps - 1 + wait
        return self._look_from

    def _take_in(self, look: ErrorLook, rows: Rows) -> int:
        """Average a look, and make the table once every family has been looked at. Returns the steps to the next."""
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
        """Try again later, after one step more each time: where every 21st batch is another, not always at that one."""
        self._refusals += 1
        if look.some_lack_room and not self._has_noted:
            self._has_noted = True
            self._note(
                f"step {self._steps - 1} took no look at gradients, for want of memory on some rank: beside the step,"
                f" {needed_bytes(self._shapes) / 1e6:.0f} MB are needed here"
            )
        return 1 + LOOKS + self._refusals % LOOKS

    def _slowest(self, look: ErrorLook) -> float:
        """Agree on how long a look took on the slowest rank, and a step on the fastest one."""
        mine = [look.took_us(), 1e3 * self._times.median_ms if self._times.step_ms else 0.0]
        everyone = self._site.gather_numbers("what a look took", mine)
        self._step_us = min(step for _, step in everyone) or self._step_us
        return max(took for took, _ in everyone)

    @property
    def said(self) -> str:
        """Tell what the table is from, for the report."""
        if not self.table.is_measured:
            return "errors of Gaussian values are assumed until each family of compressors has been looked at"
        passed_us = (self._steps - self._begun) * self._step_us
        share = self._looked_us / passed_us if passed_us else 0.0
        return f"errors are measured: {self.looks} looks at gradients took {share:.1%} of the time"
