"""Reduce-scatter the gradients of one fully_shard model: dense at first, then by a plan that all ranks share.

    fully_shard: a module's gradients, one part per rank ──► here ──► this rank's part of the mean

Each compressed module has an emitted step, which returns shards:

    bucket_0 = rt.in_place(...)            the parts, one after the other
    compress_0, all_to_all_0, mean_0       one payload per rank; the mean of the received payloads

A dense module uses fully_shard's own reduce_scatter. Work runs in the backward thread on a CPU, and on fully_shard's
reduction stream on a GPU. New residuals are committed at the end of backward if all parts are finite.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import BadPlan, Unsupported
from fxcomp.frontends.backward_passes import BackwardPasses
from fxcomp.frontends.hook_program import HookProgram, Layout, arriving
from fxcomp.frontends.scatter_plan import ModulePlanner, predicted, told_plan
from fxcomp.frontends.sharded_modules import ScatteredModule
from fxcomp.frontends.start import BURSTS, Start
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.report import scatter_report
from fxcomp.report.scatter_report import ScatterFacts
from fxcomp.report.terminal import sections_to_text
from fxcomp.runtime.packing import not_finite_too
from fxcomp.search.by_module import ModuleTime
from fxcomp.search.decision import Decision
from fxcomp.state.checkpoint import states_of
from fxcomp.state.saved_state import Given
from fxcomp.step.follower import Followed

CLOSED = (
    "the compression of these gradients has been closed.\n"
    "  Call fxcomp.compress_reduce_scatter again with a newly sharded model, on all ranks."
)


@dataclass(slots=True)
class _ScatterPass:
    order: list[int] = field(default_factory=list[int])
    """Module indices, in arrival order."""
    before: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Residuals from before the pass, by bucket index."""
    delivered: set[int] = field(default_factory=set[int])
    """Indices of modules whose gradients include residuals of a dropped plan (`owed`)."""
    agrees: bool = False
    """True if ranks must agree on committing residuals."""
    not_finite: Tensor | None = None
    stream: Any = None


class ScatterJob(BackwardPasses):
    """Backward passes of one fully_shard model."""

    def __init__(self, start: Start, modules: Sequence[ScatteredModule]) -> None:
        super().__init__("compress_reduce_scatter", start, CLOSED)
        self.modules, self._asked = modules, start
        self._dense = [module.module.own_scatter for module in modules]
        self._programs: dict[int, dict[int, HookProgram]] = {}
        """Programs by plan index, then by module index."""
        self._now: dict[int, HookProgram] = {}
        self._pass = _ScatterPass()
        self._priced: tuple[Decision, tuple[tuple[ModuleTime, ...], Timeline]] | None = None

    def install(self) -> None:
        """Replace fully_shard's collective."""
        for number, module in enumerate(self.modules):
            module.module.scatter_by(_ModuleScatter(self, number, self._dense[number]))

    @property
    def layout(self) -> Layout:
        """Gradients of the modules in model order."""
        return tuple(module.bucket for module in self.modules)

    # A pass

    def arrive(self, number: int) -> None:
        """Record that a module's gradients exist."""
        if not self._pass.order:
            self.enter()
            compat.at_end_of_backward(self._end)
            if self.follower is not None:
                self.follow_scale()
                state = self.follower.state
                self._pass.agrees = state.keeps_something or bool(state.owed)
        self._pass.order.append(number)
        if self.is_timed:
            self.ready.enter()
            if self.site.device.type != "cpu":  # compute continues immediately
                self.ready.leave()

    def scatter(self, number: int, output: Tensor, given: Tensor, group: Any, op: Any) -> None:
        """Write this rank's part of the mean of a module's gradients."""
        with self.stops_on_errors():
            self._scatter(number, output, given, group, op)
            if self.is_timed and self.site.device.type == "cpu":
                self.ready.leave()

    def stop(self, error: BaseException) -> None:
        self._pass = _ScatterPass()
        super().stop(error)

    def _scatter(self, number: int, output: Tensor, given: Tensor, group: Any, op: Any) -> None:
        now = self._pass
        now.stream = compat.stream_of(given.device)
        # If fully_shard leaves out parameters without gradients, `owed` waits for a later pass.
        is_whole = given.numel() == self.modules[number].elements
        if is_whole and number not in now.delivered:
            self._add_owed(number, given)
        if is_whole and number in self._now:
            self._compress(self._now[number], output, given, op)
        else:
            self.runtime.counters.count("reduce_scatter", "world", given.nbytes)
            self._dense[number](output, given, group, op)
        if now.agrees:  # a non-finite value reaches only the rank of its part
            now.not_finite = not_finite_too(now.not_finite, output)

    def _add_owed(self, number: int, given: Tensor) -> None:
        module = self.modules[number]
        owed = {} if self.follower is None else self.follower.state.owed
        if not owed.keys().isdisjoint(module.module.names):
            given.add_(module.in_parts(owed, given.device))
            self._pass.delivered.add(number)

    def _compress(self, program: HookProgram, output: Tensor, given: Tensor, op: Any) -> None:
        if not (op == dist.ReduceOp.AVG or op == dist.ReduceOp.SUM):
            raise Unsupported(
                "fully_shard scatters with a divisor of its own for gradients (set_gradient_divide_factor).\n"
                "  Leave it out, and scale the loss."
            )
        state, number = self.planned.state, program.first
        if program.residuals and number not in self._pass.before:
            self._pass.before[number] = state.residuals.of(number).clone()
        self.executor.begin(program.module, self.runtime, program.arguments(state))
        _, (mean, *_) = self.executor.arrive(program.layout[0].with_views(given))
        self.executor.end(None, self.runtime)
        output.copy_(mean.mul_(self.site.ranks.world_size) if op == dist.ReduceOp.SUM else mean)

    # End of a pass

    def _end(self) -> None:
        """End a pass; torch calls it at the end of backward."""
        now, self._pass = self._pass, _ScatterPass()
        if not now.order:
            return
        layout = tuple(self.modules[number].bucket for number in dict.fromkeys(now.order))
        with self.stops_on_errors():
            compat.wait_for_stream(now.stream)
            self._commit(now)
            if self.is_timed:
                self.ready.end_pass(tuple(self.modules[number].bucket for number in now.order))
            self.time_pass(self.count().waits, counts=self.follower is not None)
            self.end_pass(layout)

    def _commit(self, now: _ScatterPass) -> None:
        """Commit residuals, or restore the old ones if any rank has a non-finite part."""
        if not now.agrees:
            return
        flag, state = now.not_finite, self.planned.state
        assert flag is not None, "a part has come"
        self.site.transport.all_reduce(flag, "world", "main", "max").wait()
        if not now.delivered and flag.device.type != "cpu":  # selected on the device, without synchronizing the host
            for number, before in now.before.items():
                kept = state.residuals.of(number)
                torch.where(flag.bool(), before, kept, out=kept)
        elif flag.item():
            self.runtime.counters.skipped = True
            for number, before in now.before.items():
                state.residuals.of(number).copy_(before)
        else:
            for name in (name for number in now.delivered for name in self.modules[number].module.names):
                state.owed.pop(name, None)

    # Deciding

    def _choose(self, start: Start, graph: GraphModule, layout: Layout) -> Decision:
        by_names = {module.module.names: module for module in self.modules}
        modules = [by_names[bucket.names] for bucket in layout]
        return start.decide(ModulePlanner(start.site, start.options, start.compiler(), graph, BURSTS, modules=modules))

    def _prepare(self, followed: Followed, layout: Layout) -> None:
        del layout  # parts are the same in every pass
        if followed.number in self._programs:
            return
        numbers = {frozenset(module.module.names): k for k, module in enumerate(self.modules)}
        self._programs[followed.number] = {
            numbers[frozenset(bucket.names)]: replace(self._program_of(bucket, numbers, followed), first=k)
            for k, bucket in enumerate(followed.decision.plan.buckets)
            if not bucket.strategy.is_dense
        }

    def _program_of(self, bucket: Bucket, numbers: dict[frozenset[str], int], followed: Followed) -> HookProgram:
        parts = self.modules[numbers[frozenset(bucket.names)]].parts
        plan = Plan((Bucket(parts.names, parts.sizes, bucket.strategy, element_type=bucket.element_type),))
        graph = arriving((parts,), [0.0], self.site.device)
        return HookProgram.made((parts,), graph, self.start.compiler(), plan, followed.decision.costs)

    def _go_on(self) -> None:
        self._now = self._programs[self.planned.now.number]

    # State

    def load_state_dict(self, state: Given) -> None:
        """Restore a state, and follow its plan at once unless the options name a plan. Must run on every rank."""
        self.executor.check_open()
        with self.site.ranks.together("load_state_dict", after_a_stop=True):
            given: Given = self.site.ranks.attempt("reading a checkpoint", lambda: states_of(state)) or None
            start = self._asked.follow(given, self._fits)
            if start.options is not self._asked.options or (self.follower is None and start.loads):
                self.start = start
                self._programs.clear()
                self._decide(self.layout, given)
            elif self.follower is not None:
                self._load(given)

    def _fits(self, saved: Plan) -> bool:
        """Return True if a saved plan fits these modules; warn if not."""
        try:
            told_plan(saved, self.modules)
        except BadPlan as error:
            warnings.warn(f"fxcomp: the saved plan is not followed: {error}", stacklevel=7)
            return False
        return True

    # Inspecting

    @property
    def source(self) -> str:
        return "\n\n".join(each.source for each in self._now.values())

    @property
    def timeline(self) -> Timeline | None:
        return None if self.decision is None else self._predicted(self.decision)[1]

    def _predicted(self, decision: Decision) -> tuple[tuple[ModuleTime, ...], Timeline]:
        """Predict module times and timeline, once per decision."""
        if self._priced is None or self._priced[0] is not decision:
            self._priced = decision, predicted(decision, self.site)
        return self._priced[1]

    def report(self) -> str:
        decision, times = self.planned.decision, self.times
        prices, timeline = self._predicted(decision)
        names = {frozenset(module.module.names): module.module.name for module in self.modules}
        facts = ScatterFacts(
            plan=decision.plan,
            modules=[names[frozenset(bucket.names)] or "the outermost" for bucket in decision.plan.buckets],
            times=prices if decision.choice is not None else (),
            step_us=timeline.step_time_us,
            dense_us=decision.choice.dense_us if decision.choice is not None else 0.0,
            cluster=self.site.cluster,
            mode=self.start.terms.mode.value,
            kept_bytes=4 * sum(slot.elements for slot in self.planned.state.residuals.layout.values()),
            notes=(*decision.notes, *self.site.ranks.notes),
            measured_ms=times.median_ms if times.step_ms else None,
        )
        return sections_to_text(scatter_report.headline(facts), scatter_report.sections(facts))


class _ModuleScatter:
    """Replacement for fully_shard's reduce_scatter of one module."""

    def __init__(self, job: ScatterJob, number: int, dense: compat.Scatter) -> None:
        self._job, self._number, self._dense = job, number, dense
        self._has_begun = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._has_begun:  # called for the gradients, then for this rank's part
            self._has_begun = True
            self._job.arrive(self._number)
        return self._dense.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert not async_op, "fully_shard runs it on a stream of its own"
        self._has_begun = False
        self._job.scatter(self._number, output_tensor, input_tensor, group, op)
