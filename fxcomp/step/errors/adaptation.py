"""Adapt the plan to measured compression errors. All ranks change the plan between the same two steps.

    wait       until the plan's error has changed or INTERVAL steps have passed; never in a warm-up or race
    solve      rank 0 chooses strategies again, a few ms after each step; ranks ask for its answer every MEETING steps
    retune     if only compressor parameters change: every rank changes its program, one part after each of four steps
    emit       otherwise: every rank emits a program, one pass after each step
    switch     all ranks follow the new plan; residuals are kept

If solving raises, the plan stays. An initial dense plan also stays, because it has no error and was the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fxcomp.cluster.cluster import Cluster
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.plan.budget import plan_error
from fxcomp.plan.plan import Plan
from fxcomp.report.document import mb
from fxcomp.report.plan_diff import PlanFile, diff_plans
from fxcomp.search.decision import PlanMove
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms
from fxcomp.search.resolve import Resolve
from fxcomp.site import Site
from fxcomp.step.errors.error_looks import ErrorLooks
from fxcomp.step.plan_in_force import PlanInForce

INTERVAL = 1000

PLAN_CHANGE = 0.2
"""Relative change of a plan's error that triggers solving: three standard deviations of the averaged error in a steady
job (assumed).
"""

ROUNDING = 1e-5
"""Relative plan errors below this are treated as rounding."""

MEETING = 25
"""Steps between broadcasts of rank 0's answer. Solving takes about 50 steps."""

WORTH_SAVING = 0.02
"""Minimum saving of a new plan, relative to the predicted step time."""

WORTH_GIVING_BACK = 0.2
"""Minimum relative reduction of the error by a new plan with the same step time."""

SAME_STEP = 1e-3

SPENT = 0.95
"""Fraction of the error budget to use; the rest is a reserve for steps with larger errors."""

_TOPIC = "following the gradients"


def what_changed(before: ErrorTable, now: ErrorTable, plan: Plan, cluster: Cluster) -> str:
    """Return the reason why the errors `now` require solving again; empty if nothing has changed."""
    if not before.is_measured:
        return "errors are measured now"
    was, becomes = plan_error(plan, cluster, before), plan_error(plan, cluster, now)
    has_changed = max(was, becomes) > ROUNDING and abs(becomes - was) >= PLAN_CHANGE * was
    return f"the plan's error was {was:.3g} and is {becomes:.3g}" if has_changed else ""


class Adaptation:
    """Adaptation of the plan in force. Every rank calls `act` after each step outside of warm-up and races."""

    def __init__(
        self,
        force: PlanInForce,
        errors: ErrorLooks,
        terms: Terms,
        site: Site,
        follow: Callable[[int], None],
        note: Callable[[str], None],
    ):
        self._force, self._errors, self._terms, self._site = force, errors, terms, site
        self._follow, self._note = follow, note
        self._work: Generator[None] | None = None
        self._solved_by = self._compared = ASSUMED
        """Error tables of the last solution and of the last comparison."""
        self._solved_at = 0
        self._last_failure = ""
        self.moves: list[PlanMove] = []

    def act(self, step: int) -> None:
        """Continue the adaptation, or begin one if there is a reason."""
        if self._work is None and (why := self._why(step)):
            self._work = self._adapt(step, why)
        if self._work is not None and next(self._work, _DONE) is _DONE:
            self._work = None

    def drop(self, step: int) -> None:
        """Cancel the adaptation, because another plan is followed or the job resumes."""
        self._work, self._solved_by, self._solved_at = None, self._errors.table, step

    def _why(self, step: int) -> str:
        plan, table = self._force.plan, self._errors.table
        if not table.is_measured or (plan.is_dense and not self.moves):
            return ""
        if step - self._solved_at >= INTERVAL:
            return f"{INTERVAL} steps have passed"
        if table is self._compared:
            return ""
        self._compared = table
        return what_changed(self._solved_by, table, plan, self._site.cluster)

    def _adapt(self, step: int, why: str) -> Generator[None]:
        self._solved_by = self._errors.table
        answer = yield from self._answer()
        self._solved_at = step
        if "failed" in answer:
            if answer["failed"] != self._last_failure:  # a repeated failure is noted once
                self._last_failure = answer["failed"]
                self._note(f"step {step}: the plan stays; choosing it again raised {self._last_failure}")
            return
        move = PlanMove.from_json({"step": step, "why": why, **answer["move"]})
        if not move.changes:
            return
        plan = Plan.from_json(answer["plan"])
        is_retuned = self._force.can_retune(plan)
        program = yield from (self._force.retuned if is_retuned else self._force.emit)(plan)
        yield
        with self._site.ranks.together(_TOPIC):
            if is_retuned:
                self._force.retune(plan, program)
            else:
                self._force.switch(replace(self._force.decision, plan=plan), _TOPIC, program)
            self._follow(step)
        self.moves.append(move)
        self._note(str(move))

    def _answer(self) -> Generator[None, None, Mapping[str, Any]]:
        ranks = self._site.ranks
        turns = self._solve() if ranks.rank == 0 else None
        answers: list[dict[str, Any] | None] = [None]
        while True:
            for _ in range(MEETING):
                if turns is not None and answers[-1] is None:
                    answers.append(_next_answer(turns))
                yield
            with ranks.together(_TOPIC):
                shared = ranks.from_rank_0(f"{_TOPIC}: the answer", lambda: answers[-1])
            if shared is not None:
                return shared

    def _solve(self) -> Generator[dict[str, Any] | None]:
        """Choose strategies again by the current errors. Yield None after each part of the work, then the answer."""
        force, cluster, terms = self._force, self._site.cluster, self._terms.by(self._errors.table)
        workload, before = force.decision.workload, force.plan
        limit = terms.limit(workload, cluster)
        prices = StepPrices(workload, force.decision.costs, cluster)
        solving = Resolve(prices, before, replace(terms, share=SPENT))
        while (plan := solving.turn()) is None:
            yield None
        was, becomes = solving.before, solving.after
        assert was is not None
        assert becomes is not None
        saves = becomes.step_us < was.step_us * (1 - WORTH_SAVING)
        gives_back = becomes.error < was.error * (1 - WORTH_GIVING_BACK)
        is_worth = was.error > limit or saves or (gives_back and becomes.step_us <= was.step_us * (1 + SAME_STEP))
        yield {
            "plan": plan.to_json(),
            "move": {
                "error": [was.error, becomes.error],
                "limit": limit,
                "step_us": [was.step_us, becomes.step_us],
                "changes": changes_of(before, plan) if is_worth and plan != before else [],
            },
        }


def _next_answer(turns: Iterator[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Advance the solver. An exception becomes the answer, because other ranks wait for an answer."""
    try:
        return next(turns)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


_DONE = object()


_SAID = 4  # changes listed in a note


def changes_of(before: Plan, after: Plan) -> list[str]:
    """Return the changes of strategies as text, largest first."""
    diff = diff_plans(PlanFile(before), PlanFile(after))
    found = [f"{each.what} for {mb(each.bytes)} MB" for each in diff.strategies]
    more = [f"{len(found) - _SAID} more such changes"] if len(found) > _SAID else []
    moved = [f"{mb(diff.moved.bytes)} MB in other buckets"] if diff.moved else []
    return [*found[:_SAID], *more, *moved]
