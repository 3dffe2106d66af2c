"""Judge the running step by its times: other than predicted, or not. It never switches.

    step timed ─► against prediction ─► findings ─► whoever follows the plan acts

All ranks judge the same numbers at the same steps, so they find the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp import compat
from fxcomp.cost.table import CostTable
from fxcomp.errors import CannotReplan
from fxcomp.options import StepOptions
from fxcomp.runtime.clock import clock_of
from fxcomp.search.choose import predict_us
from fxcomp.site import Site
from fxcomp.step.drift.correct import corrected, describe
from fxcomp.step.drift.judge import Finding, Row, agreed_rows, all_costs, judge, step_with
from fxcomp.step.drift.predicted_costs import Cost, PredictedCosts, predict_costs
from fxcomp.step.drift.watch import Watch, timing_interval
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.step_times import StepTimes


class Monitor:
    """Keeps the times of one step function, and judges them. Every rank calls what compares, at the same steps."""

    def __init__(self, force: PlanInForce, site: Site, options: StepOptions):
        self._force, self._site, self._options = force, site, options
        self._calendar = force.calendar
        self.watch = self._made_watch()
        """Times some steps line by line; None where nothing is compared with its prediction."""
        self.times = StepTimes(site.device)
        self.timed: tuple[Row, ...] = ()
        """The time of each cost when it was last compared with its prediction, as all ranks see it."""
        self._compared: tuple[Cost, ...] = ()
        """The costs that some rank compares, the same on all ranks."""
        self._noted: set[str] = set()
        self.follow(0, "watching")

    def _made_watch(self) -> Watch | None:
        site, decision = self._site, self._force.decision
        if site.ranks.world_size == 1 or not self._options.is_watched:
            return None

        def predicted_us() -> float:
            return predict_us(decision.workload, decision.plan, decision.costs, site.cluster)

        step_us = site.ranks.from_rank_0("how long a step is", predicted_us)
        self._calendar.timed_every = timing_interval(
            step_us, self._calendar.verified, works_later=compat.works_later(site.device)
        )
        return Watch(self._calendar, clock_of(site.device))

    # Beginning again

    def forget(self, step: int) -> None:
        """Begin again at a step: earlier times say nothing of those to come."""
        self._calendar.followed_from = step
        self.times.forget()
        if self.watch is not None:
            self.watch.forget()

    def follow(self, step: int, topic: str) -> None:
        """Judge another plan from a step on."""
        self.forget(step)
        self._agree_on_costs(topic)

    def has_replanned(self, step: int, *, changed: bool) -> None:
        """Note what is found as new, and act on it later if planning again changed nothing."""
        self._noted.clear()
        self._calendar.be_patient(step, changed=changed)

    def _agree_on_costs(self, topic: str) -> None:
        """Join what ranks compare: each cost is judged by the ranks that have it."""
        if self.watch is not None:
            everyone = self._site.ranks.gather(topic, [cost.to_json() for cost in self._predicted.costs])
            self._compared = all_costs(map(Cost.from_json, theirs) for theirs in everyone)

    # Against the prediction

    def against_prediction(self, step: int) -> tuple[tuple[Finding, ...], str]:
        """Find the costs that are wrong. Returns the note on those that were not wrong before, too; it may be empty."""
        findings = self.compare(step)
        fresh = [finding for finding in findings if finding.cause not in self._noted]
        self._noted.update(finding.cause for finding in fresh)
        offers = not self._options.why_not_replan and not self.calls_for_another_plan(step)
        note = ""
        if fresh:  # the predicted steps are a rank's own
            note = self._site.ranks.from_rank_0("what drifts", lambda: self._described(step, fresh, offers=offers))
        return findings, note

    def calls_for_another_plan(self, step: int) -> bool:
        """Tell a step at which wrong costs lead to another plan, and not to a note alone."""
        return self._options.checks.replan == "auto" and step >= self._calendar.patient_until

    def compare(self, step: int) -> tuple[Finding, ...]:
        """Find the costs that have drifted, by numbers that all ranks share."""
        assert self.watch is not None, "asked only where something is timed"
        predicted, costs = self._predicted, self._force.decision.costs
        numbers = [predicted.step_us, costs.error, *self.watch.rows(step, predicted, self._compared)]
        everyone = self._site.gather_numbers("what steps took", numbers)
        self.timed = agreed_rows(self._compared, [theirs[2:] for theirs in everyone])
        step_us, error = everyone[0][:2]
        return judge(self.timed, step_us, error)

    def check_timed(self) -> None:
        """Raise CannotReplan if too few steps have been timed to say anything."""
        if self.watch is not None and all(row.first_us is None for row in self.timed):
            raise CannotReplan(
                f"too few steps have been timed: {self._calendar.judged_every} in a row are needed, with"
                " batches like the first one.\n  Train on and ask again; the report says what was measured."
            )

    def corrected_costs(self, findings: Sequence[Finding]) -> CostTable:
        """The table in force, put right by what was found."""
        return corrected(self._force.decision.costs, findings, self._predicted, self._site.cluster)

    def _described(self, step: int, findings: Sequence[Finding], *, offers: bool) -> str:
        predicted, costs = self._predicted, self._force.decision.costs
        becomes_us = step_with(findings, predicted, costs.processors)
        said = "; ".join(describe(finding, costs, self._site.cluster) for finding in findings)
        offer = " step.replan(), called by every rank, plans again." if offers else ""
        return (
            f"since step {step - self._calendar.judged_every}: {said}. With that the step is predicted"
            f" at {becomes_us / 1e3:.4g} ms, not {predicted.step_us / 1e3:.4g}.{offer}"
        )

    @property
    def _predicted(self) -> PredictedCosts:
        """The prediction for each line of the standing program."""
        return predict_costs(self._force.standing)
