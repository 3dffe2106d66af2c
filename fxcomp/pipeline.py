"""The compiler: from a captured step and a plan to a program.

    graph ─► label ─► bucket ─► lower strategies ─► thread state ─► annotate ─► order ─► emit ─► Program

`Compiler.passes` lists all passes, grouped in tuples (turns). A running job that emits or retunes a program executes
one turn between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.codegen import program
from fxcomp.codegen.program import Program, load_program
from fxcomp.codegen.traced import trace_program
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, Timeline, simulate
from fxcomp.gc_paused import gc_paused
from fxcomp.graph.captured import Captured
from fxcomp.graph.edit import has_scale
from fxcomp.graph.run_passes import Passes, Turns, run, run_in_turns
from fxcomp.passes.annotate_costs import annotate_costs, note_work
from fxcomp.passes.assign_streams import assign_streams
from fxcomp.passes.broadcast_buffers import broadcast_buffers
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.clip_in_lists import clip_in_lists
from fxcomp.passes.commit_if_finite import commit_if_finite
from fxcomp.passes.end_at_sums import end_at_sums
from fxcomp.passes.fuse_updates import fuse_updates
from fxcomp.passes.label_gradients import label_gradients
from fxcomp.passes.lower_strategies import lower_strategies
from fxcomp.passes.move_exchange import move_exchange
from fxcomp.passes.narrow_gradients import narrow_gradients
from fxcomp.passes.order_for_overlap import order_for_overlap
from fxcomp.passes.recompute_in_backward import recompute_in_backward
from fxcomp.passes.remove_dead_nodes import remove_dead_nodes
from fxcomp.passes.retune_strategies import retune_strategies
from fxcomp.passes.scale_gradients import scale_gradients
from fxcomp.passes.sum_gradients import sum_gradients
from fxcomp.passes.thread_state import thread_state
from fxcomp.passes.weigh_gradients import weigh_gradients
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.kinds import ElementType, Stream
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import DENSE
from fxcomp.search.plan_tasks import handing_out
from fxcomp.search.read_workload import graph_tasks, read_momenta, read_workload
from fxcomp.search.workload import Workload


@dataclass(frozen=True, slots=True)
class Compiler:
    """Rewrites captured steps for one rank of a cluster, without communication."""

    cluster: Cluster
    rank: int = 0
    feedback: ErrorFeedback = CLASSIC
    skip_nonfinite: bool = False
    micro_batches: int = 1
    """Number of micro-batches whose gradients are summed before sending."""
    exact: Mapping[str, ElementType] = field(default_factory=dict[str, ElementType])
    """Gradients that are casts of 16-bit values and sent as those values: name to type, equal on all ranks."""
    keeps_order: bool = False
    """True if results must not depend on buckets. Norms for clipping are then taken per gradient."""

    def labelling(self) -> Passes:
        """Return the passes that need no plan: they label reductions and roles."""
        ranks = self.cluster.world_size
        return (
            (
                partial(sum_gradients, micro_batches=self.micro_batches),
                partial(canonicalize_sync, world_size=ranks),
                partial(broadcast_buffers, world_size=ranks),
                partial(label_gradients),
                partial(narrow_gradients, exact=self.exact),
                partial(recompute_in_backward, devices=program.INDUCTOR_DEVICES),
            ),
        )

    def passes(self, plan: Plan, costs: CostTable) -> Passes:
        """Return the passes from a captured graph to a plan's graph."""
        return (
            *self.labelling(),
            *self._bucketing(plan),
            (
                partial(
                    lower_strategies,
                    plan=plan,
                    cluster=self.cluster,
                    rank=self.rank,
                    multiplies_means=bool(self.exact),
                ),
            ),
            (
                partial(thread_state, surrounds=self.feedback.surrounds),
                partial(remove_dead_nodes),
                partial(commit_if_finite, skip_nonfinite=self.skip_nonfinite),
            ),
            self._pricing(costs),
            (partial(assign_streams, cluster=self.cluster), partial(order_for_overlap, plan=plan)),
        )

    def _bucketing(self, plan: Plan) -> Passes:
        return (
            (
                partial(bucket_gradients, plan=plan),
                partial(weigh_gradients, world_size=self.cluster.world_size),
                partial(scale_gradients, micro_batches=self.micro_batches),
                partial(move_exchange, plan=plan),
            ),
        )

    def passes_of_a_micro_batch(self, costs: CostTable) -> Passes:
        """Return the passes of a micro-batch that only sums gradients."""
        return (
            (
                partial(sum_gradients, micro_batches=self.micro_batches),
                partial(label_gradients),
                partial(recompute_in_backward, devices=program.INDUCTOR_DEVICES),
            ),
            (partial(end_at_sums), partial(annotate_costs, costs=costs, cluster=self.cluster)),
            (partial(assign_streams, cluster=self.cluster),),
        )

    def _pricing(self, costs: CostTable) -> tuple[partial[GraphModule], ...]:
        """Return the passes that adapt nodes to the device and estimate their costs."""
        clip = partial(clip_in_lists, by_bucket=not self.keeps_order)
        return clip, partial(fuse_updates), partial(annotate_costs, costs=costs, cluster=self.cluster)

    def retuning(self, plan: Plan, costs: CostTable) -> Passes:
        """Return the passes that change a program to another plan with the same emitted lines."""
        return (
            (partial(retune_strategies, plan=plan, cluster=self.cluster, rank=self.rank),),
            self._pricing(costs),
        )

    @gc_paused()
    @compat.outside_function_modes()
    def analyze(self, graph: GraphModule, costs: CostTable, moved: Collection[str] = ()) -> Workload:
        """Return a captured step's workload, with the costs of exchanging the momenta of the parameters `moved`.

        Raises Unsupported if a parameter's momentum cannot be exchanged.
        """
        note_work(graph)
        gm = run(graph, (*self.labelling(), self._pricing(costs)))
        workload = replace(read_workload(gm, costs.feed_us), host_us=self.micro_batches * costs.host_us)
        if moved:
            bucketing = self._bucketing(_one_by_one(workload, moved))
            after = run(graph, (*self.labelling(), *bucketing, self._pricing(costs)))
            workload = read_momenta(workload, gm, after)
        workload = workload.after_compute((self.micro_batches - 1) * workload.backward_us)
        if not self.skip_nonfinite:
            return workload
        look_us = costs.pack_us(workload.dense_bytes) / 2  # as in annotate_costs
        finish_us = workload.finish_us + look_us
        return replace(workload, commits=True, saves_residuals=has_scale(gm), finish_us=finish_us)

    def emit(self, captured: Captured, plan: Plan, costs: CostTable) -> Turns[Program]:
        replay = partial(self.graphs_after_each_pass, captured.graph, plan, costs)

        def program_of(gm: GraphModule) -> Program:
            program = load_program(captured, gm, replay, self.predicted(gm, costs, (captured.graph, plan)))
            trace_program(plan, program.emitted, program.timeline, replay)
            return program

        return run_in_turns(captured.graph, self.passes(plan, costs), program_of)

    @gc_paused()
    def emit_micro_batch(self, captured: Captured, costs: CostTable) -> Program:
        """Compile the program of a micro-batch that does not end its group."""
        passes = self.passes_of_a_micro_batch(costs)
        gm = run(captured.graph, passes)
        return load_program(captured, gm, partial(_after_each, captured.graph, passes), self.predicted(gm, costs))

    @gc_paused()
    @compat.outside_function_modes()
    def rewrite(self, graph: GraphModule, plan: Plan, costs: CostTable) -> GraphModule:
        """Return a copy of a captured graph that follows a plan."""
        return run(graph, self.passes(plan, costs))

    @compat.outside_function_modes()
    def eager(self, graph: GraphModule, costs: CostTable, *, is_fused: bool) -> GraphModule:
        """Return a copy of a captured graph, with the costs of eager PyTorch and a fused or foreach optimizer."""
        updates = (partial(clip_in_lists), *((partial(fuse_updates),) if is_fused else ()))
        priced = partial(annotate_costs, costs=costs, cluster=self.cluster, joins=False)
        return run(graph, ((partial(label_gradients),), (*updates, priced)))

    def retune(self, program: Program, plan: Plan, costs: CostTable) -> Turns[Program]:
        """Return a program for another plan with the same emitted lines, without capture and emission."""
        replay = partial(self.graphs_after_each_pass, program.captured.graph, plan, costs)

        def program_of(gm: GraphModule) -> Program:
            return program.retuned(gm, replay, self.predicted(gm, costs, (program.captured.graph, plan)))

        return run_in_turns(program.graph, self.retuning(plan, costs), program_of)

    def graphs_after_each_pass(self, graph: GraphModule, plan: Plan, costs: CostTable) -> Mapping[str, GraphModule]:
        return _after_each(graph, self.passes(plan, costs))

    def predicted(self, gm: GraphModule, costs: CostTable, of: tuple[GraphModule, Plan] | None = None) -> Timeline:
        """Simulate a final graph.

        `of` is the captured graph and plan of a step that ends a group of micro-batches. The compute of the group's
        other micro-batches is then simulated before the graph; they send nothing.
        """
        others, ahead_us = 0, 0.0
        if of is not None and self.micro_batches > 1:
            captured, plan = of
            one = run(captured, (*self.labelling(), self._pricing(costs))) if plan.moves_exchange else gm
            others = self.micro_batches - 1
            ahead_us = others * read_workload(one, costs.feed_us).backward_us
        before = [(AHEAD, ahead_us), (FEED, costs.feed_us)]
        tasks = [Task(name, Stream.COMPUTE, us) for name, us in before if us]
        return simulate([*handing_out((1 + others) * costs.host_us), *tasks, *graph_tasks(gm)], costs.processors)


def pass_names() -> list[str]:
    alone = Cluster(1, 1, intra=Link(0.0, 1.0), inter=Link(0.0, 1.0))
    return [each.func.__name__ for turn in Compiler(alone).passes(Plan(()), CostTable()) for each in turn]


def _one_by_one(workload: Workload, moved: Collection[str]) -> Plan:
    point = {True: ExchangePoint.MOMENTUM, False: ExchangePoint.GRADIENT}
    return Plan(
        tuple(
            Bucket((g.name,), (g.elements,), DENSE, element_type=g.element_type, at=point[g.name in moved])
            for g in workload.gradients
        )
    )


def _after_each(graph: GraphModule, passes: Passes) -> Mapping[str, GraphModule]:
    history: dict[str, GraphModule] = {}
    run(graph, passes, history)
    return history


AHEAD = "backward of the other micro-batches"
"""Name of the simulated task of earlier micro-batches."""

FEED = "feed"
"""Name of the task of work outside graph nodes. The simulation puts all of it at the start."""
