"""Act on what the monitor finds: go back to dense, or plan anew. All ranks act at the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fxcomp.cost.table import CostTable
from fxcomp.errors import CannotReplan
from fxcomp.options import StepOptions
from fxcomp.ranks import Ranks
from fxcomp.search.decision import Decision, Experience
from fxcomp.step.drift.judge import Finding
from fxcomp.step.monitor import Monitor, SlowerThanDense
from fxcomp.step.plan_in_force import PlanInForce


class Replanner(Protocol):
    """Decides again; all ranks call it together."""

    @property
    def bursts(self) -> float: ...

    def again(self, costs: CostTable, experience: Experience, topic: str) -> Decision: ...


class Steering:
    """Switches the plan in force where the monitor's verdicts call for it, and notes why."""

    def __init__(
        self,
        in_force: PlanInForce,
        monitor: Monitor,
        planner: Replanner,
        options: StepOptions,
        ranks: Ranks,
        note: Callable[[str], None],
    ):
        self._in_force, self._monitor, self._planner = in_force, monitor, planner
        self._options, self._ranks, self._note = options, ranks, note

    def act(self, step: int) -> None:
        """Judge where it is time for that, after so many steps, and act on it."""
        if self._monitor.judges_dense_at(step):
            with self._ranks.together("comparing the plan with dense"):
                slower = self._monitor.against_dense()
                if slower is not None:
                    self._go_dense(slower, step)
        if self._monitor.judges_prediction_at(step):
            with self._ranks.together("comparing steps with their prediction"):
                drift = self._monitor.against_prediction(step)
                if drift.note:
                    self._note(drift.note)
                if drift.calls_for_another_plan:
                    changed = self._plan_anew(drift.findings, step)
                    self._monitor.has_replanned(step, changed=changed)

    def check_replan(self, step: int) -> None:
        """Raise CannotReplan where planning anew is no option."""
        if self._monitor.watch is None:
            raise CannotReplan(
                "nothing is timed here: with one rank, with replan='off', or with plan= and no costs=.\n"
                "  Leave plan= and replan= out."
            )
        if self._options.why_not_replan:
            raise CannotReplan(self._options.why_not_replan)
        if not self._in_force.is_warm:
            last = self._in_force.stages[-1].first_step
            raise CannotReplan(
                f"the warm-up of error feedback lasts until step {last}, this is {step}.\n"
                "  Plan anew once the plan itself is followed."
            )

    def replan(self, step: int) -> bool:
        """Plan anew if a cost is wrong; every rank calls it. Returns whether the plan changed. Raises CannotReplan."""
        findings = self._monitor.compare(step)
        self._ranks.attempt("looking at what was timed", self._monitor.check_timed)
        return self._plan_anew(findings, step) if findings else False

    def _go_dense(self, slower: SlowerThanDense, step: int) -> None:
        self._in_force.switch(self._in_force.decision.for_dense(), "going back to dense")
        self._monitor.follow(step, "watching the dense step")
        self._monitor.be_patient(step)
        self._note(
            f"switched back to dense at step {step}: {slower.measured_ms:.1f} ms a step measured with compression,"
            f" {slower.dense_ms:.1f} ms without. What compression had left out so far goes out with the next step."
        )

    def _plan_anew(self, findings: Sequence[Finding], step: int) -> bool:
        """Decide by a table that is put right, and follow that. Returns whether the plan changed."""
        topic = "planning anew"
        table = self._ranks.attempt(f"{topic}: correcting the costs", lambda: self._monitor.corrected_costs(findings))
        experience, before = self._monitor.experience_now(), self._in_force.plan
        decision = self._planner.again(table, experience, topic)
        self._in_force.switch(decision, topic)
        self._monitor.follow(step, "watching the new plan")
        changed = decision.plan != before
        timeline = self._in_force.standing.timeline  # a rank's own: shards may differ
        predicted_us = self._ranks.from_rank_0(f"{topic}: the prediction", lambda: timeline.step_time_us)
        self._note(_said_of(decision, experience, findings, step, predicted_us, changed=changed))
        return changed


def _said_of(
    decision: Decision,
    experience: Experience,
    findings: Sequence[Finding],
    step: int,
    predicted_us: float,
    *,
    changed: bool,
) -> str:
    """The note on a plan that was made anew."""
    assert decision.choice is not None, "what is chosen has been compared"
    text = (
        f"planned anew at step {step}, for {', '.join(str(finding.cost) for finding in findings)}:"
        f" {'another plan is followed' if changed else 'the plan stays'},"
        f" predicted at {predicted_us / 1e3:.4g} ms a step; dense at {decision.choice.dense_us / 1e3:.4g}."
    )
    if decision.mistrusted_us is None:
        return text
    return (
        f"{text} With compression {decision.mistrusted_us / 1e3:.4g} ms are predicted, which is not believed: the plan"
        f" that was given up took {experience.given_up_us / 1e3:.4g}."
    )
