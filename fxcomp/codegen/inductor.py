"""Compile a region with Inductor: one callable that does what the region's function does, and draws what it draws."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.graph.regions import Region


def region_module(gm: GraphModule, region: Region) -> GraphModule:
    """Copy a region into a graph of its own."""
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


def compile_with_inductor(gm: GraphModule, region: Region, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a whole region; `plain` computes the same, and stays for one without work, or whose draws would change.

    A random fill of fresh memory runs before the region, unchanged: Inductor would replace it by an operator that fills
    memory in another order. Other random operators keep their order inside. What a region takes from a line's list of
    tensors is taken before it, too.

    Compiled code takes its inputs' types from the capture, and does not look at what is given. Where an operator that
    is left as it is returns another type than its fake one (`native_layer_norm` of 16 bits with a weight of 32 does, on
    the CPU), it would read those bits as something else: `plain` stays there, too. The first call tells.
    """
    draws = [node for node in region.nodes if compat.draws(node)]
    fills = [node for node in draws if _fills_fresh_memory(node)]
    if (fills and len(fills) < len(draws)) or any(map(_fills_out_of_order, draws)):
        return plain
    taken = [node for node in region.nodes if _is_taken_from_a_list(node, region)]
    inner = _without(region, fills, taken)
    fakes = [node.meta["val"] for node in inner.inputs]
    if not inner.nodes or compat.unbound_symbols(fakes):
        return plain
    module = region_module(gm, inner)
    compiled = compat.standalone_compile(module, fakes, keeps_order=len(draws) - len(fills) > 1)
    place = {node: number for number, node in enumerate(region.inputs)}
    wanted = [place[node] for node in inner.inputs if node in place]
    items = [(place[cast("Node", node.args[0])], cast("int", node.args[1])) for node in taken]

    is_known, run = False, plain

    def compiled_region(*inputs: Any) -> Any:
        nonlocal is_known, run
        if not is_known:
            is_known, run = True, run_compiled if all(map(_is_as_captured, _given(inputs), inner.inputs)) else plain
        return run(*inputs)

    def run_compiled(*inputs: Any) -> Any:
        results = compiled(*_given(inputs), *map(_filled, fills))
        return results[0] if len(region.outputs) == 1 else results

    def _given(inputs: Sequence[Any]) -> list[Any]:
        return [*(inputs[number] for number in wanted), *(inputs[number][item] for number, item in items)]

    return compiled_region


def _is_as_captured(given: Any, node: Node) -> bool:
    fake = node.meta["val"]
    return not isinstance(fake, torch.Tensor) or (given.dtype, given.device) == (fake.dtype, fake.device)


def _is_taken_from_a_list(node: Node, region: Region) -> bool:
    return node.target is operator.getitem and node.args[0] in region.inputs


def _fills_fresh_memory(node: Node) -> bool:
    """Tell whether a draw depends on numbers in the graph and the generator alone."""
    place, value = node.args[0], node.meta["val"]
    is_fill = compat.is_operator(node.target) and compat.is_in_place(node.target)
    if not is_fill or not isinstance(place, Node) or place.target not in _EMPTY or len(place.users) > 1:
        return False
    return len(node.all_input_nodes) == 1 and not compat.has_symbols(value)


def _fills_out_of_order(node: Node) -> bool:
    """Tell a draw into memory of varying size that does not lie row by row: Inductor would make it do so."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or not compat.has_symbols(value):
        return False
    sizes, strides = (list(map(compat.size_hint, each)) for each in (value.shape, value.stride()))
    return not torch.empty_strided(sizes, strides, device="meta").is_contiguous()


_EMPTY = (torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


def _filled(node: Node) -> Any:
    value, target = node.meta["val"], cast("Any", node.target)
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return target(fresh, *node.args[1:], **node.kwargs)


def _without(region: Region, fills: Sequence[Node], taken: Sequence[Node]) -> Region:
    """Leave the fills, and what is taken from lists, out of a region; their results become inputs."""
    gone = {*fills, *taken, *(place for node in fills for place in node.all_input_nodes)}
    nodes = tuple(node for node in region.nodes if node not in gone)
    used = {node for each in nodes for node in each.all_input_nodes}
    tells = set(region.inputs) - {node for each in region.nodes for node in each.all_input_nodes}
    inputs = [node for node in region.inputs if node in used or node in tells]
    return Region(region.name, nodes, (*inputs, *taken, *fills), region.outputs)
