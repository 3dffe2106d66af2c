"""Explain a running step: the decision in force, with what was measured and noted since."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.error_tables import ErrorTable
from fxcomp.graph.work import unknowns
from fxcomp.options import StepOptions
from fxcomp.plan.budget import Budget
from fxcomp.report.explanation import Explanation
from fxcomp.search.choose import flip_gbit
from fxcomp.search.decision import Decision, PlanMove, Raced
from fxcomp.search.question import Terms
from fxcomp.site import Site
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.step_times import StepTimes

EVERY_STEP_VERIFIED = (
    "every step is verified, so none is timed (Checks(verify=1)): plans do not race, and it is not noticed when steps"
    " come to take another time"
)


def notes_of(
    force: PlanInForce, race: str, errors: str, steps: int, unlike_first: int, skipped: int
) -> tuple[str, ...]:
    """List what is to be said of a step that has run so often: of its race, its errors, decisions and warm-up.

    `unlike_first` steps had other batches than the first one, and `skipped` were left out.
    """
    notes = [race] if race else []
    if (prelude := force.program.captured.prelude) is not None:
        notes.append(prelude.said)
    if not force.is_warm:
        *stages, last = force.calendar.warm_from
        notes.append(f"warming up until step {last}: stage {force.stage + 1} of {len(stages)}")
    if errors:
        notes.append(errors)
    if unlike_first:
        notes.append(
            f"{unlike_first} of {steps} steps had other batches than the first, of {force.first_kind.text}: every time"
            " here, predicted or measured, is of batches like that"
        )
    if skipped:
        notes.append(f"{skipped} of {steps} steps left out: a gradient was not finite")
    return tuple(notes)


class Explainer:
    """Makes the explanation of one step function, whose plans are chosen by these terms."""

    def __init__(self, site: Site, options: StepOptions, terms: Terms):
        self._site, self._options, self._terms = site, options, terms
        self._flip: tuple[Decision, float | None] | None = None

    def explanation(
        self,
        force: PlanInForce,
        times: StepTimes,
        notes: tuple[str, ...],
        race: tuple[Raced | None, bool],
        errors: ErrorTable,
        moves: Sequence[PlanMove],
    ) -> Explanation:
        """Gather all that a report is made of.

        `race` is the last one, and whether plans take turns now; `errors` are those measured so far,
        and `moves` the changes of the plan that they led to.
        """
        raced, is_racing = race
        decision = force.decision
        told = set(map(str, moves))
        others = [note for note in notes if note not in told]
        is_unseen = self._site.ranks.world_size > 1 and self._options.checks.verified.is_all
        return Explanation(
            plan=force.plan,
            timeline=force.predicted,
            workload=decision.workload,
            costs=decision.costs,
            cluster=self._site.cluster,
            batch=force.first_kind.text,
            choice=decision.choice,
            mode=self._options.compress.mode.value,
            flip_gbit=self._flip_gbit(decision),
            notes=(*decision.notes, *((EVERY_STEP_VERIFIED,) if is_unseen else ()), *others),
            measured_ms=times.median_ms,
            exposed_ms=times.exposed_ms,
            unknowns=unknowns(force.standing.captured.graph),
            raced=raced,
            is_racing=is_racing,
            budget=self._budget(errors),
            micro_batches=self._options.accumulate,
            moves=tuple(moves),
            stages=dict(zip(force.calendar.warm_from, force.plans, strict=True)),
            steps=self._options.compress.steps,
        )

    def _budget(self, errors: ErrorTable) -> Budget | None:
        """Count the budget in the errors measured last; before any, in those that chose the plan."""
        budget = self._terms.budget
        return budget if budget is None or not errors.is_measured else Budget(budget.asked, errors)

    def _flip_gbit(self, decision: Decision) -> float | None:
        """Search for the break-even bandwidth, which takes a second or so, once for each decision."""
        if decision.choice is None or self._site.cluster.hosts == 1:
            return None
        if self._flip is None or self._flip[0] is not decision:
            found = flip_gbit(decision.workload, decision.costs, self._site.cluster, self._terms)
            self._flip = decision, found
        return self._flip[1]
