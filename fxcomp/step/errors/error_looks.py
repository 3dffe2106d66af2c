"""Keep what compressors lose of a running step's gradients: look at some steps, and average the looks.

    a look at a family of compressors ─► its table, smoothed ─► `table`, the same on every rank
                ▲                                                  │
                └── after max(20, ⌈look / (0.007 · step)⌉) steps ◄─┘

Families take turns, each in a look of its own. What a look took on the slowest rank is paid for by the steps after it;
the first looks come one after the other, as long as they have taken AT_ONCE steps at most, and are paid for together.
Checks of what the plan in force loses are paid for apart. Every rank calls all of this at the same steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

from torch import Tensor

from fxcomp.cluster.cluster import Cluster
from fxcomp.error_tables import ASSUMED, STANDARD, ErrorTable, cut, families, joined, smoothed
from fxcomp.error_tables.families import share_of, total_squares
from fxcomp.error_tables.table import LAG
from fxcomp.errors import BadErrorTable, BadState
from fxcomp.plan.budget import plan_error
from fxcomp.plan.plan import Plan
from fxcomp.site import Site
from fxcomp.state.saved_state import Given
from fxcomp.step.calendar import Use
from fxcomp.step.errors.applied import AppliedError, lags
from fxcomp.step.errors.look import ErrorLook, needed_bytes
from fxcomp.step.observer import Observer, StepUnderWay
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.step_times import StepTimes

LOOKS, LOOKS_SHARE = 20, 0.007
"""Steps between looks at least, and the share of a job's time that looks may take."""

CHECKS, CHECKS_SHARE = 25, 0.003
"""The same of checks of what the plan in force really loses."""

AT_ONCE, FIRST = 20.0, 2
"""Steps that the first looks may take to follow each other, and how far they are apart."""

OUTLIER = 4.0
"""A look that took so many times as long as the shortest at its family was disturbed, and is not paid for in full."""

MOST_EXCESS = 3.0
"""Measurements above it are taken for a disturbance."""

PLAN_CHANGE = 0.2
"""Three times the deviation of a plan's smoothed error between looks of a job whose errors stay (assumed)."""

GRADIENT_CHANGE = 2.0
"""A column's error, or a gradient's share of all squares, has become so many times as large or as small."""

HEAVY = 0.01
"""Of all squares, in either table: changes of gradients with less do not count."""

ROUNDING = 1e-5
"""Errors below it are rounding, of which no budget notices a change."""


class Pace:
    """Says how many steps pay for what looks took, and for what a check took."""

    def __init__(self) -> None:
        self.step_us = 0.0
        """A step's time without a look, on the fastest rank; 0 while some rank has timed none."""
        self._shortest_us: dict[int, float] = {}
        """The shortest look at each family."""
        self._unpaid_us = 0.0

    def after_look(self, family: int, took_us: float, *, more_come_first: bool) -> int:
        """Count the steps from a look at a family to the next one; `more_come_first` until all were looked at."""
        shortest_us = self._shortest_us[family] = min(took_us, self._shortest_us.get(family, took_us))
        self._unpaid_us += min(took_us, OUTLIER * shortest_us)
        if more_come_first and self._unpaid_us < AT_ONCE * self.step_us:
            return FIRST
        us, self._unpaid_us = self._unpaid_us, 0.0
        return self._steps_for(us, LOOKS, LOOKS_SHARE)

    def after_check(self, took_us: float) -> int:
        """Count the steps from a check to the next one."""
        return self._steps_for(took_us, CHECKS, CHECKS_SHARE)

    def _steps_for(self, us: float, least: int, share: float) -> int:
        return max(least, ceil(us / (share * self.step_us))) if self.step_us else least


class ErrorLooks(Observer):
    """The looks at one step function's gradients, the checks of its plan, and the error table that is from them."""

    wants = frozenset({Use.LOOK, Use.CHECK})

    def __init__(self, force: PlanInForce, site: Site, times: StepTimes, note: Callable[[str], None], steps: int = 0):
        """Take looks from the step of this number on."""
        self._force, self._site, self._times, self._note = force, site, times, note
        self._calendar = force.calendar
        self._shapes = {name: tuple(force.inputs.shapes[name]) for name in force.plan.names}
        self._families = families(STANDARD)
        self.looks = 0
        """The number of looks that were measured."""
        self._has_noted = False
        self._begin_with(None, steps)

    def _begin_with(self, table: ErrorTable | None, steps: int) -> None:
        self._tables = [ErrorTable(each) if table is None else cut(table, each) for each in self._families]
        """By family."""
        self._next = 0
        """The family whose turn it is."""
        self.table: ErrorTable = ASSUMED if table is None else table
        """The mean of looks, with shares of all squares; without data until every family has been looked at."""
        self._pace, self._looked_us, self._refusals = Pace(), 0.0, 0
        self._lags: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        """Of all squares, as checks have found them."""
        self.applied: float | None = None
        """The error of the plan in force on the whole gradient, as measured last."""
        self.excess = 1.0
        """Its error over the table's, 1 at least: v, and so its spectrum, depends on the plan."""
        self._marked = ASSUMED
        self._change: tuple[ErrorTable, ErrorTable, Plan, str] | None = None
        self._under_way: ErrorLook | AppliedError | None = None
        self._begun = self._steps = steps
        calendar = self._calendar
        calendar.look_from = steps if calendar.look_from is None else calendar.look_from
        if not self.table.is_measured:  # there is nothing to compare with
            calendar.check_from = None
        elif calendar.check_from is None:
            calendar.check_from = steps

    # In a step

    def before(self, step: StepUnderWay) -> None:
        """Begin the look that the step is for, or the check of what its plan loses.

        A look is not taken if the batch is unlike the first one on some rank.
        """
        if step.use is Use.LOOK:
            columns, residuals = self._families[self._next], self._force.state.residuals
            seen = ErrorLook(columns, self.looks, self._shapes, residuals, self._site, wants=step.is_like_first)
        else:
            seen = AppliedError(self._force.plan.sizes, self._site.device, step.number)
            if not seen.work.lacks_room:
                seen.owes(self._owed)
        self._under_way = seen
        seen.before(step.runtime)

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:  # noqa: ARG002
        """Let what was seen not count if the step was left out."""
        if self._under_way is not None:
            self._under_way.after(step.runtime)

    @property
    def _owed(self) -> Mapping[str, Tensor]:
        return self._force.state.owed_here(self._force.inputs.sizes, self._site.ranks.world_size)

    def between(self, steps: int) -> None:
        """Take in the look or the check of the step that has ended."""
        seen, self._under_way, self._steps = self._under_way, None, steps
        if isinstance(seen, AppliedError):
            self._take_check(seen, steps)
        elif seen is not None and seen.was_taken:
            self._take_look(seen, steps)
        elif seen is not None:
            self._be_refused(seen, steps)

    def _take_look(self, look: ErrorLook, steps: int) -> None:
        took_us = self._slowest(look)
        self._looked_us += took_us
        if look.table is not None:  # the step was not left out
            self.looks += 1
            self._tables[self._next] = smoothed(self._tables[self._next], look.table)
            self._join()
        more_come_first = not self._has_looked_at_all
        wait = self._pace.after_look(self._next, took_us, more_come_first=more_come_first)
        self._calendar.look_from = steps - 1 + wait
        self._next = (self._next + 1) % len(self._families)

    def _be_refused(self, look: ErrorLook, steps: int) -> None:
        """Try again later, after one step more each time: where every 21st batch is another, not always at that one."""
        self._refusals += 1
        self._calendar.look_from = steps + LOOKS + self._refusals % LOOKS
        if look.some_lack_room and not self._has_noted:
            self._has_noted = True
            self._note(
                f"step {steps - 1} took no look at gradients, for want of memory on some rank: beside the step,"
                f" {needed_bytes(self._shapes) / 1e6:.0f} MB are needed here"
            )

    def _take_check(self, check: AppliedError, steps: int) -> None:
        """Take in what the plan lost of a step: powersgd's lag, and what the whole plan loses beyond the table."""
        applied = check.applied({} if check.work.lacks_room else self._owed, self._site.sum_over_ranks)
        self._calendar.check_from = steps + self._pace.after_check(self._slowest(check))
        squares = sum(each.squares for each in applied.values())
        if check.is_void or not 0 < squares < inf:
            return
        for name, each in applied.items():
            share = each.squares / squares
            self._shares[name] = (share + self._shares.get(name, share)) / 2
        errors = {name: each.error for name, each in applied.items()}
        self._lags = lags(self._lags, errors, self._force.plan, joined(self._tables))
        self._join()
        predicted = plan_error(self._force.plan, self._site.cluster, self.table)
        self.applied = sum(each.squares * each.error for each in applied.values()) / squares
        if predicted > 0:
            ratio = min(MOST_EXCESS, self.applied / predicted)
            self.excess = max(1.0, (self.excess + ratio) / 2)

    @property
    def _has_looked_at_all(self) -> bool:
        return all(each.rows for each in self._tables)

    def _join(self) -> None:
        """Make the table of what looks and checks have found, once every family has been looked at."""
        if not self._has_looked_at_all:
            return
        others = statistics.median(self._lags.values()) if self._lags else LAG
        table = joined(self._tables).lagging(self._lags, others)
        rows = {name: replace(row, squares=self._shares.get(name, row.squares)) for name, row in table.rows.items()}
        self.table = replace(table, rows=rows)
        if self._calendar.check_from is None and self.table.is_measured:
            self._calendar.check_from = self._steps

    def _slowest(self, seen: ErrorLook | AppliedError) -> float:
        """Agree on how long a look or a check took on the slowest rank, and a step on the fastest one."""
        mine = [seen.work.took_us(), 1e3 * self._times.median_ms if self._times.step_ms else 0.0]
        everyone = self._site.gather_numbers("what a look took", mine)
        self._pace.step_us = min(step for _, step in everyone) or self._pace.step_us
        return max(took for took, _ in everyone)

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
        fits = table.columns == STANDARD and self._shapes == {name: row.shape for name, row in table.rows.items()}
        self._begin_with(table if fits else None, steps)

    # What looks have found

    @property
    def share(self) -> float:
        """The share of the time that looks take, as measured."""
        passed_us = (self._steps - self._begun) * self._pace.step_us
        return self._looked_us / passed_us if passed_us else 0.0

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
    def change(self) -> str:
        """Describe a change since the mark for which the plan should be chosen again; empty if nothing."""
        before, now, plan = self._marked, self.table, self._force.plan
        known = self._change
        if known is None or known[0] is not before or known[1] is not now or known[2] is not plan:
            known = self._change = before, now, plan, what_changed(before, now, plan, self._site.cluster)
        return known[3]


def _read(data: Mapping[str, Any]) -> tuple[int, ErrorTable]:
    try:
        return int(data["looks"]), ErrorTable.from_json(data["table"])
    except (BadErrorTable, KeyError, TypeError, ValueError) as error:
        raise BadState(
            f"the state's error table cannot be read: {error}.\n  Load a state as state_dict() returned it."
        ) from None


def what_changed(before: ErrorTable, now: ErrorTable, plan: Plan, cluster: Cluster) -> str:
    """Say the first change for which a plan chosen by the old errors should be chosen again; empty if there is none.

    What the plan in force loses says nothing of what others would lose, so each column of heavy gradients counts,
    whatever they travel by.
    """
    if before.is_measured != now.is_measured:
        return "errors are measured now" if now.is_measured else "errors are measured no more"
    was, becomes = plan_error(plan, cluster, before), plan_error(plan, cluster, now)
    if max(was, becomes) > ROUNDING and abs(becomes - was) >= PLAN_CHANGE * was:
        return f"the plan's error was {was:.3g} and is {becomes:.3g}"
    old_squares, new_squares = total_squares(before), total_squares(now)
    for name, row in now.rows.items():
        old = before.rows.get(name)
        if old is None:
            return f"{name} was not measured before"
        shares = share_of(old, old_squares), share_of(row, new_squares)
        if max(shares) < HEAVY:
            continue
        if _has_changed(*shares):
            return f"{name} had {shares[0]:.1%} of the squares and has {shares[1]:.1%}"
        for column, one, other in zip(now.columns.names, old.errors, row.errors, strict=True):
            if max(one, other) > ROUNDING and _has_changed(one, other):
                return f"what {column} loses of {name} was {one:.3g} and is {other:.3g}"
    return ""


def _has_changed(one: float, other: float) -> bool:
    return max(one, other) >= GRADIENT_CHANGE * min(one, other)
