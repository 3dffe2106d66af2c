"""Read the final graph as tasks: what the emitted step will do, in the order in which it does it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from fxcomp.cost.timeline import Task
from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import SAVE
from fxcomp.graph.regions import Region, cut
from fxcomp.plan.streams import Stream


def graph_tasks(gm: GraphModule) -> tuple[Task, ...]:
    """Make one task of the plain nodes between two lines, and one of every line with a cost.

    Main-thread tasks run in graph order by being on one stream; a task waits for the tasks whose values it takes.
    """
    tasks: list[Task] = []
    made_by: dict[Node, tuple[str, ...]] = {}
    saved: dict[int | None, str] = {}
    for node in cut(gm):
        if isinstance(node, Region):
            duration_us = sum(info(each).cost_us or 0.0 for each in node.nodes)
            name = node.name.replace("_", " ")
            tasks.append(Task(name, Stream.COMPUTE, duration_us, _waits_for(node.inputs, made_by)))
            made_by.update(dict.fromkeys(node.nodes, (name,)))
            continue
        label = info(node)
        before = _waits_for(node.all_input_nodes, made_by)
        if (
            label.role is Role.COMPRESS and label.stream is Stream.CPU and label.bucket in saved
        ):  # the main thread hands over what it has saved
            before = (*before, saved[label.bucket])
        if label.role is Role.EXCHANGE:  # compute stands still for it
            tasks.append(Task(f"exchange {node.name}", Stream.COMPUTE, label.cost_us or 0.0, before))
            made_by[node] = (tasks[-1].name,)
        elif _blocks(node):
            tasks.append(Task(node.name, Stream.COMPUTE, 0.0, before))
            made_by[node] = (node.name,)
        elif label.cost_us:
            assert label.stream is not None, f"{node.name} has no stream: assign_streams runs first"
            if label.starting_us:
                on_host = any(info(source).stream is Stream.CPU for source in node.all_input_nodes)
                stream, load = (Stream.CPU, label.launcher_load) if on_host else (Stream.COMPUTE, 0.0)
                tasks.append(Task(f"start {node.name}", stream, label.starting_us, before, load))
                before = (*before, tasks[-1].name)
            tasks.append(Task(node.name, label.stream, label.cost_us, before, label.load, label.overlap_speed))
            made_by[node] = (node.name,)
            if node.target is SAVE and label.stream is Stream.COMPUTE:
                saved[label.bucket] = node.name
        else:
            made_by[node] = before
    return tuple(tasks)


def _blocks(node: Node) -> bool:
    """Tell that the main thread waits here for a collective, although what follows runs elsewhere."""
    return info(node).role is Role.WAIT and any(info(user).stream is Stream.D2H for user in node.users)


def _waits_for(sources: Sequence[Node], made_by: dict[Node, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for source in sources for name in made_by.get(source, ())))
