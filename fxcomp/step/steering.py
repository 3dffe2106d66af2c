"""Act on what runs and on what the monitor finds: let plans race, or plan again. All ranks act at the same steps.

WARM_STEPS of the plan that stays ─► the race ─► its winner ─► judged against its prediction
                                        ▲                               │
                                        └── the runners of a new plan, or the same ones again ◄── drift
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.errors import CannotReplan
from fxcomp.options import StepOptions
from fxcomp.plan.plan import Plan
from fxcomp.search.decision import Decision, Raced
from fxcomp.search.question import Terms
from fxcomp.search.runners import lined_up
from fxcomp.site import Site
from fxcomp.state.saved_state import Given
from fxcomp.step.drift.judge import Finding
from fxcomp.step.errors.adaptation import Adaptation
from fxcomp.step.errors.error_looks import ErrorLooks
from fxcomp.step.monitor import Monitor
from fxcomp.step.observer import Observer
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.referee import Referee


class Replanner(Protocol):
    """Decides again; all ranks call it together."""

    @property
    def terms(self) -> Terms: ...

    def again(self, costs: CostTable, topic: str, errors: ErrorTable = ASSUMED) -> Decision: ...

    def measure_next_time(self) -> None: ...


class Steering(Observer):
    """Switches the plan in force where a race or the monitor's verdicts call for it, and notes why."""

    def __init__(
        self,
        in_force: PlanInForce,
        monitor: Monitor,
        planner: Replanner,
        options: StepOptions,
        site: Site,
        note: Callable[[str], None],
    ):
        self._in_force, self._monitor, self._planner = in_force, monitor, planner
        self._options, self._site, self._ranks, self._note = options, site, site.ranks, note
        self._calendar = in_force.calendar
        self.referee = Referee(in_force.calendar, monitor.times, site, in_force.take_turn, self._settle)
        """It sees each step after this one, so that a race which has just ended is judged from the next step on."""
        self._planned_for: Plan | None = None
        """The plan that was followed before ranks planned again, until the race after that is over."""
        self.adaptation: Adaptation | None = None
        """Lets the plan follow the gradients; None without an error budget."""
        self._line_up(0, "compiling")

    def between(self, steps: int) -> None:
        """Do what is due after so many steps."""
        if self.referee.is_racing:
            return
        if self._calendar.judges_after(steps):
            with self._ranks.together("comparing steps with their prediction"):
                self._judge(steps)
        elif self.adaptation is not None and self._calendar.is_quiet_at(steps - 1):
            self.adaptation.act(steps)

    def follow(self, step: int, topic: str) -> None:
        """Judge a plan that somebody else lets ranks follow from a step on; a race that was on is over."""
        self.referee.call_off()
        self._monitor.follow(step, topic)

    def follow_errors(self, errors: ErrorLooks) -> None:
        """Let the plan follow what compressors lose, from now on."""
        if self._options.compress.measured and not self._options.why_not_replan:
            terms = self._planner.terms
            self.adaptation = Adaptation(self._in_force, errors, terms, self._site, self._monitor.follow, self._note)

    def resume(self, steps: int, given: Given) -> None:  # noqa: ARG002
        """Go on at another step of the job."""
        if not self._in_force.is_racing:
            self.referee.call_off()
        if self.adaptation is not None:
            self.adaptation.forget()

    # Racing

    def _line_up(self, step: int, topic: str) -> None:
        """Make the programs of the plans that will race, if there are several; every rank calls it."""
        choice, stays = self._in_force.decision.choice, self._in_force.plans[-1]
        runners = lined_up(choice.runners, stays) if choice is not None and self._options.races else ()
        if runners:
            self._drop_adaptation(step)
            self._in_force.line_up([runner.plan for runner in runners[1:]], topic)
            self.referee.line_up(runners, step)

    def _settle(self, raced: Raced) -> None:
        step = raced.last_step
        with self._ranks.together("ending the race"):
            self._in_force.settle_on(raced.winner)
            self._monitor.follow(step, "watching the winner")
            if self._planned_for is not None:
                self._monitor.has_replanned(step, changed=self._in_force.plan != self._planned_for)
                self._planned_for = None
            self._note(str(raced))

    def _drop_adaptation(self, step: int) -> None:
        if self.adaptation is not None:
            self.adaptation.drop(step)

    # Planning again

    def check_replan(self, step: int) -> None:
        """Raise CannotReplan where planning again is no option."""
        if self._monitor.watch is None:
            raise CannotReplan(
                "nothing is timed here: with one rank, with replan='off', or with a given plan and no costs=.\n"
                "  Let compress= name a mode, and leave replan= out."
            )
        if self._options.why_not_replan:
            raise CannotReplan(self._options.why_not_replan)
        if not self._in_force.is_warm:
            last = self._calendar.warm_from[-1]
            raise CannotReplan(
                f"the warm-up of error feedback lasts until step {last}, this is {step}.\n"
                "  Plan again once the plan itself is followed."
            )
        if self.referee.takes_turns(step):
            raise CannotReplan(
                f"plans are racing, and this is step {step}: nothing has been compared with its prediction yet.\n"
                "  Plan again once a note says which plan stays."
            )

    def replan(self, step: int) -> bool:
        """Plan again if a cost is wrong; every rank calls it. Returns whether the plan changed. Raises CannotReplan."""
        findings = self._monitor.compare(step)
        self._ranks.attempt("looking at what was timed", self._monitor.check_timed)
        return self._plan_again(findings, step) if findings else False

    def _judge(self, step: int) -> None:
        """Compare steps with their prediction. What is wrong calls for another plan, or for another race."""
        findings, note = self._monitor.against_prediction(step)
        if note:
            self._note(note)
            self._planner.measure_next_time()
        if findings and self._monitor.calls_for_another_plan(step):
            self._plan_again(findings, step)
        elif note:
            self._line_up(step, "racing again")

    def _plan_again(self, findings: Sequence[Finding], step: int) -> bool:
        """Decide by a corrected table, and follow that. Returns whether the plan changed."""
        topic = "planning again"
        table = self._ranks.attempt(f"{topic}: correcting the costs", lambda: self._monitor.corrected_costs(findings))
        before = self._in_force.plan
        self._drop_adaptation(step)
        decision = self._planner.again(table, topic, self.adaptation.table if self.adaptation else ASSUMED)
        self._in_force.switch(decision, topic)
        self.referee.call_off()
        self._monitor.follow(step, "watching the new plan")
        changed = decision.plan != before
        self._monitor.has_replanned(step, changed=changed)
        timeline = self._in_force.standing.timeline  # a rank's own: shards may differ
        predicted_us = self._ranks.from_rank_0(f"{topic}: the prediction", lambda: timeline.step_time_us)
        self._note(_said_of(decision, findings, step, predicted_us, changed=changed))
        self._line_up(step, f"{topic}: the race")
        self._planned_for = before if self.referee.is_racing else None
        return changed


def _said_of(decision: Decision, findings: Sequence[Finding], step: int, predicted_us: float, *, changed: bool) -> str:
    """Write the note on a plan that was made again."""
    assert decision.choice is not None, "what is chosen has been compared"
    return (
        f"planned again at step {step}, for {', '.join(str(finding.cost) for finding in findings)}:"
        f" {'another plan is followed' if changed else 'the plan stays'},"
        f" predicted at {predicted_us / 1e3:.4g} ms a step; dense at {decision.choice.dense_us / 1e3:.4g}."
    )
