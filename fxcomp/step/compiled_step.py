"""Public class of a compiled training step: run it on a batch, inspect, save, load and close it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.errors import Unsupported
from fxcomp.options import StepOptions
from fxcomp.plan.plan import Plan
from fxcomp.planning.decide import Planner
from fxcomp.progress import Notes
from fxcomp.report.plan_diff import note_on_another_plan
from fxcomp.report.step_report import StepReport
from fxcomp.search.decision import PlanMove, Raced
from fxcomp.site import Site
from fxcomp.state.checkpoint import generators, restore_generators, saved_plan, states_of, to_tensors
from fxcomp.state.checksums import sealed
from fxcomp.state.fields import GENERATORS
from fxcomp.state.saved_state import Given
from fxcomp.step.errors.error_looks import ErrorLooks
from fxcomp.step.execution import Execution
from fxcomp.step.explain import explanation_of, explanation_of_step, in_a_line, metrics_of, notes_of
from fxcomp.step.observer import Observer, StepUnderWay
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.profile import Profiler
from fxcomp.step.schedule import StepSchedule
from fxcomp.step.step_times import StepTimes
from fxcomp.step.unused import note_on_densified, note_on_unused
from fxcomp.step.verify.verifier import Verifier

_TO_DYNAMO = (
    "an fxcomp step is compiled already, with its backward pass and optimizer, and cannot be part of another graph."
    " Call it outside of torch.compile; or leave out fullgraph=True, and the graph ends before it"
)

_GRADIENTS_ARE_OFF = (
    "gradients are off around the compiled step (torch.no_grad() or torch.inference_mode()), and a step trains.\n"
    "  Call it outside of them; to evaluate, call the model, or loss_fn(model, batch)."
)

_IS_NOT_COPIED = (
    "a compiled step cannot be copied or pickled: it holds this process's groups, threads and traced code, and trains"
    " the model that it was compiled for.\n"
    "  Save state_dict() or checkpoint(), and call compile_step for the other model or in the other process."
)


class CompiledStep:
    """A training step; call it with a batch. Parameters, buffers and the optimizer's state change in place.

    Return the detached loss, or `(loss, aux)` if the loss function returns aux. Parameters' `.grad` is not set.

    With `accumulate`, each call runs one micro-batch of a group. `step(batch, last=True)` ends a group early, on every
    rank at the same call.
    """

    def __init__(self, force: PlanInForce, planner: Planner, site: Site, options: StepOptions):
        self.in_force = force
        self._run_outside = compat.outside_dynamo(CompiledStep._call, _TO_DYNAMO)
        self._site, self._options, self._terms = site, options, planner.terms
        self.times = StepTimes(site.device)
        self._execution = Execution(force, self.times, site, options)
        self.training = force.inputs.training
        self.steps = 0
        """Number of steps taken, including those before a loaded state."""
        self._steps_unlike_first = 0
        self.skipped_steps = 0
        """Number of steps without effect, because a gradient was not finite on some rank."""
        self.notes = Notes(site.ranks.notes)
        """Events, as sentences. Reports end with them."""
        self._schedule = StepSchedule(force, self.times, planner, options, site, self.notes.append)
        self.payload_bytes: Mapping[tuple[str, str], int] = {}
        """Bytes sent by this rank in the last step, by kind of collective and level."""
        self._followed = force.plan, force.predicted  # plan and prediction of the last step, for its metrics
        inputs = force.inputs
        verifier = Verifier(self.training, site.ranks, self.notes.append, inputs.sums)
        self._profiler = Profiler()
        self._observers: list[Observer] = [verifier, self._profiler]
        if site.ranks.world_size > 1:
            self.notes += note_on_unused(force.program.captured)
        self.notes += note_on_densified(force.program.captured, inputs.sizes)
        self.errors: ErrorLooks | None = None  # None until `watch_errors`
        if options.compress.measured and site.ranks.world_size > 1:
            self.watch_errors()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise Unsupported."""
        raise Unsupported(_IS_NOT_COPIED)

    # Running

    def __call__(self, batch: Any, *, last: bool = False) -> Any:
        return self._run_outside(self, batch, last=last)

    def _call(self, batch: Any, *, last: bool) -> Any:
        execution, group, scale = self._execution, self._execution.group, self.training.loss_scale
        execution.enter(self.steps, goes_on=group.has_begun)
        try:
            if not torch.is_grad_enabled():
                raise Unsupported(_GRADIENTS_ARE_OFF)
            if scale is not None:
                scale.check_updated()
                group.check_scale()
            self._schedule.before_step(self.steps)
            if not group.ends(last=last):
                return execution.sum_up(batch)
            step = execution.step(self.steps, batch, self._schedule, self._observers)
            self._count(step)
            self._schedule.between(self.steps)
            return step.result
        except BaseException as error:
            if execution.has_begun:
                group.clear()
            execution.leave(error, self.in_force.runtime)
            raise

    def _count(self, step: StepUnderWay) -> None:
        counters = self.in_force.runtime.take_counters()
        for optimizer in self.training.optimizers:
            compat.count_as_stepped(optimizer)
        if self.training.loss_scale is not None:
            self.training.loss_scale.tell(skipped=counters.skipped)
        self.steps += 1
        self._steps_unlike_first += not step.is_like_first
        self.skipped_steps += counters.skipped
        self.payload_bytes, self._followed = counters.payload_bytes, (self.in_force.plan, self.in_force.predicted)
        if step.says_how_long and not counters.skipped:
            self.times.add(step.number, step.took, counters.waits)

    def close(self) -> None:
        """End the pool's threads and release the process groups. So do a `with` statement and garbage collection."""
        self._execution.close(self.in_force.runtime)

    def __enter__(self) -> CompiledStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replan(self) -> bool:
        """Measure the links again, choose a plan and follow it. Return True if the plan changed.

        Every rank calls it after the same step. Plans may then race. Residuals are kept. If the new plan has no error
        feedback for a gradient, the next step sends the gradient's residual. Raises CannotReplan.
        """
        self._schedule.check_replan(self.steps)
        self._execution.check()
        with self._site.ranks.together("replan"):
            return self._schedule.replan(self.steps)

    def watch_errors(self) -> None:
        """Measure compression errors from now on (`error_table`). Every rank calls it after the same step."""
        self.errors = ErrorLooks(self.in_force, self._site, self.times, self.notes.append, self.steps)
        self._observers.insert(0, self.errors)
        self._schedule.follow_errors(self.errors, self.steps)

    # Inspecting

    @property
    def plan(self) -> Plan:
        """Plan in force."""
        return self.in_force.plan

    @property
    def costs(self) -> CostTable:
        """Costs by which the plan was chosen; before measurements, they may be assumed.

        `compile_step(..., costs=step.costs)` skips the measurements.
        """
        return self.in_force.decision.costs

    @property
    def is_racing(self) -> bool:
        """True until a plan is chosen, and while a race of plans is scheduled or running."""
        return self._schedule.is_racing

    @property
    def moves(self) -> Sequence[PlanMove]:
        """Plan changes that followed the measured errors (`Compress(measured=True)`)."""
        return self._schedule.moves

    @property
    def raced(self) -> Raced | None:
        """Last finished race, with predicted and measured times, or None."""
        return self._schedule.raced

    @property
    def error_table(self) -> ErrorTable:
        """Measured compression errors of each gradient; may be empty."""
        return ASSUMED if self.errors is None else self.errors.table

    @property
    def step_ms(self) -> float:
        """Median time of recent steps, in ms; nan before the first."""
        return self.times.median_ms

    @property
    def exposed_ms(self) -> float:
        """Median exposed communication of recent steps, in ms; nan before the first."""
        return self.times.exposed_ms

    def __repr__(self) -> str:
        is_racing = self.is_racing and not self.in_force.decision.is_provisional
        return f"<{type(self).__name__}: {in_a_line(self.metrics(), self.plan, is_racing=is_racing)}>"

    def metrics(self, *, residuals: bool = False) -> dict[str, Any]:
        """Return numbers of the last step, for logs. `residuals` adds the residuals' norm and waits for the device."""
        found = metrics_of(self.steps, self.skipped_steps, self.payload_bytes, self.times, *self._followed)
        return {**found, "residual_norm": self.in_force.state.residuals.norm} if residuals else found

    @property
    def source(self) -> str:
        """Python source of the emitted step."""
        return self.in_force.program.source

    @property
    def timeline(self) -> Timeline:
        """Predicted timeline, for batches like the first one."""
        return self.in_force.predicted

    def graph(self, after: str | None = None) -> GraphModule:
        """Return the final graph, or the graph `after` a pass. Raises BadOption for an unknown pass."""
        return self.in_force.program.graph_after(after)

    def explain(self) -> str:
        """Return the report as text."""
        return str(self.report())

    def report(self) -> StepReport:
        """Return a report: `print` it, or call `save_html`, `save_trace` or `to_json`."""
        notes = (*self.notes, *self.counted_notes, *self._profiler.notes)
        force, schedule = self.in_force, self._schedule
        found = explanation_of(
            force.decision, force.predicted, self._terms, self._site, self.times, schedule, self.steps, notes
        )
        found = explanation_of_step(found, force, self._options, self.error_table, schedule.moves)
        return StepReport(replace(found, measured=self._profiler.measured(self.plan)))

    def profile(self, steps: int = 5) -> None:
        """Time each emitted line on this rank in the next `steps` steps that only train, for `report()`."""
        self._profiler.begin(steps)

    @property
    def counted_notes(self) -> tuple[str, ...]:
        race, errors = self._schedule.note_on_race(self.steps), self.errors.said if self.errors is not None else ""
        unlike, skipped = self._steps_unlike_first, self.skipped_steps
        return notes_of(self.in_force, race, errors, steps=self.steps, unlike_first=unlike, skipped=skipped)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, compressor states and plan, without model and optimizer.

        A job that loads the state before its first step follows the saved plan, unless plans raced when it was saved.
        """
        self._execution.group.check_is_over()
        return sealed(self.in_force.state_dict(self.steps))

    def checkpoint(self) -> dict[str, Tensor]:
        """Return this rank's state as plain tensors, with names unique to the rank, for checkpoint libraries.

        The state includes the default random generators, restored by `load_state_dict` if the number of ranks is equal.
        """
        return to_tensors(sealed({**self.state_dict(), GENERATORS: generators(self._site.device)}))

    def load_state_dict(self, state: Given) -> None:
        """Load a `state` from `state_dict` or `checkpoint`. Every rank calls it; a rank without a state passes None.

        The states may come from another plan or number of ranks. Each state is loaded by exactly one rank. If the job
        has fewer ranks now, some ranks load several states: `load_state_dict([state, another])`. The sum of the
        residuals stays the same (see `fxcomp.state.handover`). A rank without a state receives the shared values: the
        number of steps, and states of compressors with summed payloads.

        Raises BadState, or PeerFailed if another rank's state does not fit. Training is then blocked until a state is
        loaded. Loading a state also lets ranks continue after an exception inside a step.
        """
        self._execution.check_open()
        with self._site.ranks.together("load_state_dict", after_a_stop=True):
            self._execution.group.clear()
            states = self._site.ranks.attempt("reading a checkpoint", lambda: states_of(state))
            follow = partial(self._schedule.follow_saved, states, self.steps)
            steps = self.in_force.load(states, follow, self._schedule.go_on)
            if steps is not None:
                self.steps = steps
                self._schedule.resume(steps)
                note = note_on_another_plan(saved_plan(states), self.in_force.plans[-1])
                self.notes += [note] if note else []
            here = {"the plan": self.plan.digest, "the number of steps": self.steps}
            restore_generators(states, self._site.ranks.rank, self._site.ranks.world_size, self._site.device)
            self._site.ranks.check_same("going on from the states", here)
