"""Read annotated FX graphs for the search: a workload before bucketing, tasks of a final graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from fxcomp.cost.timeline import Task
from fxcomp.graph.edit import gradients, is_collective, mean_of, nodes_on_host
from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import BROADCAST
from fxcomp.graph.regions import Region, cut
from fxcomp.plan.kinds import POOL, ElementType, Stream
from fxcomp.search.workload import Gradient, Workload


def graph_tasks(gm: GraphModule) -> tuple[Task, ...]:
    """Return one task per region of compute nodes, and one per other node with a cost.

    The main thread's tasks share a stream, in graph order. A task waits for the tasks that make its inputs; the pool's
    tasks also wait until the main thread requests them.
    """
    writer = _GraphTaskWriter(nodes_on_host(gm))
    for piece in cut(gm):
        if isinstance(piece, Region):
            writer.add_region(piece)
        else:
            writer.add_line(piece)
    return tuple(writer.tasks)


class _GraphTaskWriter:
    def __init__(self, on_host: Collection[Node]) -> None:
        self.on_host = on_host
        self.tasks: list[Task] = []
        self.made_by: dict[Node, tuple[str, ...]] = {}
        self.come_to: tuple[str, ...] = ()
        """The main thread's last task before the updates, which requests the pool's results."""
        self.updates = False

    def add_region(self, region: Region) -> None:
        self.updates |= region.updates
        duration_us = sum(info(each).cost_us or 0.0 for each in region.nodes)
        name = region.name.replace("_", " ")
        made = self._add(Task(name, Stream.COMPUTE, duration_us, self._waits_for(region.inputs)))
        self.made_by.update(dict.fromkeys(region.nodes, made))

    def add_line(self, node: Node) -> None:
        label = info(node)
        before = self._waits_for(node.all_input_nodes)
        if label.role is Role.EXCHANGE:
            made = self._add(Task(f"exchange {node.name}", Stream.COMPUTE, label.cost_us or 0.0, before))
        elif _blocks(node):
            made = self._add(Task(node.name, Stream.COMPUTE, 0.0, before))
        elif label.cost_us:
            assert label.stream is not None, f"{node.name} has no stream: assign_streams runs first"
            if label.starting_us:
                is_pools = node in self.on_host  # also for a payload that the pool forwards
                stream, load = (Stream.CPU, label.launcher_load) if is_pools else (Stream.COMPUTE, 0.0)
                before = (*before, *self._add(Task(f"start {node.name}", stream, label.starting_us, before, load)))
            made = self._add(Task(node.name, label.stream, label.cost_us, before, label.load, label.overlap_speed))
        else:
            made = before
        self.made_by[node] = made

    def _add(self, task: Task) -> tuple[str, ...]:
        if task.stream in (*POOL, Stream.H2D):
            task = replace(task, after=tuple(dict.fromkeys((*task.after, *self.come_to))))
        self.tasks.append(task)
        if task.stream is Stream.COMPUTE and not self.updates:
            self.come_to = (task.name,)
        return (task.name,)

    def _waits_for(self, sources: Sequence[Node]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for source in sources for name in self.made_by.get(source, ())))


def _blocks(node: Node) -> bool:
    """Return whether the main thread waits at this node for a collective whose result is copied to the host."""
    return info(node).role is Role.WAIT and any(info(user).stream is Stream.D2H for user in node.users)


def read_workload(gm: GraphModule, feed_us: float = 0.0) -> Workload:
    """Read sizes, ready times and update times, in ready order, from a graph with costs and without buckets.

    `feed_us` is the time before the first node, in µs.
    """
    ready: dict[Node, float] = {}
    clock = feed_us
    for node in gm.graph.nodes:
        if info(node).role in _BODY:
            clock += info(node).cost_us or 0.0
        ready[node] = clock
    broadcasts = [node for node in gm.graph.nodes if node.target is BROADCAST and is_collective(node)]
    updates = _by_parameter(gm, (Role.UPDATE,))
    return Workload(
        gradients=tuple(
            Gradient(
                name=name,
                shape=tuple(node.meta["val"].shape),
                ready_us=ready[node],
                update_us=updates.get(name, 0.0),
                element_type=ElementType.of(node.meta["val"].dtype, mean_of(node).dtype),
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


def read_momenta(workload: Workload, before: GraphModule, after: GraphModule) -> Workload:
    """Add the cost of exchanging momenta, from the graphs that exchange gradients (`before`) and momenta (`after`)."""
    moved_us = _by_parameter(after, (Role.UPDATE,))
    own, gradient = (_by_parameter(gm, (Role.COMPUTE, Role.GRADIENT)) for gm in (after, before))
    gradients = [
        replace(
            each,
            own_us=max(0.0, own.get(each.name, 0.0) - gradient.get(each.name, 0.0)),
            moved_us=moved_us.get(each.name, 0.0),
        )
        for each in workload.gradients
    ]
    return replace(workload, gradients=tuple(gradients))


_BODY = (Role.COMPUTE, Role.ARRIVE, Role.EXCHANGE, Role.GRADIENT)
"""Roles of nodes whose time counts as compute. Exchanges count because compute waits for them."""


def _by_parameter(gm: GraphModule, roles: Collection[Role]) -> dict[str | None, float]:
    found: dict[str | None, float] = {}
    for node in gm.graph.nodes:
        if info(node).role in roles:
            name = info(node).parameter
            found[name] = found.get(name, 0.0) + (info(node).cost_us or 0.0)
    return found


def _total(gm: GraphModule, role: Role) -> float:
    return sum(info(node).cost_us or 0.0 for node in gm.graph.nodes if info(node).role is role)
