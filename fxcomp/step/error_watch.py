"""Keep what compressors lose of a running step's gradients: look at some steps, and average the looks.

    schedule ─► a look at some families ─► each family's table, smoothed ─► `table`, the same on every rank

Looks are taken while steps are quiet: one plan is followed, the one that stays, and nobody else watches the step. Every
rank calls all of this at the same steps.
"""

from __future__ import annotations

import statistics
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from math import ceil, inf, prod
from typing import Any

from torch import Tensor

from fxcomp.capture.batch_type import BatchType
from fxcomp.error_tables import (
    ASSUMED,
    STANDARD,
    Columns,
    ErrorTable,
    cut,
    families,
    joined,
    joined_columns,
    of_rows,
    smoothed,
    stacked,
)
from fxcomp.error_tables.table import LAG
from fxcomp.errors import BadErrorTable, BadState
from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.plan import Plan
from fxcomp.site import Site
from fxcomp.state.saved_state import Given
from fxcomp.step.applied_error import AppliedError, lags
from fxcomp.step.calendar import Calendar, Use
from fxcomp.step.look_schedule import LookSchedule
from fxcomp.step.monitor import Monitor
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.step_look import Aim, StepLook, needed_bytes
from fxcomp.step.table_drift import what_drifted

NS_PER_VALUE = {"densities": 13.0, "ranks": 12.0, "codecs": 15.0}
US_PER_GRADIENT = {"densities": 150.0, "ranks": 150.0, "codecs": 300.0}
"""Of a look at one family, on one thread: the first guess (measured on 25 M values and on 482 gradients, 2026-11)."""

CHECKS = 25
"""Steps between checks of what the plan in force really loses."""

CHECKS_SHARE = 0.003
"""The share of the time that checks may take, beside that of looks."""

MOST_EXCESS = 3.0
"""What is measured above it is taken for a disturbance."""

FASTER = 10.0
"""A value on a GPU, as a guess (assumed); a gradient takes what starting its kernels takes."""


class ErrorWatch:
    """The error table of one step function, and the looks that it is from."""

    def __init__(
        self,
        force: PlanInForce,
        site: Site,
        monitor: Monitor,
        note: Callable[[str], None],
        columns: Columns = STANDARD,
    ):
        self._force, self._site, self._monitor, self._note = force, site, monitor, note
        self._shapes = {name: tuple(force.inputs.shapes[name]) for name in force.trained_sizes}
        self._families = families(columns)
        self._begin_with(None)
        self.looks = 0
        """The number of looks that were measured."""
        self._marked = ASSUMED
        self._drift: tuple[ErrorTable, ErrorTable, Plan, str] | None = None
        self._look: StepLook | None = None
        self._plan, self._step = force.plan, 0
        self._has_noted = False

    def _begin_with(self, table: ErrorTable | None) -> None:
        self._groups = [tuple(self._shapes)]
        """The gradients that a look is at, in turn; all, unless one look at a family would take too long."""
        self._tables = [[ErrorTable(each) if table is None else cut(table, each) for each in self._families]]
        """By group and family."""
        self.table: ErrorTable = ASSUMED if table is None else table
        """The mean of looks, with shares of all squares; without data until everything has been looked at."""
        self._lags: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        """Of all squares, as checks have found them."""
        self.applied: float | None = None
        """What the plan in force lost of the whole gradient, as measured last."""
        self.excess = 1.0
        """What it loses over what the table says, 1 at least: v, and so its spectrum, depends on the plan."""
        self._check: AppliedError | None = None
        self._checked_at = 0
        self.schedule = LookSchedule([sum(us) for us in zip(*map(self._guessed_us, self._shapes), strict=True)])

    def _guessed_us(self, name: str) -> list[float]:
        """Guess what a look at one gradient takes, by family."""
        speed = 1.0 if self._site.device.type == "cpu" else FASTER
        return [_guessed_us(each, prod(self._shapes[name]) / speed) for each in self._families]

    # In a step

    def enter_in(self, calendar: Calendar, step: int) -> Calendar:
        """Enter the next look and the next check; before every step. A plan that has just come has no look yet."""
        if not calendar.is_quiet or self._force.plan is not self._plan:
            self.schedule.postpone(step)
        self._plan = self._force.plan
        can_check = self.table.is_measured and self._force.state.velocities is None
        check_from = self._checked_at if can_check else None
        return replace(calendar, look_from=self.schedule.due_from, check_from=check_from)

    def begin(self, use: Use | None, kind: BatchType) -> StepLook | AppliedError | None:
        """Return the look that the step takes, or the check of what its plan loses; None for most steps.

        A look is not taken if the batch is unlike the first one on some rank.
        """
        self._look = self._check = None
        if use is Use.LOOK:
            columns = joined_columns([self._families[place] for place in self.schedule.families])
            aim = Aim(columns, self._groups[self.schedule.group], self.looks)
            residuals, wants = self._force.state.residuals, self._force.serves_first(kind)
            self._look = StepLook(aim, self._shapes, residuals, self._site, wants=wants)
        elif use is Use.CHECK:
            self._check = self._begun()
        return self._look or self._check

    def _begun(self) -> AppliedError:
        """Begin to measure what the plan loses of a step: with what is owed before it."""
        applied = AppliedError(self._force.trained_sizes, self._site.device, self._step)
        if not applied.lacks_room:
            applied.owes(self._owed)
        return applied

    @property
    def _owed(self) -> Mapping[str, Tensor]:
        return self._force.state.owed_here(self._force.inputs.sizes, self._site.ranks.world_size)

    def act(self, steps: int) -> None:
        """Take in the look of the step that has ended, and agree on the next one; after every step."""
        look, self._look, self._step = self._look, None, steps
        check, self._check = self._check, None
        if check is not None:
            self._take_check(check, steps)
        elif look is not None and look.was_taken:
            self._take_in(look, steps)
        elif look is not None:
            self.schedule.was_refused(steps)
            if look.some_lack_room and not self._has_noted:
                self._has_noted = True
                self._note(
                    f"step {steps - 1} took no look at gradients, for want of memory on some rank: beside the step,"
                    f" {needed_bytes(self._shapes, self._groups[self.schedule.group]) / 1e6:.0f} MB are needed here"
                )
        elif self.schedule.asks_at(steps):
            _, step_us = self._slowest(0.0)
            self.schedule.begin(steps, step_us)
            number = 0
            while number < len(self._groups):  # guesses count until there are measurements
                number += not self._split(number)

    def _take_in(self, look: StepLook, steps: int) -> None:
        self.looks += 1
        places, group = self.schedule.families, self.schedule.group
        self.schedule.took(steps, *self._slowest(look.took_us()))
        if look.table is not None:  # the step was not left out
            for place in places:
                newest = cut(look.table, self._families[place])
                self._tables[group][place] = smoothed(self._tables[group][place], newest)
            self._join()
        self._split(group)

    def _take_check(self, check: AppliedError, steps: int) -> None:
        """Take in what the plan lost of a step: powersgd's lag, and what the whole plan loses beyond the table."""
        applied = check.applied({} if check.lacks_room else self._owed, self._site.sum_over_ranks)
        check_us, step_us = self._slowest(check.took_us())
        wait = ceil(check_us / (CHECKS_SHARE * step_us)) if step_us > 0 else 0
        self._checked_at = steps + max(CHECKS, wait)
        if check.is_void:
            return
        squares = sum(each.squares for each in applied.values())
        if not 0 < squares < inf:
            return
        for name, each in applied.items():
            share = each.squares / squares
            self._shares[name] = (share + self._shares.get(name, share)) / 2
        errors = {name: each.error for name, each in applied.items()}
        self._lags = lags(self._lags, errors, self._force.plan, self._raw())
        self._join()
        predicted = plan_error(self._force.plan, self._site.cluster, self.table)
        self.applied = sum(each.squares * each.error for each in applied.values()) / squares
        if predicted > 0:
            ratio = min(MOST_EXCESS, self.applied / predicted)
            self.excess = max(1.0, (self.excess + ratio) / 2)

    def _raw(self) -> ErrorTable:
        """The means of looks, with powersgd's errors as those of the best matrices."""
        return joined([stacked(of_family) for of_family in zip(*self._tables, strict=True)])

    def _join(self) -> None:
        """Make the table of what looks and checks have found, once everything has been looked at."""
        if all(each.rows for tables in self._tables for each in tables):
            others = statistics.median(self._lags.values()) if self._lags else LAG
            table = self._raw().lagging(self._lags, others)
            rows = {name: replace(row, squares=self._shares.get(name, row.squares)) for name, row in table.rows.items()}
            self.table = replace(table, rows=rows)

    def _split(self, number: int) -> bool:
        """Split a group of gradients in two if a look at one family takes longer than a step has room for."""
        names = self._groups[number]
        if len(names) == 1 or not self.schedule.is_too_long(number):
            return False
        added = list(accumulate(sum(self._guessed_us(name)) for name in names))
        end = min(max(1, bisect(added, added[-1] / 2)), len(names) - 1)
        parts = names[:end], names[end:]
        self._groups[number : number + 1] = parts
        self._tables[number : number + 1] = [[of_rows(t, part) for t in self._tables[number]] for part in parts]
        self.schedule.split(number, added[end - 1] / added[-1])
        return True

    def _slowest(self, look_us: float) -> tuple[float, float]:
        """Agree on the longest look and the shortest step; the step is 0 if some rank has timed none."""
        everyone = self._site.gather_numbers("what a look took", [look_us, self._step_us()])
        return max(look for look, _ in everyone), min(step for _, step in everyone)

    def _step_us(self) -> float:
        return 1e3 * self._monitor.times.median_ms if self._monitor.times.step_ms else 0.0

    # Saved and loaded

    def state(self) -> dict[str, Any]:
        """Return what looks have found as plain data, the same on every rank."""
        return {"looks": self.looks, "table": self.table.to_json()}

    def resume(self, steps: int, given: Given) -> None:
        """Go on from the table in a saved state, or without data where none fits; every rank calls it.

        The table is taken from the first rank that has one, so that all go on with the same. Raises BadState.
        """
        ranks = self._site.ranks
        states = [given] if isinstance(given, Mapping) else given or ()
        mine = next((state["errors"] for state in states if "errors" in state), None)
        has_one = ranks.gather("whose error table is loaded", mine is not None)
        sent = mine if True in has_one and ranks.rank == has_one.index(True) else None
        data = next((each for each in ranks.gather("loading the error table", sent) if each is not None), None)
        self.looks, table = (0, ASSUMED) if data is None else ranks.attempt("the error table", lambda: _read(data))
        self._marked, self._look, self._step = ASSUMED, None, steps
        fits = table.columns == joined_columns(self._families) and self._shapes == _shapes(table)
        self._begin_with(table if fits else None)
        self.schedule.postpone(steps)

    # What looks have found

    @property
    def share(self) -> float:
        """The share of the time that looks take, as measured."""
        return self.schedule.share_at(self._step)

    def mark(self) -> None:
        """Remember today's table: the plan was chosen by it."""
        self._marked = self.table

    @property
    def said(self) -> str:
        """Tell what the table is from, for the report."""
        if not self.table.is_measured:
            return "errors of Gaussian values are assumed until each family of compressors has been looked at"
        return f"errors are measured: {self.looks} looks at gradients took {self.share:.1%} of the time"

    @property
    def drift(self) -> str:
        """What has changed since the mark, so that the plan should be chosen again; empty if nothing."""
        before, now, plan = self._marked, self.table, self._force.plan
        known = self._drift
        if known is None or known[0] is not before or known[1] is not now or known[2] is not plan:
            known = self._drift = before, now, plan, what_drifted(before, now, plan, self._site.cluster)
        return known[3]


def _guessed_us(family: Columns, values: float) -> float:
    has = {"densities": family.densities, "ranks": family.ranks, "codecs": family.codecs}
    return sum(US_PER_GRADIENT[what] + NS_PER_VALUE[what] / 1e3 * values for what, columns in has.items() if columns)


def _shapes(table: ErrorTable) -> dict[str, tuple[int, ...]]:
    return {name: row.shape for name, row in table.rows.items()}


def _read(data: Mapping[str, Any]) -> tuple[int, ErrorTable]:
    try:
        return int(data["looks"]), ErrorTable.from_json(data["table"])
    except (BadErrorTable, KeyError, TypeError, ValueError) as error:
        raise BadState(
            f"the state's error table cannot be read: {error}.\n  Load a state as state_dict() returned it."
        ) from None
