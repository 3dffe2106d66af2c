"""The compiler: from a captured step and a plan to the program that follows it.

graph ─► label ─► bucket ─► lower strategies ─► thread state ─► annotate ─► order ─► emit ─► Program

These are the main ones; `Compiler.rewrite` has every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from torch.fx import GraphModule

from fxcomp.cluster.cluster import Cluster
from fxcomp.codegen.program import Program, Replay, load_program
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, Timeline, simulate
from fxcomp.gc_paused import gc_paused
from fxcomp.graph.captured import Captured
from fxcomp.graph.check import check
from fxcomp.graph.edit import clone, count_of, has_scale
from fxcomp.passes.annotate_costs import annotate_costs, note_work
from fxcomp.passes.assign_streams import assign_streams
from fxcomp.passes.broadcast_buffers import broadcast_buffers
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.commit_if_finite import commit_if_finite
from fxcomp.passes.correct_momentum import correct_momentum
from fxcomp.passes.end_at_sums import end_at_sums
from fxcomp.passes.label_gradients import label_gradients
from fxcomp.passes.lower_strategies import lower_strategies
from fxcomp.passes.order_for_overlap import order_for_overlap
from fxcomp.passes.remove_dead_nodes import remove_dead_nodes
from fxcomp.passes.retune_strategies import retune_strategies
from fxcomp.passes.scale_gradients import scale_gradients
from fxcomp.passes.sum_gradients import sum_gradients
from fxcomp.passes.thread_state import thread_state
from fxcomp.passes.weigh_gradients import weigh_gradients
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.plan.streams import Stream
from fxcomp.search.graph_tasks import graph_tasks
from fxcomp.search.read_workload import read_workload
from fxcomp.search.workload import Workload

P = ParamSpec("P")
T = TypeVar("T")
Turns = Generator[None, None, T]
"""Work that is done a part at a time, between the steps of a running job."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Rewrites captured steps for one rank of a cluster. Ranks do not communicate in it."""

    cluster: Cluster
    rank: int = 0
    feedback: ErrorFeedback = CLASSIC
    skip_nonfinite: bool = False
    micro_batches: int = 1
    """The number of micro-batches whose gradients a step sums up before it sends anything."""

    @gc_paused()
    def analyze(self, graph: GraphModule, costs: CostTable) -> Workload:
        """Read what there is to decide about."""
        run = PassRunner(remembers=False)
        note_work(graph)
        gm = run(annotate_costs, self._labelled(run, clone(graph)), costs, self.cluster)
        assert_whole(gm, "analyze")
        workload = replace(read_workload(gm, costs.feed_us), keeps_velocity=self.feedback.momentum > 0)
        workload = workload.behind((self.micro_batches - 1) * workload.backward_us)
        if not self.skip_nonfinite:
            return workload
        look_us = costs.pack_us(workload.dense_bytes) / 2  # as annotate_costs prices it
        finish_us = workload.finish_us + look_us
        return replace(workload, commits=True, saves_residuals=has_scale(gm), finish_us=finish_us)

    @gc_paused()
    def emit(self, captured: Captured, plan: Plan, costs: CostTable) -> Program:
        """Make the program that follows a plan."""
        return finished(self.emit_in_turns(captured, plan, costs))

    def emit_in_turns(self, captured: Captured, plan: Plan, costs: CostTable) -> Turns[Program]:
        """Make the program, a pass at a time."""
        gm = yield from self._rewrite_in_turns(captured.graph, plan, costs, PassRunner(remembers=False))
        yield
        replay = partial(self.graphs_after_each_pass, captured.graph, plan, costs)
        return load_program(captured, gm, replay, self._predicted(gm, costs))

    @gc_paused()
    def emit_micro_batch(self, captured: Captured, costs: CostTable) -> Program:
        """Make the program of a micro-batch that ends no group, whatever the plan."""

        def rewritten(run: PassRunner) -> GraphModule:
            gm = run(label_gradients, run(sum_gradients, clone(captured.graph), self.micro_batches))
            gm = run(annotate_costs, run(end_at_sums, gm), costs, self.cluster)
            return run(assign_streams, gm, self.cluster)

        def replay() -> Mapping[str, GraphModule]:
            run = PassRunner()
            rewritten(run)
            return run.history

        gm = rewritten(PassRunner(remembers=False))
        assert_whole(gm, "one of the passes")
        return finish(captured, gm, replay, costs)

    @gc_paused()
    def rewrite(self, graph: GraphModule, plan: Plan, costs: CostTable, run: PassRunner | None = None) -> GraphModule:
        """Rewrite a copy of a captured graph until it follows a plan."""
        return finished(self._rewrite_in_turns(graph, plan, costs, run or PassRunner(remembers=False)))

    def _rewrite_in_turns(
        self, graph: GraphModule, plan: Plan, costs: CostTable, run: PassRunner
    ) -> Turns[GraphModule]:
        """Run every pass, in order; a turn ends where one would else take long."""
        gm = self._labelled(run, clone(graph))
        yield
        gm = run(bucket_gradients, gm, plan)
        gm = run(weigh_gradients, gm, self.cluster.world_size)
        gm = run(scale_gradients, gm, self._means_are_scaled(gm))
        yield
        gm = run(lower_strategies, gm, plan, self.cluster, self.rank)
        yield
        gm = run(thread_state, gm, self.feedback.surrounds)
        gm = run(correct_momentum, gm, self.feedback.momentum)
        gm = run(remove_dead_nodes, gm)
        gm = run(commit_if_finite, gm, skip_nonfinite=self.skip_nonfinite)
        yield
        gm = run(annotate_costs, gm, costs, self.cluster)
        yield
        gm = run(assign_streams, gm, self.cluster)
        gm = run(order_for_overlap, gm, plan)
        yield
        assert_whole(gm, "one of the passes")
        return gm

    def retune(self, program: Program, plan: Plan, costs: CostTable) -> Program:
        """Let a program follow another plan of the same lines: without a capture, and without emitting anything."""
        return finished(self.retune_in_turns(program, plan, costs))

    def retune_in_turns(self, program: Program, plan: Plan, costs: CostTable) -> Turns[Program]:
        """Do it a pass at a time."""
        run = PassRunner(remembers=False)
        gm = clone(program.graph)
        yield
        gm = run(retune_strategies, gm, plan, self.cluster, self.rank)
        yield
        gm = run(annotate_costs, gm, costs, self.cluster)
        yield
        graph = program.captured.graph
        replay = partial(self.graphs_after_each_pass, graph, plan, costs)
        return program.retuned(gm, replay, self._predicted(gm, costs))

    def _labelled(self, run: PassRunner, graph: GraphModule) -> GraphModule:
        """Give each gradient its collective and each node its role: what every plan starts from."""
        gm = run(sum_gradients, graph, self.micro_batches)
        gm = run(canonicalize_sync, gm, self.cluster.world_size)
        gm = run(broadcast_buffers, gm, self.cluster.world_size)
        return run(label_gradients, gm)

    def _means_are_scaled(self, gm: GraphModule) -> bool:
        """The mean over micro-batches is made by a factor, but of a loss with a count; a scale is taken off by one."""
        return has_scale(gm) or (self.micro_batches > 1 and count_of(gm) is None)

    def _predicted(self, gm: GraphModule, costs: CostTable) -> Timeline:
        """Simulate a final graph, behind the other micro-batches of its group."""
        others = self.micro_batches - 1
        return predicted(gm, costs, others * read_workload(gm, costs.feed_us).backward_us if others else 0.0)

    def graphs_after_each_pass(self, graph: GraphModule, plan: Plan, costs: CostTable) -> Mapping[str, GraphModule]:
        """Rewrite a graph again, and keep what each pass returns, by the pass's name."""
        run = PassRunner()
        self.rewrite(graph, plan, costs, run)
        return run.history


def finished(turns: Turns[T]) -> T:
    """Take all turns at once."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def finish(captured: Captured, gm: GraphModule, replay: Replay, costs: CostTable) -> Program:
    """Price, emit and load a final graph, whoever made it: the graph alone decides what runs."""
    return load_program(captured, gm, replay, predicted(gm, costs))


def predicted(gm: GraphModule, costs: CostTable, ahead_us: float = 0.0) -> Timeline:
    """Simulate a final graph, behind compute that takes so long."""
    before = [(AHEAD, ahead_us), (FEED, costs.feed_us)]
    tasks = [Task(name, Stream.COMPUTE, us) for name, us in before if us]
    return simulate([*tasks, *graph_tasks(gm)], costs.processors)


AHEAD = "backward of the other micro-batches"
"""The task of forward and backward passes that come before the one that ends a group."""

FEED = "feed"
"""The task of what a step does around its nodes. It is spread over the step; here it comes first."""


class PassRunner:
    """Runs each pass, checks what must hold after it, and remembers the result, each on a copy of the one before.

    `remembers=False` changes the one graph that it is given and leaves checking to its caller, which takes a third of
    the time.
    """

    def __init__(self, *, remembers: bool = True) -> None:
        self.remembers = remembers
        self.history: dict[str, GraphModule] = {}

    def __call__(
        self,
        pass_: Callable[Concatenate[GraphModule, P], GraphModule],
        gm: GraphModule,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GraphModule:
        result = pass_(clone(gm) if self.remembers else gm, *args, **kwargs)
        if self.remembers:
            assert_whole(result, pass_.__name__)
            self.history[pass_.__name__] = result
        return result


def assert_whole(gm: GraphModule, made_by: str) -> None:
    """Check what must hold of every graph that a pass returns."""
    gm.graph.lint()
    violations = check(gm)
    assert not violations, f"{made_by} broke the graph: " + "; ".join(map(str, violations))
