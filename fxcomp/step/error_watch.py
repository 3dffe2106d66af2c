"""Keep what compressors lose of a running step's gradients: look at some steps, and average the looks.

    schedule ─► a look at some families ─► each family's table, smoothed ─► `table`, the same on every rank

Looks are taken while steps are quiet: one plan is followed, the one that stays, and it is neither verified nor timed
line by line in that step. Every rank calls all of this at the same steps.
"""

from __future__ import annotations

from collections.abc import Callable

from fxcomp.error_tables import ASSUMED, STANDARD, Columns, ErrorTable, cut, families, joined, joined_columns, smoothed
from fxcomp.plan.plan import Plan
from fxcomp.site import Site
from fxcomp.step.look_schedule import LookSchedule
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.step_look import StepLook, needed_bytes
from fxcomp.step.step_times import StepTimes
from fxcomp.step.table_drift import what_drifted

NS_PER_VALUE = {"densities": 13.0, "ranks": 12.0, "codecs": 15.0}
"""Of a look at one family, on one thread (measured, benchmarks/error_tables.py, 2026-11): the first guess."""

FASTER = 10.0
"""A GPU, as a guess, than one thread (assumed)."""


class ErrorWatch:
    """The error table of one step function, and the looks that it is from."""

    def __init__(
        self,
        force: PlanInForce,
        site: Site,
        times: StepTimes,
        note: Callable[[str], None],
        columns: Columns = STANDARD,
    ):
        self._force, self._site, self._times, self._note = force, site, times, note
        self._shapes = {name: tuple(force.inputs.shapes[name]) for name in force.trained_sizes}
        self._families = families(columns)
        values = sum(force.trained_sizes.values())
        speed = 1.0 if site.device.type == "cpu" else FASTER
        self.schedule = LookSchedule([values * _ns_per_value(each) / 1e3 / speed for each in self._families])
        self._tables = [ErrorTable(each) for each in self._families]
        self.looks = 0
        """The number of looks that were measured."""
        self.table: ErrorTable = ASSUMED
        """The mean of looks; without data until each family has been looked at."""
        self._marked = ASSUMED
        self._drift: tuple[ErrorTable, ErrorTable, Plan, str] | None = None
        self._look: StepLook | None = None
        self._plan, self._step = force.plan, 0
        self._has_noted = False

    # In a step

    def look_at(self, step: int, *, is_quiet: bool, is_free: bool, is_first_kind: bool) -> StepLook | None:
        """Return the look that a step takes; None for most steps. Called before every step.

        `is_quiet` says that the plan that stays is followed and none races; `is_free`, that nobody else watches this
        step. Both are the same on all ranks. `is_first_kind`, a rank's own, tells batches like the first one.
        """
        if not is_quiet or self._force.plan is not self._plan:
            self.schedule.postpone(step)
        self._plan, self._look = self._force.plan, None
        if is_free and is_quiet and self.schedule.is_due(step):
            columns = joined_columns([self._families[place] for place in self.schedule.families])
            residuals = self._force.state.residuals
            self._look = StepLook(self._shapes, residuals, self._site, columns, self.looks, wants=is_first_kind)
        return self._look

    def act(self, steps: int) -> None:
        """Take in the look of the step that has ended, and agree on the next one; after every step."""
        look, self._look, self._step = self._look, None, steps
        if look is not None and look.was_taken:
            self._take_in(look, steps)
        elif look is not None:
            self.schedule.postpone(steps)
            if look.some_lack_room and not self._has_noted:
                self._has_noted = True
                self._note(
                    f"step {steps - 1} took no look at gradients, for want of memory on some rank: beside the step,"
                    f" {needed_bytes(self._shapes) / 1e6:.0f} MB are needed here"
                )
        elif self.schedule.asks_at(steps):
            _, step_us = self._slowest(0.0)
            self.schedule.begin(steps, step_us)

    def _take_in(self, look: StepLook, steps: int) -> None:
        self.looks += 1
        places = self.schedule.families
        self.schedule.took(steps, *self._slowest(look.took_us()))
        if look.table is None:  # the step was left out
            return
        for place in places:
            newest = cut(look.table, self._families[place])
            self._tables[place] = smoothed(self._tables[place], newest)
        if all(each.rows for each in self._tables):
            self.table = joined(self._tables)

    def _slowest(self, look_us: float) -> tuple[float, float]:
        """Agree on the longest look and the shortest step; the step is 0 if some rank has timed none."""
        everyone = self._site.gather_numbers("what a look took", [look_us, self._step_us()])
        return max(look for look, _ in everyone), min(step for _, step in everyone)

    def _step_us(self) -> float:
        return 1e3 * self._times.median_ms if self._times.step_ms else 0.0

    # What looks have found

    @property
    def share(self) -> float:
        """The share of the time that looks take, as measured."""
        return self.schedule.share_at(self._step)

    def mark(self) -> None:
        """Remember today's table: the plan was chosen by it."""
        self._marked = self.table

    @property
    def drift(self) -> str:
        """What has changed since the mark, so that the plan should be chosen again; empty if nothing."""
        before, now, plan = self._marked, self.table, self._force.plan
        known = self._drift
        if known is None or known[0] is not before or known[1] is not now or known[2] is not plan:
            known = self._drift = before, now, plan, what_drifted(before, now, plan, self._site.cluster)
        return known[3]


def _ns_per_value(family: Columns) -> float:
    has = {"densities": family.densities, "ranks": family.ranks, "codecs": family.codecs}
    return sum(NS_PER_VALUE[what] for what, columns in has.items() if columns)
