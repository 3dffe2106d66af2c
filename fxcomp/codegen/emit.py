"""Emit the final graph as readable, runnable Python source.

Compute regions become functions. Between them, each node is one line that packs, compresses, launches or waits:

    def step(rt, parameters, buffers, states, numbers, sums, ..., residuals, compressor_states, batch):
        ...
        pack_0 = rt.pack("pack_0", ("fc.weight",), (mm_1,), 1.0)
        payload_0 = rt.compress("payload_0", int8, pack_0, residual_0, (8,))
        all_gather_0 = rt.launch("all_gather_0", "all_gather", payload_0, 2, "world")

A step that waits for an external backward pass is a generator: it yields the index of the next bucket and receives the
bucket. `graph/lines.py` maps nodes to lines.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

import fxcomp.compressors
from fxcomp import compat
from fxcomp.codegen.expressions import WIDTH, text, wrapped
from fxcomp.codegen.region_source import OptimizerSteps, region_function
from fxcomp.compressors import Compressor
from fxcomp.errors import BadOption
from fxcomp.graph.aside import Crossing, crossings
from fxcomp.graph.edit import is_exchange, with_parts
from fxcomp.graph.info import ARGUMENTS, InputKind, Role, free_name, info
from fxcomp.graph.lines import line_of
from fxcomp.graph.ops import ARRIVE, PACK
from fxcomp.graph.regions import Region, cut
from fxcomp.graph.update_kinds import LISTED_ON_CPU

_Names = Mapping[Compressor, str]


def emit(gm: GraphModule, *, title: str = "One training step") -> str:
    """Return a module's source with a function `step`."""
    pieces = cut(gm)
    compressors = _compressors(gm)
    steps = OptimizerSteps(listed_elements(gm))
    regions = [region_function(piece, steps) for piece in pieces if isinstance(piece, Region)]
    parts = [_header(title, compressors), *steps.functions(), *regions, _step_function(gm, pieces, compressors)]
    return "\n\n\n".join(parts) + "\n"


def listed_elements(gm: GraphModule) -> float:
    """Return the maximum size of parameters updated by foreach operators, in elements; infinite on accelerators."""
    for node in gm.graph.find_nodes(op="placeholder"):
        source = info(node).source
        if source is not None and source.kind is InputKind.PARAMETER:
            return math.inf if compat.is_accelerator(node.meta["val"].device) else LISTED_ON_CPU
    return 0


def _header(title: str, compressors: _Names) -> str:
    lines = [f'"""{title}."""', ""]
    lines += ["import math", "import operator", "", "import torch"]
    if compressors:
        lines += ["", *_imports([type(compressor) for compressor in compressors])]
    lines += ["", "aten = torch.ops.aten"]
    lines += [f"{name} = {compressor!r}" for compressor, name in compressors.items()]
    return "\n".join(lines)


def _imports(kinds: Sequence[type[Compressor]]) -> list[str]:
    by_module: dict[str, set[str]] = {}
    for kind in kinds:
        module = "fxcomp.compressors" if getattr(fxcomp.compressors, kind.__name__, None) is kind else kind.__module__
        if "." in kind.__qualname__:
            raise BadOption(
                f"{module}.{kind.__qualname__} cannot be imported, as an emitted step must.\n"
                "  Define the compressor at the top of a module."
            )
        by_module.setdefault(module, set()).add(kind.__name__)
    return [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(by_module.items())]


def _compressors(gm: GraphModule) -> _Names:
    """Name each compressor, avoiding node names: int8, topk_2."""
    taken = {node.name for node in gm.graph.nodes}
    found: dict[Compressor, str] = {}
    lines = [(node, line) for node in gm.graph.nodes if (line := line_of(node)) is not None]
    for argument in (argument for node, line in lines for argument in line.arguments(node)):
        if isinstance(argument, Compressor) and argument not in found:
            stem = free_name(re.sub(r"\W", "_", argument.name))
            numbered = itertools.chain([stem], (f"{stem}_{k}" for k in itertools.count(2)))
            found[argument] = next(name for name in numbered if name not in taken)
            taken.add(found[argument])
    return found


# The step


def _step_function(gm: GraphModule, pieces: Sequence[Region | Node], compressors: _Names) -> str:
    outputs: Any = gm.graph.output_node().args[0]
    loss: Any = outputs[0]
    announced = loss is None  # a backward pass alone changes no parameters
    saved = _saved_inputs(gm) if announced else []
    lines = _unpacked_inputs(gm)
    if saved:
        lines.append(f"    {ARGUMENTS[InputKind.BATCH]}.clear()")
    undoing = [p for p in pieces if isinstance(p, Node) and (line := line_of(p)) is not None and line.is_undoing]
    dead_after = _dead_after(gm, pieces, undoing, saved)
    is_aside = False
    usual = [piece for piece in pieces if piece not in undoing]
    *before, end = crossings(gm, usual)
    for piece, crossing in zip(usual, before, strict=True):
        changes_parameters = piece.updates if isinstance(piece, Region) else info(piece).role is Role.COMMIT
        if changes_parameters and not announced:
            lines += _before_update(gm, loss)
            announced = True
        if isinstance(piece, Region):
            written = [_region_call(piece)]
        elif info(piece).role is Role.COMMIT:
            written = _commit(gm, piece, undoing, compressors)
        else:
            written = _line(piece, compressors)
        dead = dead_after.get(id(piece), [])
        if dead:
            many = len(dead) > 8
            written.append(wrapped("    del (", dead, ")", indent="    ") if many else f"    del {', '.join(dead)}")
        if written:
            lines += _crossed(crossing, is_aside=is_aside)
            lines += map(_indented, written) if crossing.is_aside else written
            is_aside = crossing.is_aside
    lines += _crossed(end, is_aside=is_aside)
    lines.append(f"    return {_returned(gm)}")
    arguments = ", ".join(["rt", *ARGUMENTS.values()])
    return f"def step({arguments}):\n" + "\n".join(lines)


def _crossed(crossing: Crossing, *, is_aside: bool) -> list[str]:
    """Return the line that switches or joins streams before a region or node; empty if none is needed."""
    values = ", ".join(node.name for node in crossing.values)
    if crossing.is_aside:
        return [f"    with rt.aside({values}):"] if crossing.waits or not is_aside else []
    return [f"    rt.join({values})"] if crossing.waits else []


def _indented(lines: str) -> str:
    return "\n".join(f"    {line}" for line in lines.split("\n"))


def _unpacked_inputs(gm: GraphModule) -> list[str]:
    """Return a line for each kind of input: `(fc_weight, fc_bias) = parameters`."""
    by_kind: dict[InputKind, list[str]] = {kind: [] for kind in ARGUMENTS}
    for node in gm.graph.find_nodes(op="placeholder"):
        source = info(node).source
        assert source is not None, f"the input {node.name} has no source"
        by_kind[source.kind].append(node.name)
    return [
        wrapped("    (", names, f",) = {ARGUMENTS[kind]}", indent="    ") for kind, names in by_kind.items() if names
    ]


def _saved_inputs(gm: GraphModule) -> list[Node]:
    """List the tensors saved by an external forward pass, to be freed after use."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [n for n in inputs if (source := info(n).source) is not None and source.kind is InputKind.BATCH]


def _before_update(gm: GraphModule, loss: Node) -> list[str]:
    """Return the lines to write before parameters change. They also check gradients outside of buckets."""
    lines: list[str] = []
    local = [n for n in gm.graph.nodes if n.op == "call_function" and info(n).role is Role.GRADIENT]
    unseen = [n for n in local if not any(user.target is PACK for part in with_parts(n) for user in part.users)]
    if unseen:
        names = text([str(info(n).parameter) for n in unseen])
        lines.append(f"    {text(unseen)} = rt.complete({names}, {text(unseen)})")
    return [*lines, f"    rt.before_update({loss.name})"]


def _commit(gm: GraphModule, node: Node, undoing: Sequence[Node], compressors: _Names) -> list[str]:
    """Return the lines of the branch for non-finite values, which undoes changes and returns."""
    values: Any = node.args[0]
    lines = [wrapped("    if not rt.all_finite((", [value.name for value in values], ",)):", indent="    ")]
    for each in undoing:
        lines += map(_indented, _line(each, compressors))
    return [*lines, f"        return {_returned(gm)}"]


def _line(node: Node, compressors: _Names) -> list[str]:
    """Return a node's line; empty if the node is part of another line's result."""
    line = line_of(node)
    if line is None:
        return []
    if node.target is ARRIVE:
        return [f"    {node.name} = yield {node.args[0]}"]
    result = line.result(node)
    head = f"    {result.name} = rt.{line.method}(" if result is not None else f"    rt.{line.method}("
    arguments = [text(argument, compressors) for argument in line.arguments(node)]
    if line.has_buffer and result is not None:
        arguments.insert(0, f'"{result.name}"')
    arguments += [f"{key}={text(value, compressors)}" for key, value in line.keywords(node).items()]
    if node.target is PACK or is_exchange(node):  # possibly hundreds of values
        return [wrapped(head, arguments, ")", indent="    ")]
    return [f"{head}{', '.join(arguments)})"]


def _region_call(region: Region) -> str:
    left = [node.name for node in region.outputs]
    assigned = f"    {', '.join(left)} = " if left else "    "
    if len(assigned) > WIDTH // 2:
        assigned = wrapped("    (", left, ") = ", indent="    ")
    return wrapped(f"{assigned}{region.name}(", [node.name for node in region.inputs], ")", indent="    ")


def _dead_after(
    gm: GraphModule, pieces: Sequence[Region | Node], undoing: Sequence[Node], saved: Sequence[Node]
) -> dict[int, list[str]]:
    """Map the id of a region or node to the names of values that nothing after it uses."""
    inputs = set(gm.graph.find_nodes(op="placeholder")) - set(saved)
    kept = {*inputs, *gm.graph.output_node().all_input_nodes, *undoing}
    last_user: dict[Node, Region | Node] = {}
    made: set[Node] = set(saved)
    for piece in pieces:
        used = piece.inputs if isinstance(piece, Region) else piece.all_input_nodes
        last_user.update((node, piece) for node in used if node in made)
        made.update(piece.outputs if isinstance(piece, Region) else [piece] if is_exchange(piece) else ())
    dead: dict[int, list[str]] = {}
    for node, user in last_user.items():
        if node not in kept:
            dead.setdefault(id(user), []).append(node.name)
    return dead


def _returned(gm: GraphModule) -> str:
    outputs: Any = gm.graph.output_node().args[0]
    loss, aux = outputs[:2]
    return f"{text(loss)}, {text(tuple(aux))}"
