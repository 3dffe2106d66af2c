"""Cut the final graph into compute regions and the lines between them.

A region is a run of plain operators: it becomes one function of the emitted source, and may be compiled by Inductor as
a whole. Everything asynchronous stays between regions: inside, Inductor would wait at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.graph.info import Role, info

PLAIN = (Role.COMPUTE, Role.GRADIENT, Role.UNPACK, Role.CLIP, Role.UPDATE)


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that run as one function, what they need, and what others need of them."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @property
    def updates(self) -> bool:
        """Whether it changes parameters."""
        return any(info(node).role in (Role.UPDATE, Role.CLIP, Role.UNPACK) for node in self.nodes)


def cut(gm: GraphModule) -> list[Region | Node]:
    """The graph's calls in order, with each run of plain nodes as one region."""
    pieces: list[Region | Node] = []
    counts = {"region": 0, "update": 0}
    for run in _runs(gm):
        if isinstance(run, Node):
            pieces.append(run)
            continue
        kind = "update" if any(info(n).role in (Role.UNPACK, Role.CLIP, Role.UPDATE) for n in run) else "region"
        pieces.append(_region(f"{kind}_{counts[kind]}", run))
        counts[kind] += 1
    return pieces


def _runs(gm: GraphModule) -> Iterator[list[Node] | Node]:
    """Runs end where a line stands, and where backward ends and updates begin."""
    run: list[Node] = []
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        plain = info(node).role in PLAIN
        if run and (not plain or _is_body(node) != _is_body(run[0])):
            yield run
            run = []
        if plain:
            run.append(node)
        else:
            yield node
    if run:
        yield run


def _is_body(node: Node) -> bool:
    return info(node).role in (Role.COMPUTE, Role.GRADIENT)


def _region(name: str, nodes: Sequence[Node]) -> Region:
    inside = set(nodes)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside and n.op != "get_attr")
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    return Region(name, tuple(nodes), tuple(inputs), tuple(outputs))


def region_module(gm: GraphModule, region: Region) -> GraphModule:
    """A region as a graph of its own."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in region.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    constants = dict.fromkeys(n for node in region.nodes for n in node.all_input_nodes if n.op == "get_attr")
    for node in (*constants, *region.nodes):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[node] for node in region.outputs))
    return GraphModule(gm, graph, class_name=region.name)


def compile_with_inductor(gm: GraphModule, region: Region) -> Callable[..., Any]:
    """One callable for a whole region. It takes and returns what the region's function does."""
    module = region_module(gm, region)
    compiled = compat.standalone_compile(module, [node.meta["val"] for node in region.inputs])
    if len(region.outputs) == 1:
        return lambda *inputs: compiled(*inputs)[0]
    return compiled
