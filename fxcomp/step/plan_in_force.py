"""The plan in force: the one mutable holder of what a step follows, and the one way to change it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxcomp.capture.batch_type import BatchType
from fxcomp.capture.step_capture import StepCapture
from fxcomp.codegen.program import Program
from fxcomp.cost.timeline import Timeline
from fxcomp.pipeline import Compiler, Turns
from fxcomp.plan.check_feedback import check_momentum, check_rates
from fxcomp.plan.error_feedback import Stage
from fxcomp.plan.plan import Plan
from fxcomp.runtime.runtime import Runtime
from fxcomp.search.decision import Decision
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.handover import Exchange, Holding, hand_over
from fxcomp.state.inputs import Inputs
from fxcomp.state.saved_state import Given, Here, read_together, restore
from fxcomp.step.micro_programs import MicroPrograms
from fxcomp.step.programs import Programs


@dataclass(slots=True)
class _Lane:
    """A plan that races."""

    number: int
    """Of its programs."""
    plan: Plan
    program: Program
    """Of the first capture."""
    state: GradientState | None = None
    """The values left out while it was followed; None before its first turn."""


class PlanInForce:
    """A decision, and all that is made for its plan: warm-up stages, gradient state, runtime, programs."""

    def __init__(
        self, decision: Decision, compiler: Compiler, site: Site, capture: StepCapture, inputs: Inputs, seed: int
    ):
        self._compiler, self._site, self._capture = compiler, site, capture
        self._seed = seed
        self.inputs = inputs
        self.decision = decision
        self.stages = compiler.feedback.stages(decision.plan)
        """The plans that are followed one after the other; the last one stays."""
        self._stage: int = 0
        self._numbers = itertools.count(len(self.stages))
        self._followed: int = 0
        """The number of the plan that is followed: of a stage its place, of any later plan one of its own."""
        self._warming: dict[int, Timeline] = {}
        """The predicted step of each stage, for batches like the first one."""
        self._lanes: list[_Lane] = []
        """The plans that race, the one that was in force first; empty if none do."""
        self.state = self._fresh_state(decision.plan)
        self.state.enter_stage(self.plan, site)
        self.runtime = Runtime(site.transport, site.device)
        self.programs = Programs(capture.guard, self._made_for)
        self._micro_programs = MicroPrograms(
            lambda captured: self._compiler.emit_micro_batch(captured, self.decision.costs)
        )
        if compiler.micro_batches > 1:  # now, and not in the first step
            self._micro_programs.of(capture.first)
        self._key = capture.guard.key()
        for number, stage in enumerate(self.stages):
            self._adopt(self._made_of_first(stage.plan, decision), number)
        self._share_undelivered()

    @property
    def plan(self) -> Plan:
        """The plan that is followed now."""
        return self.stages[self._stage].plan

    @property
    def stage(self) -> int:
        """The place of that plan among the stages."""
        return self._stage

    @property
    def is_warm(self) -> bool:
        """The plan that stays is followed."""
        return self._stage == len(self.stages) - 1

    # Following

    def enter_stage_of(self, step: int) -> bool:
        """Follow the plan of a step's number, the same on all ranks. Returns whether it is another one."""
        stage = max(0, sum(stage.first_step <= step for stage in self.stages) - 1)
        if stage == self._stage:
            return False
        self._stage = self._followed = stage
        self.state.enter_stage(self.plan, self._site)
        self.runtime.forget_buffers()
        return True

    @property
    def first_kind(self) -> BatchType:
        """The type of the first batch, which predictions are for."""
        return self._capture.kind

    @property
    def predicted(self) -> Timeline:
        """The predicted step of the plan that is followed, for batches like the first one, whatever ran last."""
        return self.standing.timeline if self.is_warm else self._warming[self._stage]

    def serves_first(self, kind: BatchType) -> bool:
        """Tell batches like the first one, which the prediction is for."""
        return kind == self.first_kind

    def find(self, batch: Any, kind: BatchType, leaves: Sequence[Any]) -> Program:
        """Find the program for a batch as everything else is now; capture here alone if there is none."""
        self.program = self.programs.find(batch, kind, leaves, self._followed)
        self.runtime.numbers = self.program.numbers
        return self.program

    def find_micro(self, batch: Any, kind: BatchType, leaves: Sequence[Any]) -> Program:
        """Find the program for a batch that ends no group of micro-batches."""
        return self._micro_programs.of(self.find(batch, kind, leaves).captured)

    # Changing

    def emit_in_turns(self, plan: Plan) -> Turns[Program]:
        """Make the program for another plan, to switch to later; ranks do not communicate in it."""
        return self._compiler.emit_in_turns(self._capture.first, plan, self.decision.costs)

    def switch(self, decision: Decision, topic: str, program: Program | None = None) -> None:
        """Follow another decision from the next step on, without warm-up; nothing that was left out is lost.

        Every rank calls it, with the program if that is made already. If making it fails on one rank, all of them go on
        as they were.
        """

        def made() -> tuple[Program, GradientState]:
            return program or self._made_of_first(decision.plan, decision), self._fresh_state(decision.plan)

        program, state = self._site.ranks.attempt(f"{topic}: emitting the step", made)
        self.state.carry_to(state, self.trained_sizes, self.exchange("changing plans"))
        self._lanes.clear()  # none has begun to race
        self.decision, self.state = decision, state
        self.stages, self._stage, self._followed = (Stage(0, decision.plan),), 0, 0
        self._site.make_groups_for(decision.plan)
        self.runtime.close()
        self.runtime = Runtime(self._site.transport, self._site.device)
        self.programs.clear()
        self.programs.racing = 0
        self._adopt(program, 0)
        self._share_undelivered()

    def can_retune(self, plan: Plan) -> bool:
        """Tell a plan that running programs can follow: of the same buckets, with other parameters of compressors."""
        return self.is_warm and not self._lanes and self.plan.differs_in_parameters_only(plan)

    def retune_in_turns(self, plan: Plan) -> Turns[Program]:
        """Make what the first capture follows after `retune`, in as many turns on all ranks."""
        return self._compiler.retune_in_turns(self.standing, plan, self.decision.costs)

    def retune(self, plan: Plan, standing: Program | None = None) -> None:
        """Follow a plan with other parameters of the same compressors from the next step on; see `can_retune`.

        Every rank calls it after the same step, with the first capture's program if that is made already. Nothing is
        sent, captured or emitted. Residuals and velocities stay where they are, and compressors go on from what they
        remember.
        """
        assert self.can_retune(plan), "a plan that differs in more needs programs of its own: switch"
        decision = replace(self.decision, plan=plan)
        states = self.state.compressor_states_for(plan, self.inputs.shapes, self._site, self._seed)
        before, self.standing = self.standing, standing or self._compiler.retune(self.standing, plan, decision.costs)
        for known in self.programs.of_plan(self._followed):
            other = self.standing if known is before else self._compiler.retune(known, plan, decision.costs)
            self.programs.exchange(known, other)
            self.program = other if self.program is known else self.program
        self.decision, self.state.compressor_states = decision, states
        self.stages, self._stage = (Stage(0, plan),), 0
        self.runtime.forget_buffers()

    # Racing

    def line_up(self, plans: Sequence[Plan], topic: str) -> None:
        """Make the programs of plans that will take turns with the one that stays; every rank calls it."""
        assert not self._lanes, "one race at a time"

        def made() -> list[Program]:
            return [self._made_of_first(plan, self.decision) for plan in plans]

        programs = self._site.ranks.attempt(f"{topic}: emitting the steps", made)
        for plan in plans:
            self._site.make_groups_for(plan)
        number = self._followed if self.is_warm else len(self.stages) - 1
        self._lanes = [_Lane(number, self.stages[-1].plan, self.standing)]
        self._lanes += [_Lane(next(self._numbers), *each) for each in zip(plans, programs, strict=True)]
        self.programs.racing = len(plans)
        for lane in self._lanes[1:]:
            self.programs.adopt(self._capture.kind, lane.number, self._key, lane.program)

    def take_lane(self, number: int) -> None:
        """Follow a plan that was lined up, with residuals of its own; those of the one before it stay where they are.

        Nothing is sent, but for velocities of momentum correction, which go on under each plan: every rank calls it.
        """
        lane, before = self._lanes[number], self.state
        if lane.number == self._followed:
            return
        next(each for each in self._lanes if each.number == self._followed).state = before
        self.state = lane.state or self._fresh_state(lane.plan)
        if before.velocities is not None and self.state.velocities is not None:
            held = Holding.of(self._site.ranks.world_size, before.velocities.slices)
            hand_over(held, self.state.velocities, self.trained_sizes, self.exchange("racing"), "velocities")
        self._follow_lane(lane)

    def settle_on(self, number: int) -> None:
        """End the race on a plan that stays; what was left out under the others goes out with the next step."""
        self.take_lane(number)
        winner = self._lanes[number]
        others = [lane for lane in self._lanes if lane is not winner]
        self._scale_to_rates(self.state)
        for lane in others:
            if lane.state is not None:
                self.state.also_owe(self._owed(lane.state))
            self.programs.forget_plan(lane.number)
        self._lanes.clear()
        self.programs.racing = 0
        self.decision = replace(self.decision, plan=winner.plan)
        self.stages, self._stage = (Stage(0, winner.plan),), 0
        self._share_undelivered()

    @property
    def whole_state(self) -> GradientState:
        """The state to save: what the plan in force keeps, and what is owed under plans that race with it."""
        if self._lanes:
            self._scale_to_rates(self.state)
        whole = replace(self.state, undelivered=dict(self.state.undelivered))
        for lane in self._lanes:
            if lane.state is not None and lane.state is not self.state:
                whole.also_owe(self._owed(lane.state))
        return whole

    def _owed(self, state: GradientState) -> dict[str, Tensor]:
        """List what a state that goes on no more owes, in today's learning rates."""
        self._scale_to_rates(state)
        return state.owed_here(self.inputs.sizes, self._site.ranks.world_size)

    def _scale_to_rates(self, state: GradientState) -> None:
        """Let a state be in today's learning rates: what states owe is added up only in the same ones."""
        if self._compiler.feedback.scale_with_lr:
            state.scale_to_rates(self.inputs.rates(), self.inputs.names_by_group())

    def _start_over(self) -> None:
        """Follow the plan that was in force again; forget what others left out, because a state is loaded."""
        if self._lanes and self.is_warm:
            self.state = self._lanes[0].state or self.state
            self._follow_lane(self._lanes[0])
            for lane in self._lanes:
                lane.state = None

    def _follow_lane(self, lane: _Lane) -> None:
        self._followed = lane.number
        self.program = self.standing = lane.program
        self.stages = (*self.stages[:-1], replace(self.stages[-1], plan=lane.plan))
        self.runtime.forget_buffers()
        self._share_undelivered()

    def load(self, given: Given) -> int | None:
        """Take back saved states, and the stage that they were in; every rank calls it.

        Returns the number of steps that had been run, None if no rank was given anything. Raises BadState.
        """
        exchange = self.exchange("load_state_dict")
        agreed = read_together(given, self._here, exchange)
        if agreed is None:
            return None
        self._start_over()
        self.enter_stage_of(agreed.steps)
        restore(agreed, self.state, self._here, exchange)
        self._share_undelivered()
        return agreed.steps

    def exchange(self, topic: str) -> Exchange:
        """Talk with all ranks about state that changes hands."""
        return Exchange(self._site.ranks, self._site.sum_over_ranks, topic, self._site.device)

    @property
    def trained_sizes(self) -> dict[str, int]:
        """The elements of each parameter that gets a gradient, in the same order on all ranks."""
        return self._here.trained_sizes

    @property
    def _here(self) -> Here:
        plans = {stage.plan.digest for stage in self.stages}
        return Here(self.inputs.sizes, sorted(self._capture.first.gradient_names), plans)

    # Making

    def _fresh_state(self, plan: Plan) -> GradientState:
        return GradientState.fresh(plan, self.inputs.shapes, self._site, self._compiler.feedback, self._seed)

    def _share_undelivered(self) -> None:
        self.runtime.undelivered = self.state.undelivered

    def _made_of_first(self, plan: Plan, decision: Decision) -> Program:
        """The first capture, following a plan."""
        return self._compiler.emit(self._capture.first, plan, decision.costs)

    def _made_for(self, batch: Any, varying: Mapping[int, frozenset[int]]) -> Program:
        """Capture for a batch, and follow the plan in force. Local: ranks do not communicate in it."""
        for optimizer in self.inputs.training.optimizers:
            check_momentum(self._compiler.feedback, optimizer)  # its options may have changed
            check_rates(self._compiler.feedback, optimizer)
        self.inputs.expect_other_state()
        with torch.inference_mode(False):
            captured = self._capture.again(batch, varying)
            return self._compiler.emit(captured, self.plan, self.decision.costs)

    def _adopt(self, program: Program, stage: int) -> None:
        """Take over a program of the first capture."""
        self.programs.adopt(self._capture.kind, stage, self._key, program)
        if stage == self._stage:
            self.program = program
            """The program that ran last, or runs next."""
        self._warming[stage] = program.timeline
        if stage == len(self.stages) - 1:
            self.standing = program
            """The first capture under the plan that stays: what predictions are of."""
