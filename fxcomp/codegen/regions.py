"""Cut the final graph into compute regions and the lines between them.

A region is a run of plain operators: it becomes one function of the emitted source, and may be compiled by Inductor as
a whole. Everything asynchronous stays between regions: inside, Inductor would wait at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
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


def compile_with_inductor(gm: GraphModule, region: Region) -> Callable[..., Any] | None:
    """One callable for a whole region, which takes and returns what the region's function does and draws what it draws.

    What fills fresh memory with random numbers runs before the region, as it stands: Inductor would make another
    operator of it, which fills memory in another order. Other random operators keep their order inside. None for a
    region that has both: it stays as it is.
    """
    draws = [node for node in region.nodes if compat.is_random(node.target)]
    fills = [node for node in draws if _fills_fresh_memory(node)]
    if fills and len(fills) < len(draws):
        return None
    inner = _without(region, fills)
    module = region_module(gm, inner)
    fakes = [node.meta["val"] for node in inner.inputs]
    compiled = compat.standalone_compile(module, fakes, keeps_order=len(draws) - len(fills) > 1)
    wanted = [region.inputs.index(node) for node in inner.inputs if node not in fills]

    def run(*inputs: Any) -> Any:
        results = compiled(*(inputs[place] for place in wanted), *map(_filled, fills))
        return results[0] if len(region.outputs) == 1 else results

    return run


def _fills_fresh_memory(node: Node) -> bool:
    """Whether a draw's result follows from numbers in the graph and the generator alone."""
    place, value = node.args[0], node.meta["val"]
    is_fill = compat.is_operator(node.target) and compat.is_in_place(node.target)
    if not is_fill or not isinstance(place, Node) or place.target not in _EMPTY or len(place.users) > 1:
        return False
    return len(node.all_input_nodes) == 1 and not compat.has_symbols(value)


_EMPTY = (torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


def _filled(node: Node) -> Any:
    value, target = node.meta["val"], cast("Any", node.target)
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return target(fresh, *node.args[1:], **node.kwargs)


def _without(region: Region, fills: Sequence[Node]) -> Region:
    """The region with the results of its fills coming in."""
    gone = {*fills, *(place for node in fills for place in node.all_input_nodes)}
    nodes = [node for node in region.nodes if node not in gone]
    inputs = [node for node in _region(region.name, nodes).inputs if node not in gone]
    return Region(region.name, tuple(nodes), (*inputs, *fills), region.outputs)
