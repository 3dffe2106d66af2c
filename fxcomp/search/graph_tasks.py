"""Read the final graph as tasks: what the emitted step will do, in the order in which it does it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from fxcomp.cost.timeline import Task
from fxcomp.graph.edit import nodes_on_host
from fxcomp.graph.info import Role, info
from fxcomp.graph.regions import Region, cut
from fxcomp.plan.streams import POOL, Stream


def graph_tasks(gm: GraphModule) -> tuple[Task, ...]:
    """Make one task of the plain nodes between two lines, and one of every line with a cost.

    Main-thread tasks run in graph order by being on one stream; a task waits for the tasks whose values it takes, and
    what the pool does, or has done, for the main thread to ask for it.
    """
    writer = _GraphTaskWriter(nodes_on_host(gm))
    for piece in cut(gm):
        if isinstance(piece, Region):
            writer.add_region(piece)
        else:
            writer.add_line(piece)
    return tuple(writer.tasks)


class _GraphTaskWriter:
    """Writes tasks, and tracks which make a node's value and how far the main thread has come."""

    def __init__(self, on_host: Collection[Node]) -> None:
        self.on_host = on_host
        self.tasks: list[Task] = []
        self.made_by: dict[Node, tuple[str, ...]] = {}
        self.come_to: tuple[str, ...] = ()
        """The main thread's last task. It asks for what the pool has made when nothing but updates is left."""
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
        if label.role is Role.EXCHANGE:  # compute stands still for it
            made = self._add(Task(f"exchange {node.name}", Stream.COMPUTE, label.cost_us or 0.0, before))
        elif _blocks(node):
            made = self._add(Task(node.name, Stream.COMPUTE, 0.0, before))
        elif label.cost_us:
            assert label.stream is not None, f"{node.name} has no stream: assign_streams runs first"
            if label.starting_us:
                is_pools = node in self.on_host  # a payload that the pool passes on, too
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
    """Return whether the main thread waits here for a collective, although what follows runs elsewhere."""
    return info(node).role is Role.WAIT and any(info(user).stream is Stream.D2H for user in node.users)
