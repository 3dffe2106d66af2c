"""Load emitted source as a module, save it for tracebacks, and compile its regions with Inductor.

A compiled region computes the same values and draws the same random numbers as the region's function.
"""

from __future__ import annotations

import hashlib
import linecache
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn, cast

import torch
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.codegen.compiled_regions import CompiledRegions
from fxcomp.errors import CaptureFailed
from fxcomp.graph.regions import Region, regions


def tensors_outside(gm: GraphModule, region: Region) -> dict[Node, torch.Tensor]:
    """Return the graph's constant tensors that a region uses."""
    attributes = dict.fromkeys(n for node in region.nodes for n in node.all_input_nodes if n.op == "get_attr")
    found = {node: getattr(gm, str(node.target)) for node in attributes}
    return {node: value for node, value in found.items() if isinstance(value, torch.Tensor)}


def region_module(gm: GraphModule, region: Region) -> GraphModule:
    """Copy a region into its own graph; outside tensors become its last inputs.

    If outside tensors were attributes, Inductor would treat small tensors as numbers and drop writes to them.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    outside = tensors_outside(gm, region)
    for node in (*region.inputs, *outside):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    others = dict.fromkeys(n for node in region.nodes for n in node.all_input_nodes if n.op == "get_attr")
    for node in (*(n for n in others if n not in outside), *region.nodes):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[node] for node in region.outputs))
    return GraphModule(gm, graph, class_name=region.name)


def compile_with_inductor(
    gm: GraphModule, region: Region, plain: Callable[..., Any], known: CompiledRegions | None = None
) -> Callable[..., Any]:
    """Compile a region, or return its eager function `plain`.

    `plain` is returned for regions without work, with unused checks (Inductor drops them), or with random draws that
    Inductor would change.
    Random fills of new tensors, which Inductor would reorder, and reads of list inputs run before the compiled code.

    Compiled code assumes the captured dtypes and devices of inputs, but some operators return another dtype than their
    fake. The first call selects `plain` if a dtype or device differs.
    """
    if any(map(compat.draws_by_seed, region.nodes)):
        plain = _refuse_to_draw
    draws = [node for node in region.nodes if compat.draws(node)]
    fills = [node for node in draws if _fills_fresh_memory(node)]
    if (fills and len(fills) < len(draws)) or any(map(_fills_out_of_order, draws)):
        return plain
    taken = [each for each in region.nodes if each.target is operator.getitem and each.args[0] in region.inputs]
    inner = _without(region, fills, taken)
    outside = tensors_outside(gm, inner)
    fakes = [node.meta["val"] for node in (*inner.inputs, *outside)]
    only_check = any(not node.users and compat.checks_values(node) for node in inner.nodes)
    if not inner.nodes or compat.unbound_symbols(fakes) or only_check:
        return plain
    module = region_module(gm, inner)
    known = CompiledRegions() if known is None else known
    compiled = known.of(module, fakes, keeps_order=len(draws) - len(fills) > 1)
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
        results = compiled(*_given(inputs), *map(_filled, fills), *outside.values())
        return results[0] if len(region.outputs) == 1 else results

    def _given(inputs: Sequence[Any]) -> list[Any]:
        return [*(inputs[number] for number in wanted), *(inputs[number][item] for number, item in items)]

    return compiled_region


def _refuse_to_draw(*_: Any) -> NoReturn:
    raise CaptureFailed(
        "part of the backward pass needs random numbers that only Inductor's code makes, and cannot be compiled.\n"
        "  Set torch._inductor.config.fallback_random = True, which lets torch draw them."
    )


def _is_as_captured(given: Any, node: Node) -> bool:
    fake = node.meta["val"]
    return not isinstance(fake, torch.Tensor) or (given.dtype, given.device) == (fake.dtype, fake.device)


def _fills_fresh_memory(node: Node) -> bool:
    """Return whether a random draw fills a new tensor of fixed size and has no other input."""
    place, value = node.args[0], node.meta["val"]
    is_fill = compat.is_operator(node.target) and compat.is_in_place(node.target)
    if not is_fill or not isinstance(place, Node) or place.target not in _EMPTY or len(place.users) > 1:
        return False
    return len(node.all_input_nodes) == 1 and not compat.has_symbols(value)


def _fills_out_of_order(node: Node) -> bool:
    """Return whether a draw fills a non-contiguous tensor of symbolic size, which Inductor would make contiguous."""
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
    gone = {*fills, *taken, *(place for node in fills for place in node.all_input_nodes)}
    nodes = tuple(node for node in region.nodes if node not in gone)
    used = {node for each in nodes for node in each.all_input_nodes}
    tells = set(region.inputs) - {node for each in region.nodes for node in each.all_input_nodes}
    inputs = [node for node in region.inputs if node in used or node in tells]
    return Region(region.name, nodes, (*inputs, *taken, *fills), region.outputs)


def load(source: str, gm: GraphModule, directory: Path) -> ModuleType:
    """Save the source in `directory` and run it as a module; `gm` supplies the graph's constants.

    The file name is a digest of the source, so ranks of one host may write it concurrently. If the directory is not
    writable, the source stays in memory.
    """
    name = f"step_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = directory / f"{name}.py"
    try:
        compat.write_atomically(path, source)
    except OSError:
        lines = source.splitlines(keepends=True)
        linecache.cache[str(path)] = (len(source), None, lines, str(path))
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__dict__.update({n.name: getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"})
    exec(compile(source, str(path), "exec"), module.__dict__)
    module.__dict__["aten"] = compat.direct_aten  # the same operators, 1 µs faster each
    return module


def compile_regions(module: ModuleType, gm: GraphModule, known: CompiledRegions) -> None:
    """Compile forward and backward regions with Inductor; in-place updates stay eager."""
    by_name = {region.name: region for region in regions(gm)}

    def compiled(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        if name not in by_name or by_name[name].updates:
            return run
        return compile_with_inductor(gm, by_name[name], run, known)

    replace_regions(module, compiled)


Replacement = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Function that maps a region's name and function to a new function."""


def replace_regions(module: ModuleType, replacement: Replacement) -> None:
    for name, value in list(module.__dict__.items()):
        if callable(value) and name.startswith(("region_", "update_")):
            module.__dict__[name] = replacement(name, value)


def rebound(module: ModuleType, replacement: Replacement) -> Any:
    """Return the step with replaced regions; the module is unchanged."""
    other = _copy(module)
    replace_regions(other, replacement)
    return _step_of(module, other)


def observed(module: ModuleType, *, rule: Replacement, update: Replacement) -> Any:
    """Return the step with wrapped optimizer rules and update regions."""
    other = _copy(module)
    for name, value in module.__dict__.items():
        if name.startswith("optimizer_step_"):
            other.__dict__[name] = rule(name, value)
        elif name.startswith("update_"):
            other.__dict__[name] = update(name, FunctionType(value.__code__, other.__dict__, name))
    return _step_of(module, other)


def _copy(module: ModuleType) -> ModuleType:
    other = ModuleType(module.__name__)
    other.__dict__.update(module.__dict__)
    return other


def _step_of(module: ModuleType, functions: ModuleType) -> Any:
    return FunctionType(module.step.__code__, functions.__dict__, "step")
