"""Write the final graph as Python source that a person can read and run.

Compute regions become functions; the lines between them, one for each node, pack, compress, launch and wait:

    def step(rt, parameters, buffers, states, numbers, residuals, batch):
        ...
        pack_0 = rt.pack("pack_0", ("fc.weight",), (mm_1,), 1.0)
        payload_0 = rt.compress("payload_0", int8, pack_0, residual_0, (8,))
        all_gather_0 = rt.launch("all_gather_0", "all_gather", payload_0, 2, "world")

The graph is the truth: nothing is added here that is not a node, but the line `rt.before_update`, which stands where
parameters begin to change.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxcomp.codegen.regions import Region, cut
from fxcomp.compressors import Compressor, compressor_of
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.ops import ALL_GATHER, ALL_REDUCE, BROADCAST, D2H, PACK, PAD, REDUCE_SCATTER

WIDTH = 120

_KINDS = {ALL_REDUCE: "all_reduce", ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter", BROADCAST: "broadcast"}

_ARGUMENTS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.STATE: "states",
    InputKind.HYPER: "numbers",
    InputKind.RESIDUAL: "residuals",
    InputKind.BATCH: "batch",
}


def emit(gm: GraphModule, *, title: str = "One training step") -> str:
    """The source of a module with a function `step`; it runs with nothing but torch, fxcomp.compressors and a runtime."""
    pieces = cut(gm)
    compressors = _compressors(gm)
    parts = [_header(title, compressors)]
    parts += [_region_function(piece) for piece in pieces if isinstance(piece, Region)]
    parts.append(_step_function(gm, pieces, compressors))
    return "\n\n\n".join(parts) + "\n"


def _header(title: str, compressors: dict[str, Compressor]) -> str:
    lines = [f'"""{title}."""', ""]
    lines += ["import math", "import operator", "", "import torch"]
    if compressors:
        names = ", ".join(sorted({type(c).__name__ for c in compressors.values()}))
        lines += ["", f"from fxcomp.compressors import {names}"]
    lines += ["", "aten = torch.ops.aten"]
    lines += [f"{name} = {compressor!r}" for name, compressor in compressors.items()]
    return "\n".join(lines)


def _compressors(gm: GraphModule) -> dict[str, Compressor]:
    """Every compressor of the graph under a name of its own: int8, topk_2."""
    found: dict[str, Compressor] = {}
    for node in gm.graph.nodes:
        compressor = _compressor(node)
        if compressor is not None and compressor not in found.values():
            taken = sum(1 for other in found.values() if other.name == compressor.name)
            found[compressor.name + (f"_{taken + 1}" if taken else "")] = compressor
    return found


def _compressor(node: Node) -> Compressor | None:
    """The compressor that a compress or decompress node names, with the node's own parameters."""
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    if info(node).role not in (Role.COMPRESS, Role.DECOMPRESS):
        return None
    return compressor_of(node.target, node.args[3:])


# Regions


def _region_function(region: Region) -> str:
    inside = set(region.nodes)
    last_use: dict[Node, Node] = {}
    for node in region.nodes:
        for used in node.all_input_nodes:
            if used in inside and used not in region.outputs:
                last_use[used] = node
    lines: list[str] = []
    for node in region.nodes:
        dead = [used.name for used, user in last_use.items() if user is node]
        unused = not node.users
        left = "" if unused else f"{node.name} = "
        lines.append(left + _call(node) + (f"; del {', '.join(dead)}" if dead else ""))
    if region.outputs:
        lines.append("return " + _tuple(region.outputs, bare=True))
    head = _wrapped(f"def {region.name}(", [node.name for node in region.inputs], "):", indent="")
    return head + "\n" + "\n".join(f"    {line}" for line in lines)


_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
}


def _call(node: Node) -> str:
    """A node as an expression."""
    target, arguments = node.target, [_text(arg) for arg in node.args]
    if target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if target in _INFIX and len(arguments) == 2:
        return f"{arguments[0]} {_INFIX[target]} {arguments[1]}"
    if target is operator.neg:
        return f"-{arguments[0]}"
    arguments += [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    return f"{_function(target)}({', '.join(arguments)})"


def _function(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        prefix = "aten" if target.namespace == "aten" else f"torch.ops.{target.namespace}"
        packet, _, overload = target._schema.name.partition("::")[2], "", target._overloadname
        return f"{prefix}.{packet}.{overload}"
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)
    assert module in ("operator", "math", "torch"), f"cannot write a call of {module}.{target.__name__}"
    return f"{module}.{target.__name__}"


def _text(value: Any) -> str:
    """An argument as source."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, list | tuple):
        inner = ", ".join(_text(item) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    assert value is None or isinstance(
        value, bool | int | float | str | torch.dtype | torch.layout | torch.memory_format
    ), f"cannot write {value!r} as source"
    return repr(value)


# The step


def _step_function(gm: GraphModule, pieces: Sequence[Region | Node], compressors: dict[str, Compressor]) -> str:
    lines = _unpacked_inputs(gm)
    names = {compressor: name for name, compressor in compressors.items()}
    keep = {n for n in gm.graph.nodes if n.op == "placeholder"} | set(gm.graph.output_node().all_input_nodes)
    last_use = _last_uses(pieces)
    loss = gm.graph.output_node().args[0][0]  # type: ignore[index]
    announced = False
    for piece in pieces:
        if isinstance(piece, Region) and piece.name.startswith("update") and not announced:
            lines += _before_update(gm, loss)
            announced = True
        lines += [_region_call(piece)] if isinstance(piece, Region) else _line(piece, names)
        dead = [node.name for node, user in last_use.items() if user is piece and node not in keep]
        if dead:
            lines.append(_wrapped("del ", dead, "", indent="    "))
    lines.append(f"    return {_returned(gm)}")
    arguments = ", ".join(["rt", *_ARGUMENTS.values()])
    return f"def step({arguments}):\n" + "\n".join(lines)


def _unpacked_inputs(gm: GraphModule) -> list[str]:
    """A line for each kind of input: `(fc_weight, fc_bias) = parameters`."""
    by_kind: dict[InputKind, list[str]] = {kind: [] for kind in _ARGUMENTS}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = info(node).source
            assert source is not None, f"the input {node.name} has no source"
            by_kind[source.kind].append(node.name)
    lines: list[str] = []
    for kind, names in by_kind.items():
        if names:
            lines.append(_wrapped("(", names, f",) = {_ARGUMENTS[kind]}", indent="    "))
    return lines


def _before_update(gm: GraphModule, loss: Node) -> list[str]:
    """The line where parameters begin to change. Gradients that no bucket showed are shown here."""
    lines: list[str] = []
    local = [n for n in gm.graph.nodes if n.op == "call_function" and info(n).role is Role.GRADIENT]
    unseen = [n for n in local if not any(user.target is PACK for user in n.users)]
    if unseen:
        names = _text([str(info(n).parameter) for n in unseen])
        lines.append(f"    rt.see({names}, {_text(unseen)})")
    return [*lines, f"    rt.before_update({loss.name})"]


def _line(node: Node, compressors: dict[Compressor, str]) -> list[str]:
    """The line of a node between regions; none for the second result of a compressor, which changes in place."""
    quoted, arguments = f'"{node.name}"', [_text(arg) for arg in node.args]
    role = info(node).role
    if node.target is PACK:
        gradients: Any = node.args[0]
        parameters = tuple(str(info(g).parameter) for g in gradients) if info(node).bucket is not None else ()
        head = f"{node.name} = rt.pack({quoted}, "
        return [_wrapped(f"    {head}", [_text(parameters), _text(tuple(gradients)), arguments[1]], ")", indent="    ")]
    if node.target is PAD:
        return [f"    {node.name} = rt.pad({quoted}, {arguments[0]}, {arguments[1]})"]
    if role is Role.COLLECTIVE:
        ranks = _ranks(node)
        return [
            f'    {node.name} = rt.launch({quoted}, "{_KINDS[node.target]}", {arguments[0]}, {ranks}, {arguments[-1]!s})'  # type: ignore[index]
        ]
    if role is Role.WAIT:
        return [f"    {node.name} = rt.wait({arguments[0]})"]
    if role is Role.COPY:
        return [f"    {node.name} = rt.{'d2h' if node.target is D2H else 'h2d'}({arguments[0]})"]
    compressor = _compressor(node)
    if compressor is None:
        return []
    name, segments = compressors[compressor], _text(tuple(node.args[2]))  # type: ignore[arg-type]
    if role is Role.COMPRESS:
        payload = next(user for user in node.users if user.args[1] == 0).name
        return [f'    {payload} = rt.compress("{payload}", {name}, {arguments[0]}, {arguments[1]}, {segments})']
    return [f"    {node.name} = rt.decompress({quoted}, {name}, {arguments[0]}, {arguments[1]}, {segments})"]


def _ranks(node: Node) -> int:
    """How many ranks' parts a collective's result holds, or splits its input into."""
    return int(node.args[-2]) if node.target in (ALL_GATHER, REDUCE_SCATTER) else 1  # type: ignore[arg-type]


def _region_call(region: Region) -> str:
    left = [node.name for node in region.outputs]
    call = f"{region.name}("
    if left:
        joined = ", ".join(left)
        assigned = f"    {joined} = "
        if len(assigned) > WIDTH // 2:
            assigned = _wrapped("(", left, ") = ", indent="    ")
        return _wrapped(assigned + call, [node.name for node in region.inputs], ")", indent="    ", first="")
    return _wrapped(f"    {call}", [node.name for node in region.inputs], ")", indent="    ", first="")


def _last_uses(pieces: Sequence[Region | Node]) -> dict[Node, Region | Node]:
    """The piece behind which a value is needed no more."""
    last: dict[Node, Region | Node] = {}
    made: set[Node] = set()
    for piece in pieces:
        used = piece.inputs if isinstance(piece, Region) else piece.all_input_nodes
        for node in used:
            if node in made:
                last[node] = piece
        made.update(piece.outputs if isinstance(piece, Region) else ())
    return last


def _returned(gm: GraphModule) -> str:
    loss, aux = gm.graph.output_node().args[0][:2]  # type: ignore[index, misc]
    return f"{_text(loss)}, {_text(tuple(aux))}"


# Layout


def _tuple(nodes: Sequence[Node], *, bare: bool) -> str:
    text = ", ".join(node.name for node in nodes)
    return text if bare else f"({text},)"


def _wrapped(head: str, items: Sequence[str], tail: str, *, indent: str, first: str | None = None) -> str:
    """`head` items `tail` on one line if it fits, else the items on lines of their own, wrapped."""
    start = head if first is not None or head.startswith(" ") else indent + head
    joined = ", ".join(items)
    if len(start.splitlines()[-1]) + len(joined) + len(tail) <= WIDTH:
        return f"{start}{joined}{tail}"
    inner = indent + "    "
    body = wrap(joined, WIDTH - len(inner) - 1, break_long_words=False, break_on_hyphens=False)
    comma = "" if tail.startswith(",") or head.startswith("del") else ","
    if head.lstrip().startswith("del"):
        return f"{start}(\n" + "\n".join(inner + line for line in body) + f"\n{indent})"
    return f"{start}\n" + "\n".join(inner + line for line in body) + f"{comma}\n{indent}{tail}"


