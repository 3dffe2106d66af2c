"""Execute a compiled step: find its program and run it with its observers, or accumulate a micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fxcomp import compat
from fxcomp.capture.batch_type import batch_type
from fxcomp.codegen.program import Program
from fxcomp.options import StepOptions
from fxcomp.site import Site
from fxcomp.step.executor import Executor
from fxcomp.step.micro_batches import MicroBatchGroup
from fxcomp.step.observer import Observer, StepUnderWay
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.schedule import StepSchedule
from fxcomp.step.step_times import StepTimes
from fxcomp.step.unused import FindsUnused


class Execution(Executor):
    def __init__(self, force: PlanInForce, times: StepTimes, site: Site, options: StepOptions):
        super().__init__(site.ranks)
        self._force, self._times = force, times
        inputs = force.inputs
        training = inputs.training
        self.group = MicroBatchGroup(inputs.sums, options.accumulate, site, training.loss_scale)
        self._finds_unused = FindsUnused(training, site) if options.find_unused_parameters else None
        self._scales_with_lr = options.compress.feedback.scale_with_lr

    def sum_up(self, batch: Any) -> Any:
        """Run a micro-batch that does not end its group: nothing is sent or updated."""
        kind, leaves = batch_type(batch)
        program = self._force.find_micro(batch, kind, leaves)
        inputs, runtime = self._force.inputs, self._force.runtime
        begin = self._times.look()
        with torch.no_grad(), compat.without_autocast():
            loss, aux = self.run(program.module, program.graph, runtime, inputs.of(program, leaves, self._force.state))
            self.end(None, runtime)
        looks = begin, self._times.look()
        self.group.add(looks, program.captured.unused, is_like_first=kind == self._force.first_kind)
        return program.captured.result(loss, aux)

    def step(self, number: int, batch: Any, schedule: StepSchedule, observers: Sequence[Observer]) -> StepUnderWay:
        """Run step `number` on the last micro-batch of a group, with the observers that want the step's use."""
        kind, leaves = batch_type(batch)
        program = self._force.find(batch, kind, leaves)
        self.group.complete(is_weighted=program.captured.is_weighted)
        use, is_like_first = schedule.calendar.use_of(number), kind == self._force.first_kind
        step = StepUnderWay(number, use, self._force, batch, is_like_first)
        watching = [each for each in observers if use in each.wants]
        begin = self._times.look()
        for each in watching:
            each.before(step)
        with torch.no_grad(), compat.without_autocast():  # autocast is part of the graph
            step.result = self._run(step, leaves, schedule, watching)
        step.took = self.group.took((begin, self._times.look()))
        step.is_like_first &= self.group.is_like_first
        self.group.clear()
        return step

    def _run(
        self, step: StepUnderWay, leaves: Sequence[Any], schedule: StepSchedule, watching: Sequence[Observer]
    ) -> Any:
        program, runtime = step.program, step.runtime
        inputs, state = self._force.inputs, self._force.state
        arguments = inputs.of(program, leaves, state)
        if self._scales_with_lr:
            state.scale_to_rates(inputs.rates(inputs.numbers), inputs.names_by_group())
        self.has_begun = True
        schedule.begin(step)
        check_lengths = self.group.compare_lengths()
        runtime.gradients.before_packing = [] if check_lengths is None else [check_lengths]
        with self._holding_unused(program) as unused:
            try:
                if step.run is None:
                    loss, aux = self.run(program.module, program.graph, runtime, arguments)
                else:
                    loss, aux = step.run(arguments)
            finally:
                runtime.gradients.on_gradient = runtime.gradients.on_update = None
            for each in watching:
                each.after(step, aux)
            if self.end(state, runtime):
                inputs.has_stepped(program, unused)
        return program.captured.result(loss, aux)

    def _holding_unused(self, program: Program) -> AbstractContextManager[Collection[str]]:
        if self._finds_unused is None:
            return nullcontext(())
        unused = self.group.unused(program.captured.unused)
        return self._finds_unused.holding(unused, self._force.state, self._force.runtime)
