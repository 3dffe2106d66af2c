"""Tiny hand-built graphs: a linear layer's training step, piece by piece, as capture would label it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.graph.edit import call
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, set_info, update_info
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

aten = torch.ops.aten

TWO = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(25.0, 0.125))
TWO_BY_TWO = Cluster(2, 2, intra=Link(5.0, 5.0), inter=Link(25.0, 0.125))
COSTS = CostTable(roofline=Roofline(gflops=10.0, gb_per_s=10.0, launch_us=2.0), pack_gb_per_s=5.0, copy_gb_per_s=8.0)


class Step:
    """Builds a labelled graph line by line."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.mode, _ = compat.fake_mode()
        self.graph, self.dtype = Graph(), dtype

    def input(self, name: str, shape: tuple[int, ...], source: Source) -> Node:
        node = self.graph.placeholder(name.replace(".", "_"))
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=self.dtype)
        return set_info(node, NodeInfo(Role.INPUT, parameter=source.name or None, source=source))

    def parameter(self, name: str, *shape: int) -> Node:
        return self.input(name, shape, Source(InputKind.PARAMETER, name))

    def buffer(self, name: str, *shape: int) -> Node:
        """One that all ranks take from rank 0."""
        return update_info(self.input(name, shape, Source(InputKind.BUFFER, name)), leaves_early=True)

    def batch(self, *shape: int) -> Node:
        return self.input("x", shape, Source(InputKind.BATCH))

    def do(self, target: Any, *args: Any, role: Role = Role.COMPUTE, name: str | None = None) -> Node:
        return call(self.graph, target, args, NodeInfo(role), name=name or _short(target))

    def gradient(self, parameter: str, target: Any, *args: Any) -> Node:
        return call(self.graph, target, args, NodeInfo(Role.GRADIENT, parameter), name=_short(target))

    def update(self, parameter: str, target: Any, *args: Any) -> Node:
        return call(self.graph, target, args, NodeInfo(Role.UPDATE, parameter), name=_short(target))

    def returning(self, loss: Node) -> GraphModule:
        set_info(self.graph.output((loss, ())), NodeInfo(Role.OUTPUT))
        module = GraphModule(torch.nn.Module(), self.graph)
        module.graph.lint()
        return module


def _short(target: Any) -> str:
    """An operator's bare name, for the node that calls it."""
    return target._schema.name.partition("::")[2]


def linear_step(*, buffer: bool = False, clip: bool = False, dtype: torch.dtype = torch.float32) -> GraphModule:
    """out = x Wᵀ + b, loss = mean(out²); plain SGD. The bias's gradient is ready first."""
    step = Step(dtype)
    weight, bias = step.parameter("fc.weight", 4, 2), step.parameter("fc.bias", 4)
    mean = step.buffer("running_mean", 4) if buffer else None
    x = step.batch(3, 2)
    turned = step.do(aten.t.default, weight)
    out = step.do(aten.addmm.default, bias, x, turned)
    if mean is not None:
        step.do(aten.copy_.default, mean, step.do(aten.mean.dim, out, [0]))
    loss = step.do(aten.mean.default, step.do(aten.mul.Tensor, out, out))
    back = step.do(aten.mul.Tensor, out, 2 / 12)
    bias_gradient = step.gradient("fc.bias", aten.sum.dim_IntList, back, [0])
    weight_gradient = step.gradient("fc.weight", aten.mm.default, step.do(aten.t.default, back), x)
    gradients = [weight_gradient, bias_gradient]
    if clip:
        norms = [step.do(aten.linalg_vector_norm.default, g, role=Role.CLIP) for g in gradients]
        total = step.do(aten.add.Tensor, *norms, role=Role.CLIP)
        factor = step.do(aten.reciprocal.default, total, role=Role.CLIP)
        gradients = [step.do(aten.mul.Tensor, g, factor, role=Role.CLIP) for g in gradients]
    step.update("fc.weight", aten.sub_.Tensor, weight, gradients[0])
    step.update("fc.bias", aten.sub_.Tensor, bias, gradients[1])
    return step.returning(loss)


def one_bucket(strategy: str) -> Plan:
    """Bias and weight of `linear_step` together, in ready order."""
    return Plan((Bucket(("fc.bias", "fc.weight"), (4, 8), Strategy.parse(strategy)),))


def two_buckets(first: str, second: str) -> Plan:
    """The bias alone, then the weight."""
    return Plan(
        (
            Bucket(("fc.bias",), (4,), Strategy.parse(first)),
            Bucket(("fc.weight",), (8,), Strategy.parse(second)),
        )
    )


def node_named(gm: GraphModule, name: str) -> Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def part(gm: GraphModule, *roles: Role) -> str:
    """Names of the nodes with these roles, in order: enough to see an order."""
    names = [n.name for n in gm.graph.nodes if n.meta["fxcomp"].role in roles and n.target is not operator.getitem]
    return " ".join(names)
