"""Plan that a compiled step follows now, with its runtime and programs.

Follower        has the plan, or the racing plans, each with its gradient state
PlanInForce     emits, finds and replaces the programs of these plans
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from fxcomp.capture.batch_type import BatchType, batch_type
from fxcomp.capture.step_capture import StepCapture
from fxcomp.codegen.program import Program
from fxcomp.cost.timeline import Timeline
from fxcomp.graph.captured import Captured
from fxcomp.graph.run_passes import Turns, finished
from fxcomp.pipeline import Compiler
from fxcomp.plan.compress import NO_WARMUP, Warmup
from fxcomp.plan.error_feedback import check_rates
from fxcomp.plan.plan import Plan
from fxcomp.ranks import Ranks
from fxcomp.runtime.runtime import Runtime
from fxcomp.search.decision import Decision
from fxcomp.state.fields import CALENDAR, PLAN
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.inputs import Inputs
from fxcomp.state.momenta import Momenta, SavedMomenta, check_momenta
from fxcomp.state.saved_state import Given, states_given
from fxcomp.step.calendar import Calendar
from fxcomp.step.follower import Follower, Trained
from fxcomp.step.programs import CAPTURES, Programs


class PlanInForce:
    def __init__(
        self,
        decision: Decision,
        compiler: Compiler,
        trained: Trained,
        capture: StepCapture,
        inputs: Inputs,
        warmup: Warmup = NO_WARMUP,
    ):
        self._compiler, self._capture, self.inputs, self._site = compiler, capture, inputs, trained.site
        stages = warmup.stages(decision.plan)
        self.plans: tuple[Plan, ...] = tuple(stages.values())
        """Plans of the warm-up stages, then the plan that stays."""
        self.calendar = Calendar(warm_from=tuple(stages))
        self.stage: int = 0
        """Index in `plans` of the plan in force."""
        self.momenta = Momenta(capture.first.graph, inputs.training.owners, stages)
        self.first_kind: BatchType = capture.kind
        """Type of the first batch, for which times are predicted."""
        self._follower = Follower(trained, decision)
        self._standing: dict[int, Program] = {}
        """Program for the first batch, by plan number."""
        self._follower.enter_stage(self.plan)
        self.runtime = Runtime(self._site.transport, self._site.device)
        self.programs = Programs(capture.guard, self._made_for)
        self._micro_program = lru_cache(CAPTURES)(self._emit_micro_batch)
        if compiler.micro_batches > 1:  # emit before the first step
            self._micro_program(capture.first)
        self._key = capture.guard.key()
        for stage, plan in enumerate(self.plans):
            self._adopt(finished(self.emit(plan)), self._number_of(stage))
        self._go_on()

    @property
    def decision(self) -> Decision:
        return self._follower.decision

    @property
    def state(self) -> GradientState:
        return self._follower.state

    @property
    def plan(self) -> Plan:
        return self.plans[self.stage]

    @property
    def lasting(self) -> Plan:
        """Plan that stays after the warm-up; during a race, the plan that was in force before the race."""
        return self._follower.lasting.decision.plan

    @property
    def is_racing(self) -> bool:
        return bool(self._follower.racing)

    @property
    def is_warm(self) -> bool:
        return self.stage == len(self.plans) - 1

    @property
    def _number(self) -> int:
        """Number of the plan in force: negative during the warm-up, unique afterwards."""
        return self._number_of(self.stage)

    def _number_of(self, stage: int) -> int:
        return self._follower.now.number if stage == len(self.plans) - 1 else -1 - stage

    @property
    def standing(self) -> Program:
        """Program of the plan after the warm-up, or of the current runner in a race, for the first type of batch.

        Used for predictions.
        """
        return self._standing[self._follower.now.number]

    # Following

    def enter_stage_of(self, step: int, *, runs: bool = True) -> bool:
        """Enter the warm-up stage of `step`. Return True if the plan changed.

        Every rank calls it. `runs` is False if no step runs, because a state is loaded.
        """
        before, self.stage = self.plan, self.calendar.stage_at(step)
        if runs:
            self.momenta.before_step(step, self.plan)
        if is_other := before is not self.plan:
            units = partial(self.momenta.units_between, before, self.plan) if runs else None
            self._follower.enter_stage(self.plan, units)
            self._go_on()
        return is_other

    @property
    def predicted(self) -> Timeline:
        return self._standing[self._number].timeline

    def find(self, batch: Any, kind: BatchType, leaves: Sequence[Any]) -> Program:
        self.program = found = self.programs.find(batch, kind, leaves, self._number)
        self.runtime.numbers = found.numbers
        return found

    def find_micro(self, batch: Any, kind: BatchType, leaves: Sequence[Any]) -> Program:
        return self._micro_program(self.find(batch, kind, leaves).captured)

    def feed(self, batch: Any) -> None:
        """Evaluate the guard and collect the arguments, to time this work."""
        self._capture.guard.key()
        self.inputs.of(self.program, batch_type(batch)[1], self.state)

    # Changing

    def _stay_with(self, plan: Plan) -> None:
        self.plans, self.stage = (plan,), 0
        self.calendar.stay()

    def emit(self, plan: Plan) -> Turns[Program]:
        """Emit the first batch's program for another plan, one pass at a time. Ranks do not communicate."""
        return self._compiler.emit(self._capture.first, plan, self.decision.costs)

    def switch(
        self,
        decision: Decision,
        topic: str,
        program: Program | None = None,
        stages: Mapping[int, Plan] | None = None,
    ) -> None:
        """Follow another decision from the next step on. Residuals are kept.

        `stages` maps the first step of each warm-up stage to a plan, and ends with the decision's plan; None: no
        warm-up. Every rank calls it. If emission fails on one rank, all ranks keep the old decision.
        """
        stages = stages or {0: decision.plan}
        *earlier, _ = stages.values()

        def emit(plan: Plan) -> Program:
            return finished(self._compiler.emit(self._capture.first, plan, decision.costs))

        programs = self._follower.carry_to(
            decision,
            f"{topic}: emitting the step",
            lambda: [*map(emit, earlier), program or emit(decision.plan)],
            lambda: self.momenta.units_between(self.plan, decision.plan),
        )
        self.plans, self.stage, self.calendar.warm_from = tuple(stages.values()), 0, tuple(stages)
        self._follower.enter_stage(self.plan, dict)
        self.runtime.close()
        self.runtime = Runtime(self._site.transport, self._site.device)
        for known in (self.programs, self._standing):
            known.clear()
        for stage, each in enumerate(programs):
            self._adopt(each, self._number_of(stage))
        self._go_on()

    def can_retune(self, plan: Plan) -> bool:
        """Return True if `plan` differs only in compressor parameters, and no warm-up or race is running."""
        return self.is_warm and not self._follower.racing and self.plan.differs_in_parameters_only(plan)

    def retuned(self, plan: Plan) -> Turns[Program]:
        """Emit the `standing` program with another plan's compressor parameters. All ranks yield equally often."""
        return self._compiler.retune(self.standing, plan, self.decision.costs)

    def retune(self, plan: Plan, standing: Program | None = None) -> None:
        """Follow a plan with other compressor parameters from the next step on; see `can_retune`.

        Every rank calls it after the same step. Nothing is sent or captured. Residuals and compressor states are kept.
        """
        assert self.can_retune(plan), "a plan that differs in more needs programs of its own: switch"
        trained = self._follower.trained
        states = self.state.compressor_states_for(plan, trained.shapes, self._site, trained.seed)
        before, costs = self.standing, self.decision.costs
        self._standing[self._number] = standing or finished(self._compiler.retune(before, plan, costs))
        for known in self.programs.of_plan(self._number):
            other = self.standing if known is before else finished(self._compiler.retune(known, plan, costs))
            self.programs.exchange(known, other)
            self.program = other if self.program is known else self.program
        self._follower.now.decision, self.state.compressor_states = replace(self.decision, plan=plan), states
        self._stay_with(plan)
        self.runtime.forget_buffers()

    # Racing

    def line_up(self, plans: Sequence[Plan], topic: str) -> None:
        """Emit the programs of plans that race with the plan in force. Every rank calls it."""
        programs = self._site.ranks.attempt(
            f"{topic}: emitting the steps", lambda: [finished(self.emit(plan)) for plan in plans]
        )
        self._follower.line_up(plans)
        self.programs.racing = len(plans)
        for each, program in zip(self._follower.racing[1:], programs, strict=True):
            self._adopt(program, each.number)

    def take_turn(self, number: int) -> None:
        if self._follower.racing[number] is not self._follower.now:
            self._follower.take_turn(number)
            self._go_on()

    def settle_on(self, number: int) -> None:
        """End the race with the plan at this index. The others' residuals are sent with the next step."""
        self.take_turn(number)
        self._follower.scale_to_rates(self.inputs)
        for loser in self._follower.settle_on(number):
            self.programs.forget_plan(loser.number)
            del self._standing[loser.number]
        self.programs.racing = 0
        if not self.decision.plan.moves_exchange:  # otherwise states saved in the warm-up need its plans
            self._stay_with(self.decision.plan)
        self._go_on()

    def _go_on(self) -> None:
        if self.is_warm:
            self.plans = (*self.plans[:-1], self.decision.plan)
        self.program = self._standing[self._number]
        """Program that ran last or runs next."""
        self.runtime.forget_buffers()
        self.runtime.gradients.owed = self.state.owed

    # State

    def state_dict(self, steps: int) -> dict[str, Any]:
        """Return this rank's gradient state, racing plans' residuals, the lasting plan and the `Calendar`."""
        if self._follower.racing:
            self._follower.scale_to_rates(self.inputs)
        saved = self._follower.state_dict(self._follower.now, self.plan, steps)
        about = {PLAN: self.lasting.to_json(), CALENDAR: self.calendar.to_json(steps)}
        return {**saved, **self.momenta.saved(self.plan), **about}

    def load(self, given: Given, follow: Callable[[], None], go_on: Callable[[SavedMomenta], None]) -> int | None:
        """Load saved states and enter the warm-up stage of the saved step. Every rank calls it. Raises BadState.

        After the states are found valid, `follow` follows the saved plan, and `go_on` restores the exchange of momenta
        or gradients. Return the saved number of steps; None without states.
        """

        def enter(steps: int) -> None:
            follow()
            momenta = SavedMomenta.told(given, self._site.ranks)
            if momenta:
                go_on(momenta[0])
            self._start_over(steps, momenta)

        steps = self._follower.load(given, enter)
        if steps is not None:
            self.calendar.resume(steps, _saved_calendar(given, self._site.ranks))
            self._follower.now.follow_scale(1.0)  # gradients come unscaled
            self.runtime.gradients.owed = self.state.owed
        return steps

    def _start_over(self, steps: int, momenta: Sequence[SavedMomenta]) -> None:
        if self._follower.racing:
            self._go_on()
        self.enter_stage_of(max(0, steps - 1), runs=False)  # saved residuals have this plan's unit
        self.momenta.resume(steps)
        check_momenta(momenta, self.plan, steps)

    # Making

    def _made_for(self, batch: Any, varying: Mapping[int, frozenset[int]]) -> Program:
        """Capture the step for a batch and emit its program for the plan in force. Ranks do not communicate."""
        for optimizer in self.inputs.training.optimizers:
            check_rates(self._compiler.feedback, optimizer)  # its options may have changed
        self.inputs.expect_other_state()
        captured = self._capture.again(batch, varying)
        return finished(self._compiler.emit(captured, self.plan, self.decision.costs))

    def _emit_micro_batch(self, captured: Captured) -> Program:
        return self._compiler.emit_micro_batch(captured, self.decision.costs)

    def _adopt(self, program: Program, number: int) -> None:
        self._standing[number] = program
        self.programs.adopt(self._capture.kind, number, self._key, program)


def _saved_calendar(given: Given, ranks: Ranks) -> Any:
    own = next((state[CALENDAR] for state in states_given(given) if CALENDAR in state), None)
    return next((saved for saved in ranks.gather("the calendar", own) if saved is not None), None)
