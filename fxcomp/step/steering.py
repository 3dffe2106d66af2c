"""Act on races and on drift: let plans take turns, or plan again. All ranks act at the same steps.

WARM_STEPS of the plan that stays ─► the race ─► its winner ─► its steps' time is settled, and watched
                                        ▲                               │
                                        └── the runners of a new plan, or the same ones again ◄── drift
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fxcomp.cluster.cluster import Level
from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.errors import CannotReplan
from fxcomp.options import StepOptions
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.plan import Plan
from fxcomp.search.decision import Decision, Raced
from fxcomp.search.question import Terms
from fxcomp.search.runners import lined_up
from fxcomp.site import Site
from fxcomp.state.saved_state import Given
from fxcomp.step.drift import DriftWatch
from fxcomp.step.errors.adaptation import Adaptation
from fxcomp.step.errors.error_looks import ErrorLooks
from fxcomp.step.observer import Observer
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.referee import Referee
from fxcomp.step.step_times import StepTimes


class Replanner(Protocol):
    """Measures the links and decides again; all ranks call it together."""

    @property
    def terms(self) -> Terms: ...

    def again(self, costs: CostTable, topic: str, errors: ErrorTable = ASSUMED) -> Decision: ...

    def measure_next_time(self) -> None: ...


class Steering(Observer):
    """Switches the plan in force where a race or a drift calls for it, and notes why."""

    def __init__(
        self,
        in_force: PlanInForce,
        times: StepTimes,
        planner: Replanner,
        options: StepOptions,
        site: Site,
        note: Callable[[str], None],
    ):
        self._in_force, self._planner = in_force, planner
        self._options, self._site, self._ranks, self._note = options, site, site.ranks, note
        self._calendar = in_force.calendar
        self.drift = DriftWatch(in_force.calendar, times, site)
        self.referee = Referee(in_force.calendar, times, site, in_force.take_turn, self._settle)
        """It sees each step after this one, so that a race which has just ended is judged from the next step on."""
        self._planned_for: Plan | None = None
        """The plan that was followed when drift was noticed, until the race after that is over."""
        self.adaptation: Adaptation | None = None
        """Lets the plan follow the gradients; None without an error budget."""
        self._line_up(0, "compiling")

    def between(self, steps: int) -> None:
        """Do what is due after so many steps."""
        if self.referee.is_racing or self._acts_on_drift(steps):
            return
        if self.adaptation is not None and self._calendar.is_quiet_at(steps - 1):
            self.adaptation.act(steps)

    def follow(self, step: int) -> None:
        """Watch a plan that another observer lets ranks follow from a step on; a race that was on is over."""
        self.referee.call_off()
        self.drift.follow(step)

    def follow_errors(self, errors: ErrorLooks) -> None:
        """Let the plan follow what compressors lose, from now on."""
        if self._options.compress.measured and not self._options.why_plan_stays:
            terms = self._planner.terms
            self.adaptation = Adaptation(self._in_force, errors, terms, self._site, self.drift.follow, self._note)

    def resume(self, steps: int, given: Given) -> None:  # noqa: ARG002
        """Go on at another step of the job."""
        self.drift.follow(steps)
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
            self.drift.follow(step)
            if self._planned_for is not None:
                self._calendar.be_patient(step, changed=self._in_force.plan != self._planned_for)
                self._planned_for = None
            self._note(str(raced))

    def _drop_adaptation(self, step: int) -> None:
        if self.adaptation is not None:
            self.adaptation.drop(step)

    # Planning again

    def check_replan(self, step: int) -> None:
        """Raise CannotReplan where planning again is no option."""
        if self._ranks.world_size == 1:
            raise CannotReplan(
                "one rank sends nothing: it has no links to measure and no plan to choose.\n"
                "  Start several ranks, as torchrun does."
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
                f"plans are racing, and this is step {step}: which of them stays is not known yet.\n"
                "  Plan again once a note says which plan stays."
            )

    def replan(self, step: int) -> bool:
        """Measure the links again, decide by them, and follow that; every rank calls it.

        Returns whether the plan changed.
        """
        topic, before = "planning again", self._in_force.plan
        workload, old = self._in_force.decision.workload, self._in_force.decision.costs
        self._drop_adaptation(step)
        errors = self.adaptation.table if self.adaptation else ASSUMED
        decision = self._planner.again(old, topic, errors)
        self._in_force.switch(decision, topic)
        self.referee.call_off()
        timeline = self._in_force.standing.timeline  # a rank's own: shards may differ
        predicted_us = self._ranks.from_rank_0(f"{topic}: the prediction", lambda: timeline.step_time_us)
        sum_of_all = CollectiveKind.ALL_REDUCE, Level.WORLD, workload.dense_bytes, self._site.cluster
        dense_us = [costs.collective_us(*sum_of_all) for costs in (old, decision.costs)]
        self._note(_said_of(decision, step, predicted_us, dense_us, changed=decision.plan != before))
        self._race_again(step, f"{topic}: the race", before)
        return decision.plan != before

    def _acts_on_drift(self, step: int) -> bool:
        """Look for drift if that is due, and plan again or let plans race again. Returns whether there is some."""
        is_due = self._ranks.world_size > 1 and self._options.is_watched and self._calendar.judges_after(step)
        drift = self.drift.judge(step) if is_due else None
        if drift is None:
            return False
        plans_again, offers = self._options.checks.replan == "auto", not self._options.why_not_replan
        offer = " step.replan(), called by every rank, measures the links again and chooses by them."
        self._note(f"{drift}{offer if offers and not plans_again else ''}")
        self._planner.measure_next_time()
        with self._ranks.together("acting on drift"):
            if plans_again:
                self.replan(step)
            else:
                self._race_again(step, "racing again", self._in_force.plan)
        return True

    def _race_again(self, step: int, topic: str, before: Plan) -> None:
        """Let plans race, if they do, and be patient if the plan of `before` stays in the end."""
        self.drift.follow(step)
        self._line_up(step, topic)
        self._planned_for = before if self.referee.is_racing else None
        if not self.referee.is_racing:
            self._calendar.be_patient(step, changed=self._in_force.plan != before)


def _said_of(decision: Decision, step: int, predicted_us: float, dense_us: Sequence[float], *, changed: bool) -> str:
    """Write the note on a plan that was made again; `dense_us` is the sum of all gradients, before and now."""
    assert decision.choice is not None, "what is chosen has been compared"
    before_us, now_us = dense_us
    return (
        f"planned again at step {step}: summing all gradients takes {now_us / 1e3:.4g} ms by links as they are now, and"
        f" {before_us / 1e3:.4g} by those of before; {'another plan is followed' if changed else 'the plan stays'},"
        f" predicted at {predicted_us / 1e3:.4g} ms a step; dense at {decision.choice.dense_us / 1e3:.4g}."
    )
