"""Read from an annotated graph what the search needs; the only file of the search that sees nodes."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxcomp.graph.edit import gradients, is_collective
from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import BROADCAST
from fxcomp.plan.element_type import ElementType
from fxcomp.search.workload import Gradient, Workload


def read_workload(gm: GraphModule, feed_us: float = 0.0) -> Workload:
    """Read sizes, ready times and update times, in ready order, from a graph with costs and without buckets.

    `feed_us` is what the step takes around its nodes; it counts before the first one.
    """
    ready: dict[Node, float] = {}
    clock = feed_us
    for node in gm.graph.nodes:
        if info(node).role in _BODY:
            clock += info(node).cost_us or 0.0
        ready[node] = clock
    broadcasts = [node for node in gm.graph.nodes if node.target is BROADCAST and is_collective(node)]
    updates: dict[str | None, float] = {}
    for node in gm.graph.nodes:
        if info(node).role is Role.UPDATE:
            name = info(node).parameter
            updates[name] = updates.get(name, 0.0) + (info(node).cost_us or 0.0)
    return Workload(
        gradients=tuple(
            Gradient(
                name=name,
                shape=tuple(node.meta["val"].shape),
                ready_us=ready[node],
                update_us=updates.get(name, 0.0),
                element_type=ElementType.of(node.meta["val"].dtype),
            )
            for name, node in gradients(gm).items()
        ),
        backward_us=clock,
        finish_us=_total(gm, Role.CLIP),
        clips=any(info(node).role is Role.CLIP for node in gm.graph.nodes),
        broadcast_bytes=sum(node.meta["val"].nbytes for node in broadcasts),
        broadcast_ready_us=max((ready[node] for node in broadcasts), default=0.0),
        buffers_us=_total(gm, Role.UNPACK),
    )


_BODY = (Role.COMPUTE, Role.ARRIVE, Role.EXCHANGE, Role.GRADIENT)
"""Compute; it stands still for an exchange."""


def _total(gm: GraphModule, role: Role) -> float:
    return sum(info(node).cost_us or 0.0 for node in gm.graph.nodes if info(node).role is role)
