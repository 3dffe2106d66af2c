"""Emit a plan for the buckets of DistributedDataParallel: the compiler passes of a step over a small graph.

    %arrive_0   arrive    arrive(0, 1800.0)        bucket 0, after 1.8 ms of compute
    %fc_bias    gradient  %arrive_0[1]
    %fc_weight  gradient  %arrive_0[2]
    ...                                            lines of the plan, as in a compiled step
    output(None, (%mean_0, %mean_1))               mean of each bucket of the plan

A plan's bucket may span several DDP buckets, or be a part of a DDP bucket. The emitted step is a generator, which
yields wherever it needs the next DDP bucket.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.codegen.emit import emit
from fxcomp.codegen.load import load
from fxcomp.codegen.traced import trace_program
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import Unsupported
from fxcomp.graph.edit import buckets, call
from fxcomp.graph.info import InputKind, NodeInfo, Role, arguments_of, free_name, info
from fxcomp.graph.ops import ARRIVE, IN_PLACE
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.runtime.runtime import Runtime
from fxcomp.state.gradient_state import GradientState


@dataclass(frozen=True, slots=True)
class DdpBucket:
    """Bucket of DistributedDataParallel: parameters in the order of its flat buffer.

    The bucket of a sparse gradient is empty.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def facts(self) -> list[Any]:
        """Facts that must be equal on all ranks."""
        return [list(self.names), str(self.dtype)]

    @property
    def starts(self) -> dict[str, int]:
        """Offset of each parameter, in elements."""
        return dict(zip(self.names, accumulate(self.sizes, initial=0), strict=False))

    def with_views(self, flat: Tensor) -> list[Tensor]:
        """Return the buffer, then a view of each gradient."""
        parts = torch.split_with_sizes(flat, self.sizes)
        return [flat, *(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))]

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, self.with_views(flat)[1:], strict=True))


Layout = tuple[DdpBucket, ...]
"""Buckets of a backward pass, in ready order."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Trained parameters of a model."""

    names: dict[int, str]
    """Names by parameter id."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of dense gradients; a complex number is a pair of reals."""
    finds_unused: bool
    """True if some parameters may get no gradient in a pass."""

    @property
    def notes(self) -> list[str]:
        """Notes on sparse gradients, which no plan sends."""
        sparse = [name for name in self.names.values() if name not in self.shapes]
        return [f"the gradient of {name!r} is sparse (sparse=True): indices and values travel" for name in sparse]

    def bucket(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> DdpBucket:
        """Describe a bucket. Raises Unsupported for another model's parameters."""
        if any(id(each) not in self.names for each in parameters):
            raise Unsupported(
                "this hook serves another model already.\n  Make one for each: model.register_comm_hook(None,"
                " fxcomp.ddp_hook(...))."
            )
        names = tuple(name for each in parameters if (name := self.names[id(each)]) in self.shapes)
        shapes = tuple(self.shapes[name] for name in names)
        return DdpBucket(names, shapes, tuple(map(math.prod, shapes)), dtype)


def arriving(layout: Layout, compute_us: Sequence[float], device: torch.device) -> GraphModule:
    """Build the graph of a backward pass with `compute_us` µs of compute before each bucket."""
    mode, _ = compat.fake_mode()
    graph = Graph()
    made: list[Node] = []
    for number, (bucket, us) in enumerate(zip(layout, compute_us, strict=True)):
        with mode:
            values = bucket.with_views(torch.empty(sum(bucket.sizes), dtype=bucket.dtype, device=device))
        arrive = call(graph, ARRIVE, (number, us), NodeInfo(Role.ARRIVE), name=f"arrive_{number}", value=values)
        for place, name in enumerate(bucket.names, start=1):
            label, value = NodeInfo(Role.GRADIENT, name), values[place]
            made.append(call(graph, operator.getitem, (arrive, place), label, name=_named(name), value=value))
    means = [_handed_out(graph, node) for node in made]
    graph.output((None, tuple(means)))
    return GraphModule(nn.Module(), graph)


def _handed_out(graph: Graph, gradient: Node) -> Node:
    label = NodeInfo(Role.UPDATE, info(gradient).parameter)
    return call(graph, torch.ops.aten.clone.default, (gradient,), label, value=gradient.meta["val"])


def _named(parameter: str) -> str:
    return free_name("gradient_" + "".join(c if c.isalnum() else "_" for c in parameter))


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that are consecutive in a plan's bucket and in a DDP bucket."""

    bucket: int
    start: int
    ddp_bucket: int
    ddp_start: int
    length: int


def runs_of(plan: Plan, layout: Layout) -> list[Run]:
    """Map a plan's buckets to ranges of DDP's buckets."""
    places = {name: (number, start) for number, bucket in enumerate(layout) for name, start in bucket.starts.items()}
    return [run for number, bucket in enumerate(plan.buckets) for run in _joined(number, bucket, places)]


def _joined(number: int, bucket: Bucket, places: dict[str, tuple[int, int]]) -> list[Run]:
    runs: list[Run] = []
    for name, extent, start in zip(bucket.names, bucket.extents, accumulate(bucket.sizes, initial=0), strict=False):
        ddp_bucket, first = places[name]
        run = Run(number, start, ddp_bucket, first + extent.start, len(extent))
        last = runs[-1] if runs else None
        if last and (last.ddp_bucket, last.ddp_start + last.length) == (run.ddp_bucket, run.ddp_start):
            runs[-1] = Run(number, last.start, ddp_bucket, last.ddp_start, last.length + run.length)
        elif run.length:
            runs.append(run)
    return runs


@dataclass(frozen=True, slots=True)
class HookProgram:
    """Emitted plan for one layout of DDP's buckets."""

    layout: Layout
    module: ModuleType
    source: str
    timeline: Timeline
    runs: tuple[Run, ...]
    lent: tuple[tuple[str, Run], ...]
    """Emitted lines that write an average directly into a DDP buffer: (name, range in the buffer)."""
    residuals: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, int], ...]
    first: int = 0
    """Index of the plan's first bucket in the gradient state."""

    @classmethod
    def made(cls, layout: Layout, graph: GraphModule, compiler: Compiler, plan: Plan, costs: CostTable) -> HookProgram:
        """Rewrite a graph of arriving buckets to follow a plan. Local: no communication.

        If the compiler has `skip_nonfinite`, the program restores residuals after a non-finite gradient.
        """
        final, runs = compiler.rewrite(graph, plan, costs), runs_of(plan, layout)
        lent = _return_means(final, [_only(runs, number, bucket) for number, bucket in enumerate(plan.buckets)])
        final = annotate_costs(final, costs, compiler.cluster)
        timeline = compiler.predicted(final, costs)
        source = emit(final, title="The buckets of one backward pass, averaged")
        module = load(source, final, compat.cache_directory() / "steps")
        trace_program(plan, source, timeline, lambda: {"final": final})
        residuals, states = (tuple(slots_of(final, kind)) for kind in (InputKind.RESIDUAL, InputKind.COMPRESSOR_STATE))
        return cls(layout, module, source, timeline, tuple(runs), lent, residuals, states)

    def arguments(self, state: GradientState) -> Sequence[Any]:
        residuals = [state.residuals.of(self.first + k, slot) for k, slot in self.residuals]
        states = [state.compressor_states.of(self.first + k, slot) for k, slot in self.states]
        return arguments_of({InputKind.RESIDUAL: residuals, InputKind.COMPRESSOR_STATE: states})

    def lend(self, number: int, buffer: Tensor, runtime: Runtime) -> None:
        for name, run in self.lent:
            if run.ddp_bucket == number:
                runtime.buffers.lend(name, buffer[run.ddp_start : run.ddp_start + run.length])

    def hand_back(self, means: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for run in self.runs:
            there = buffers[run.ddp_bucket][run.ddp_start : run.ddp_start + run.length]
            mean = means[run.bucket][run.start : run.start + run.length]
            if there.data_ptr() != mean.data_ptr():
                there.copy_(mean)


def slots_of(final: GraphModule, kind: InputKind) -> list[tuple[int, int]]:
    """Return (bucket, slot) of each input of this kind, in input order."""
    sources = [info(node).source for node in final.graph.find_nodes(op="placeholder")]
    return [(source.index, source.slot) for source in sources if source is not None and source.kind is kind]


def _only(runs: Sequence[Run], number: int, bucket: Bucket) -> Run | None:
    mine = [run for run in runs if run.bucket == number]
    return mine[0] if len(mine) == 1 and mine[0].length == bucket.elements else None


def _return_means(gm: GraphModule, places: Sequence[Run | None]) -> tuple[tuple[str, Run], ...]:
    """Make the graph return each bucket's flat average, also in a skipped step.

    A bucket that is contiguous in a DDP buffer is sent from that buffer. Return the decompress lines that may write the
    average into the buffer: no roll back reads the bucket afterwards.
    """
    means: dict[int, Node] = {}
    for node in gm.graph.nodes:
        number = info(node).bucket
        if node.target is torch.ops.aten.split_with_sizes.default and number is not None:
            means[number] = node.all_input_nodes[0]
    for number, pack in list(buckets(gm)):
        place = places[number]
        if place is not None and pack.meta["val"].dtype is _arrive(gm, place).meta["val"][0].dtype:
            taken = _taken_in_place(gm, pack, place)
            means[number] = taken if means[number] is pack else means[number]
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    output.args = ((None, tuple(means[number] for number in range(len(places))), *returned[2:]),)
    for node in reversed(list(gm.graph.nodes)):
        if info(node).role in (Role.UNPACK, Role.UPDATE, Role.PART, Role.GRADIENT) and not node.users:
            gm.graph.erase_node(node)
    kept = {info(node).bucket for node in gm.graph.nodes if info(node).role is Role.ROLL_BACK}
    return tuple(
        (mean.name, place)
        for number, mean in means.items()
        if (place := places[number]) and number not in kept and info(mean).role is Role.DECOMPRESS
    )


def _arrive(gm: GraphModule, place: Run) -> Node:
    return next(node for node in gm.graph.nodes if node.target is ARRIVE and node.args[0] == place.ddp_bucket)


def _taken_in_place(gm: GraphModule, pack: Node, place: Run) -> Node:
    """Replace a packed bucket by a view of DDP's buffer."""
    arrive = _arrive(gm, place)
    with gm.graph.inserting_before(pack):
        label, flat = NodeInfo(Role.COMPUTE), arrive.meta["val"][0]
        whole = call(gm.graph, operator.getitem, (arrive, 0), label, name=f"{arrive.name}_flat", value=flat)
        arguments = (whole, place.ddp_start, place.ddp_start + place.length, pack.args[1])
        name = f"bucket_{place.bucket}"
        taken = call(gm.graph, IN_PLACE, arguments, info(pack), name=name, value=pack.meta["val"])
    pack.replace_all_uses_with(taken)
    gm.graph.erase_node(pack)
    return taken
