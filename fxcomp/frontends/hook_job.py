"""Average the buckets of one DistributedDataParallel model: dense at first, then by a plan that all ranks share.

    pass 0 ... 5     no plan: each bucket is averaged when it arrives, and timed
    from then on     the plan's emitted step, which receives each bucket when it arrives

DDP rebuilds its buckets after its first passes, so a plan's state is keyed by parameter name. If a pass's buckets are
not known in advance, they are collected, and the step runs after the last bucket.

The emitted step runs inside the hook, in the backward thread, so exceptions propagate unchanged from `backward()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxcomp.cost.timeline import Timeline
from fxcomp.errors import RanksApart, Unsupported
from fxcomp.frontends.backward_passes import BackwardPasses
from fxcomp.frontends.hook_plan import fitted
from fxcomp.frontends.hook_program import DdpBucket, HookProgram, Layout, Wrapped, arriving
from fxcomp.frontends.sparse_mean import SparseMean
from fxcomp.frontends.start import Start, has_whole_plan
from fxcomp.report.terminal import to_text
from fxcomp.search.decision import Decision
from fxcomp.state.saved_state import Given
from fxcomp.step.explain import explanation_of
from fxcomp.step.follower import Followed
from fxcomp.step.unused import ZeroGradients

Future = torch.futures.Future[Tensor]

REBUILT = 3
"""Number of first passes whose buckets may change. DDP rebuilds its buckets after the first pass, with static_graph
after the second (measured, torch 2.13).
"""


def delivered(buffer: Tensor) -> Future:
    future = _pending(buffer)
    future.set_result(buffer)
    return future


def _pending(buffer: Tensor) -> Future:
    return torch.futures.Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])


@dataclass(slots=True)
class Arrived:
    """Arrived buckets of the current pass."""

    parameters: set[int] = field(default_factory=set[int])
    kinds: list[DdpBucket] = field(default_factory=list[DdpBucket])
    buffers: list[Tensor] = field(default_factory=list[Tensor])
    futures: list[Future] = field(default_factory=list[Future])
    sparse: dict[int, SparseMean] = field(default_factory=dict[int, SparseMean])
    """Pending averages of sparse gradients, by bucket index."""

    def deliver(self) -> None:
        """Complete the futures with the averaged buffers."""
        for number, mean in self.sparse.items():
            self.buffers[number] = mean.finish()
        for future, buffer in zip(self.futures, self.buffers, strict=True):
            future.set_result(buffer)


CLOSED = (
    "the averaging of these gradients has been closed.\n"
    "  Set it up again, on all ranks: a new DistributedDataParallel with a new fxcomp.ddp_hook(), or average_replicas."
)


class HookJob(BackwardPasses):
    """Backward passes of one DistributedDataParallel or `average_replicas` model."""

    def __init__(self, start: Start, wrapped: Wrapped, given: Given = None):
        super().__init__("ddp_hook", start, CLOSED, given)
        self._wrapped = wrapped
        self._programs: dict[tuple[int, Layout], HookProgram] = {}
        """Programs by plan index and layout."""
        self._program: HookProgram | None = None
        self._kinds: dict[tuple[int, ...], DdpBucket] = {}
        """Known buckets, by parameter ids."""
        self._layout: Layout = ()
        self._arrived = Arrived()
        self._gathers = False
        """True if buckets are collected, and the step runs after the last bucket."""
        self._unused: ZeroGradients | None = None

    @property
    def source(self) -> str:
        return "" if self._program is None else self._program.source

    @property
    def timeline(self) -> Timeline | None:
        return None if self._program is None else self._program.timeline

    @property
    def may_keep(self) -> bool:
        """True if a pass may leave a residual."""
        return self.is_planned and (self.follower is None or self.follower.state.keeps_something)

    # Running

    def take(self, buffer: Tensor, parameters: Sequence[Tensor], *, is_last: bool) -> Future:
        """Take the next bucket of a backward pass: a flat buffer with the gradients of these parameters.

        The pass also ends when all parameters have arrived, because torch marks no bucket as the last in a static
        graph's first pass with several buckets.
        """
        with self.stops_on_errors():
            if self.is_timed:
                self.ready.enter()
            is_timed, future = self.is_timed, self._take(buffer, parameters)
            if is_last or len(self._arrived.parameters) == len(self._wrapped.names):
                self._finish()
            if is_timed:
                self.ready.leave()
        return future

    def stop(self, error: BaseException) -> None:
        self._arrived, self._unused = Arrived(), None
        super().stop(error)

    def _take(self, buffer: Tensor, parameters: Sequence[Tensor]) -> Future:
        arrived, came = self._arrived, set(map(id, parameters))
        number = len(arrived.kinds)
        if arrived.parameters & came:
            raise RanksApart(
                f"a bucket came again where bucket {number} was due: the backward pass before did not reach every"
                " parameter.\n  Pass find_unused_parameters=True to DistributedDataParallel."
            )
        arrived.parameters |= came
        kind, future = self._kind(parameters, buffer.dtype), _pending(buffer)
        arrived.kinds.append(kind)
        arrived.buffers.append(buffer)
        arrived.futures.append(future)
        if number == 0:
            self.enter()
            self._begin_pass(kind)
        if buffer.is_sparse:
            mean = arrived.sparse[number] = SparseMean(buffer, self.site)
            self.runtime.counters.count("all_gather", "world", mean.sent_bytes)
            arrived.buffers[number] = buffer = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        elif not self.is_planned:
            buffer.mul_(1 / self.site.ranks.world_size)
            self.runtime.counters.count("all_reduce", "world", buffer.nbytes)
            self.site.sum_over_ranks(buffer)
        if self.is_planned and not self._gathers:
            self._feed(number)
        return future

    def _kind(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> DdpBucket:
        key = tuple(map(id, parameters))
        if key not in self._kinds:
            self._kinds[key] = self._wrapped.bucket(parameters, dtype)
        return self._kinds[key]

    def _begin_pass(self, first: DdpBucket) -> None:
        """Begin the step if DDP is expected to repeat the last pass's buckets."""
        program = self._program
        self._gathers = self.passes < REBUILT or program is None or program.layout[0] != first
        if program is not None and not self._gathers:
            self._begin(program)

    def _begin(self, program: HookProgram) -> None:
        self.follow_scale()
        state = self.planned.state
        if self._wrapped.shapes:
            self.executor.begin(program.module, self.runtime, program.arguments(state))
        if self._wrapped.finds_unused and state.keeps_something:
            self._unused = ZeroGradients(state)

    def _feed(self, number: int) -> None:
        program, kind = self._program, self._arrived.kinds[number]
        assert program is not None, "a step is under way"
        if not kind.names:  # a sparse gradient, which the step does not use
            return
        if not self.executor.is_under_way or program.layout[number] != kind:
            raise Unsupported(
                f"DistributedDataParallel has changed its buckets in the middle of training: bucket {number} begins"
                f" with {kind.names[0]!r} now.\n  Register the hook before the first backward pass."
            )
        views = kind.with_views(self._arrived.buffers[number])
        gradients, owed = dict(zip(kind.names, views[1:], strict=True)), self.planned.state.owed
        if self._unused is not None:
            self._unused.look_at(gradients)
        for name, gradient in gradients.items():
            if name in owed:
                gradient.add_(owed[name].view(gradient.shape))
        program.lend(number, views[0], self.runtime)
        if (results := self.executor.arrive(views)) is not None:
            program.hand_back(results[1], self._arrived.buffers)

    def _finish(self) -> None:
        self._layout = tuple(self._arrived.kinds)
        if self.is_timed:
            self.ready.end_pass(self._layout)
        if self.is_planned:
            self._end_step()
        else:
            self.count()
        self._arrived.deliver()
        self._arrived = Arrived()
        self.end_pass(self._layout)

    def _end_step(self) -> None:
        """End the step. Record the step's time, unless the step ran after all buckets had been collected."""
        if self._gathers:
            self._run_gathered(self._layout)
        self.executor.end(self.planned.state, self.runtime)
        counters = self.count()
        if self._unused is not None:
            pairs = zip(self._layout, self._arrived.buffers, strict=True)
            self._unused.put_back(
                {n: mean for kind, flat in pairs for n, mean in kind.by_name(flat).items()}, self.site
            )
            self._unused = None
        self.time_pass(counters.waits, counts=not self._gathers)

    def _run_gathered(self, layout: Layout) -> None:
        if self.follower is None:
            self.decide(layout)
        self._go_on()
        assert self._program is not None, "a plan has a program"
        self._begin(self._program)
        for number in range(len(layout)):
            self._feed(number)

    # Deciding

    def _choose(self, start: Start, graph: GraphModule, layout: Layout) -> Decision:
        planner = start.planner(start.compiler(skip_nonfinite=True), graph)

        return start.decide(planner, fitted=lambda it: it if has_whole_plan(start.options) else fitted(it, layout))

    def _prepare(self, followed: Followed, layout: Layout) -> None:
        self._program_for(followed, layout)

    def _go_on(self) -> None:
        self._program = self._program_for(self.planned.now, self._layout)

    def _program_for(self, followed: Followed, layout: Layout) -> HookProgram:
        key = followed.number, layout
        if key not in self._programs:
            graph = arriving(layout, self.ready.medians_us(layout, self.site.device), self.site.device)
            plan, costs = followed.decision.plan, followed.decision.costs
            compiler = self.start.compiler(skip_nonfinite=self.start.trained.keeps_something(plan))
            self._programs[key] = HookProgram.made(layout, graph, compiler, plan, costs)
        return self._programs[key]

    def report(self) -> str:
        decision, terms, notes = self.planned.decision, self.start.terms, (*self._wrapped.notes, *self.site.ranks.notes)
        assert self._program is not None, "a plan has a program"
        found = explanation_of(
            decision, self._program.timeline, terms, self.site, self.times, self.schedule, self.passes, notes
        )
        return to_text(replace(found, is_racing=self.is_racing))
