"""Write the final graph as Python source that a person can read and run.

Compute regions become functions; the lines between them, one for each node, pack, compress, launch and wait:

    def step(rt, parameters, buffers, states, numbers, velocities, residuals, compressor_states, batch):
        ...
        pack_0 = rt.pack("pack_0", ("fc.weight",), (mm_1,), 1.0)
        payload_0 = rt.compress("payload_0", int8, pack_0, residual_0, (8,))
        all_gather_0 = rt.launch("all_gather_0", "all_gather", payload_0, 2, "world")

The graph is the truth: nothing is added here that is not a node, but the line `rt.before_update`, which stands where
parameters begin to change.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

import fxcomp.compressors
from fxcomp import compat
from fxcomp.compressors import BadCompressor, Compressor, compressor_of
from fxcomp.graph.edit import is_exchange
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.names import ARGUMENTS, free_name
from fxcomp.graph.ops import (
    ACCUMULATE,
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    D2H,
    KEEP,
    MASK_VELOCITY,
    PACK,
    PAD,
    REDUCE_SCATTER,
    ROLL_BACK,
    SAVE,
)
from fxcomp.graph.regions import Region, cut
from fxcomp.graph.work import is_sequence

WIDTH = 120

_KINDS = {ALL_REDUCE: "all_reduce", ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter", BROADCAST: "broadcast"}

_NOT_COMPRESSORS = (ROLL_BACK, torch.ops.aten.copy_.default)
"""What else a roll back does."""


def emit(gm: GraphModule, *, title: str = "One training step") -> str:
    """The source of a module with a function `step`; it needs torch, the compressors' modules and a runtime."""
    pieces = cut(gm)
    compressors = _compressors(gm)
    rules = _Rules()
    regions = [_region_function(piece, rules) for piece in pieces if isinstance(piece, Region)]
    parts = [_header(title, compressors), *rules.functions(), *regions, _step_function(gm, pieces, compressors)]
    return "\n\n\n".join(parts) + "\n"


def _header(title: str, compressors: dict[str, Compressor]) -> str:
    lines = [f'"""{title}."""', ""]
    lines += ["import math", "import operator", "", "import torch"]
    if compressors:
        lines += ["", *_imports([type(compressor) for compressor in compressors.values()])]
    lines += ["", "aten = torch.ops.aten"]
    lines += [f"{name} = {compressor!r}" for name, compressor in compressors.items()]
    return "\n".join(lines)


def _imports(kinds: Sequence[type[Compressor]]) -> list[str]:
    """A line for each module that compressors are imported from: ours, or a plug-in's."""
    by_module: dict[str, set[str]] = {}
    for kind in kinds:
        module = "fxcomp.compressors" if getattr(fxcomp.compressors, kind.__name__, None) is kind else kind.__module__
        if "." in kind.__qualname__:
            raise BadCompressor(
                f"{module}.{kind.__qualname__} cannot be imported, which an emitted step does.\n"
                "  Define the compressor at the top of a module."
            )
        by_module.setdefault(module, set()).add(kind.__name__)
    return [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(by_module.items())]


def _compressors(gm: GraphModule) -> dict[str, Compressor]:
    """Every compressor of the graph under a name of its own, which no node has: int8, topk_2."""
    taken = {node.name for node in gm.graph.nodes}
    found: dict[str, Compressor] = {}
    for node in gm.graph.nodes:
        compressor = _compressor(node)
        if compressor is not None and compressor not in found.values():
            stem = free_name(re.sub(r"\W", "_", compressor.name))
            numbered = itertools.chain([stem], (f"{stem}_{k}" for k in itertools.count(2)))
            found[next(name for name in numbered if name not in taken and name not in found)] = compressor
    return found


def _compressor(node: Node) -> Compressor | None:
    """The compressor that a propose, compress or decompress node names, with the node's own parameters."""
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    roles = (Role.PROPOSE, Role.COMPRESS, Role.DECOMPRESS, Role.ROLL_BACK)
    if info(node).role not in roles or node.target in _NOT_COMPRESSORS:
        return None
    target: Any = node.target
    arguments: Any = node.args
    return compressor_of(target, arguments[3:])


# Regions


class _Rules:
    """The optimizer's rule, written once: most parameters are updated by the same lines, with other tensors."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], str] = {}

    def call(self, group: Sequence[Node]) -> str:
        """A call that does what these nodes do."""
        inputs = list(dict.fromkeys(n for node in group for n in node.all_input_nodes if n not in group))
        names = {node: _role_name(node) for node in inputs}
        taken = set(names.values())
        for node in group:
            stem = free_name(str(node.name).rstrip("0123456789").rstrip("_") or node.name)
            numbered = (stem, *(f"{stem}_{k}" for k in range(len(group))))
            names[node] = next(name for name in numbered if name not in taken)
            taken.add(names[node])
        text = ("(" + ", ".join(names[n] for n in inputs) + "):", *_statements(group, (), names))
        name = self._names.setdefault(text, f"optimizer_step_{len(self._names)}")
        return f"{name}({', '.join(node.name for node in inputs)})"

    def functions(self) -> list[str]:
        return ["\n    ".join((f"def {name}{text[0]}", *text[1:])) for text, name in self._names.items()]


def _role_name(node: Node) -> str:
    """What an input is to the rule: a parameter, a gradient, a state by its key, a live number."""
    source = info(node).source
    if source is None:
        return "gradient"
    return "parameter" if source.kind is InputKind.PARAMETER else source.key


def _region_function(region: Region, rules: _Rules) -> str:
    lines = _statements(region.nodes, region.outputs, {}, rules)
    if region.outputs:
        lines.append("return " + ", ".join(node.name for node in region.outputs))
    head = _wrapped(f"def {region.name}(", [node.name for node in region.inputs], "):", indent="")
    return head + "\n" + "\n".join(f"    {line}" for line in lines)


def _statements(
    nodes: Sequence[Node], keep: Sequence[Node], names: Mapping[Node, str], rules: _Rules | None = None
) -> list[str]:
    """A statement a node, or one for all that update a parameter; values go as soon as nobody needs them."""
    groups = _update_groups(nodes) if rules else [[node] for node in nodes]
    place = {node: k for k, group in enumerate(groups) for node in group}
    kept = set(keep)
    last_use: dict[Node, int] = {}
    for k, group in enumerate(groups):
        for used in (used for node in group for used in node.all_input_nodes):
            if place.get(used, k) != k and used not in kept:
                last_use[used] = k
    dead_after: dict[int, list[str]] = {}
    for used, k in last_use.items():
        dead_after.setdefault(k, []).append(names.get(used, used.name))
    lines: list[str] = []
    for k, group in enumerate(groups):
        node = group[-1]
        dead = dead_after.get(k)
        if rules is not None and info(node).role is Role.UPDATE and not node.users:
            line = rules.call(group)
        else:
            line = (f"{names.get(node, node.name)} = " if node.users else "") + _call(node, names)
        lines.append(line + (f"; del {', '.join(dead)}" if dead else ""))
    return lines


def _update_groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes one by one, but those that update the same parameter together."""
    groups: list[list[Node]] = []
    for node in nodes:
        last = info(groups[-1][-1]) if groups else None
        same = last is not None and last.role is Role.UPDATE and last.parameter == info(node).parameter
        if same and info(node).role is Role.UPDATE:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",  # pyright: ignore[reportUnknownMemberType]  # untyped in typeshed
    operator.floordiv: "//",  # pyright: ignore[reportUnknownMemberType]  # untyped in typeshed
    operator.mod: "%",
    operator.pow: "**",  # pyright: ignore[reportUnknownMemberType]  # untyped in typeshed
}


def _call(node: Node, names: Mapping[Node, str]) -> str:
    """A node as an expression."""
    target, arguments = node.target, [_text(arg, names) for arg in node.args]
    if target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if target in _INFIX and len(arguments) == 2:
        return f"{arguments[0]} {_INFIX[target]} {arguments[1]}"
    if target is operator.neg:
        return f"-{arguments[0]}"
    arguments += [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
    return f"{_function(target)}({', '.join(arguments)})"


def _function(target: Any) -> str:
    if compat.is_operator(target):
        return str(target) if target.namespace == "aten" else f"torch.ops.{target}"
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)
    assert module in ("operator", "math", "torch"), f"cannot write a call of {module}.{target.__name__}"
    return f"{module}.{target.__name__}"


def _text(value: Any, names: Mapping[Node, str] | None = None) -> str:
    """An argument as source."""
    if isinstance(value, Node):
        return (names or {}).get(value, value.name)
    if is_sequence(value):
        inner = ", ".join(_text(item, names) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, slice):
        bounds = cast("slice[Any, Any, Any]", value)
        return f"slice({', '.join(_text(part, names) for part in (bounds.start, bounds.stop, bounds.step))})"
    for kind in (bool, int, float):  # or a class of their values, whose own text may be no source
        if isinstance(value, kind):
            return repr(kind(value))
    if isinstance(value, complex):
        return f"complex({_text(value.real)}, {_text(value.imag)})"
    plain = torch.dtype | torch.layout | torch.memory_format
    assert value is None or isinstance(value, plain), f"cannot write {value!r} as source"
    return repr(value)


# The step


def _step_function(gm: GraphModule, pieces: Sequence[Region | Node], compressors: dict[str, Compressor]) -> str:
    lines = _unpacked_inputs(gm)
    names = {compressor: name for name, compressor in compressors.items()}
    keep = {n for n in gm.graph.nodes if n.op == "placeholder"} | set(gm.graph.output_node().all_input_nodes)
    outputs: Any = gm.graph.output_node().args[0]
    loss: Any = outputs[0]
    announced = loss is None  # a backward pass alone: it changes no parameters
    roll_back = [piece for piece in pieces if isinstance(piece, Node) and info(piece).role is Role.ROLL_BACK]
    kept = {*keep, *roll_back}
    dead_behind: dict[int, list[str]] = {}
    for node, user in _last_uses(pieces).items():
        if node not in kept:
            dead_behind.setdefault(id(user), []).append(node.name)
    for piece in pieces:
        if _changes_parameters(piece) and not announced:
            lines += _before_update(gm, loss)
            announced = True
        if isinstance(piece, Region):
            lines.append(_region_call(piece))
        elif info(piece).role is Role.COMMIT:
            lines += _commit(gm, piece, roll_back, names)
        elif piece not in roll_back:
            lines += _line(piece, names)
        dead = dead_behind.get(id(piece), [])
        if dead:
            many = len(dead) > 8
            lines.append(_wrapped("    del (", dead, ")", indent="    ") if many else f"    del {', '.join(dead)}")
    lines.append(f"    return {_returned(gm)}")
    arguments = ", ".join(["rt", *ARGUMENTS.values()])
    return f"def step({arguments}):\n" + "\n".join(lines)


def _unpacked_inputs(gm: GraphModule) -> list[str]:
    """A line for each kind of input: `(fc_weight, fc_bias) = parameters`."""
    by_kind: dict[InputKind, list[str]] = {kind: [] for kind in ARGUMENTS}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = info(node).source
            assert source is not None, f"the input {node.name} has no source"
            by_kind[source.kind].append(node.name)
    lines: list[str] = []
    for kind, names in by_kind.items():
        if names:
            lines.append(_wrapped("    (", names, f",) = {ARGUMENTS[kind]}", indent="    "))
    return lines


def _before_update(gm: GraphModule, loss: Node) -> list[str]:
    """The line where parameters begin to change. Gradients that no bucket carries are shown and completed here."""
    lines: list[str] = []
    local = [n for n in gm.graph.nodes if n.op == "call_function" and info(n).role is Role.GRADIENT]
    unseen = [n for n in local if not any(user.target is PACK for user in n.users)]
    if unseen:
        names = _text([str(info(n).parameter) for n in unseen])
        lines.append(f"    {_text(unseen)} = rt.complete({names}, {_text(unseen)})")
    return [*lines, f"    rt.before_update({loss.name})"]


def _changes_parameters(piece: Region | Node) -> bool:
    """Whether parameters change here, or it is decided that they may."""
    if isinstance(piece, Region):
        return piece.updates
    return info(piece).role is Role.COMMIT


def _commit(gm: GraphModule, node: Node, roll_back: Sequence[Node], compressors: dict[Compressor, str]) -> list[str]:
    """Where something is not finite: put back what has changed, and return."""
    values: Any = node.args[0]
    lines = [_wrapped("    if not rt.all_finite((", [value.name for value in values], ",)):", indent="    ")]
    for each in roll_back:
        lines += ["\n".join(f"    {part}" for part in line.split("\n")) for line in _line(each, compressors)]
    return [*lines, f"        return {_returned(gm)}"]


def _line(node: Node, compressors: dict[Compressor, str]) -> list[str]:
    """The line of a node between regions; none for what a compressor changes in place."""
    quoted, arguments = f'"{node.name}"', [_text(arg) for arg in node.args]
    role = info(node).role
    if node.target is PACK:
        gradients: Any = node.args[0]
        parameters = tuple(str(info(g).parameter) for g in gradients) if info(node).bucket is not None else ()
        head = f"    {node.name} = rt.pack("
        return [_wrapped(head, [quoted, _text(parameters), _text(tuple(gradients)), arguments[1]], ")", indent="    ")]
    if node.target is SAVE:
        return [f"    {node.name} = rt.save({quoted}, {arguments[0]})"]
    if node.target is ROLL_BACK:
        residual = _replaced(node.args[0])
        return [f"    rt.roll_back({residual}, {arguments[1]}, {arguments[2]})"]
    if node.target is torch.ops.aten.copy_.default:
        return [f"    rt.restore({arguments[0]}, {arguments[1]})"]
    if node.target is PAD:
        return [f"    {node.name} = rt.pad({quoted}, {arguments[0]}, {arguments[1]})"]
    if role is Role.EXCHANGE:
        head = f"    {node.name} = " if node.users else "    "
        return [_wrapped(f"{head}rt.exchange(", [_function(node.target), *arguments], ")", indent="    ")]
    if role is Role.COLLECTIVE:
        target: Any = node.target
        kind, ranks = _KINDS[target], _ranks(node)
        how = ', "max"' if node.target is ALL_REDUCE and node.args[1] == "max" else ""
        return [f'    {node.name} = rt.launch({quoted}, "{kind}", {arguments[0]}, {ranks}, {arguments[-1]}{how})']
    if role is Role.WAIT:
        return [f"    {node.name} = rt.wait({arguments[0]})"]
    if role is Role.COPY:
        copy = "d2h" if node.target is D2H else "h2d"
        return [f"    {node.name} = rt.{copy}({quoted}, {arguments[0]})"]
    if node.target is ACCUMULATE:
        return [f"    {node.name} = rt.accumulate({', '.join(arguments)})"]
    if node.target is MASK_VELOCITY:
        return [f"    rt.mask_velocity({arguments[1]}, {arguments[0]}, {_replaced(node.args[2])})"]
    if node.target is KEEP:  # a velocity was replaced in place
        return [] if role is Role.VELOCITY else [f"    rt.keep({arguments[0]}, {arguments[1]})"]
    compressor = _compressor(node)
    return [] if compressor is None else [_compressor_line(node, compressors[compressor])]


def _compressor_line(node: Node, compressor: str) -> str:
    role = info(node).role
    result = next(user for user in node.users if user.args[1] == 0) if role is Role.COMPRESS else node
    value, second, sizes = node.args[:3]
    assert is_sequence(sizes), "a compressor's third argument are its segments"
    arguments = [f'"{result.name}"', compressor, _text(value), _text(second), _text(tuple(sizes))]
    arguments += [f"{key}={_text(_in_place(value))}" for key, value in node.kwargs.items()]
    method = role.value if role in (Role.PROPOSE, Role.COMPRESS) else "decompress"
    return f"    {result.name} = rt.{method}({', '.join(arguments)})"


def _in_place(value: Any) -> Any:
    """What emitted code has for a compressor's new state: its input, changed."""
    if isinstance(value, Node) and value.target is operator.getitem and info(value).role is Role.COMPRESS:
        compress = value.args[0]
        assert isinstance(compress, Node), "a state is part of what a compressor returns"
        return compress.kwargs["state"]
    return value


def _replaced(left_out: Any) -> str:
    """The residual that a compressor replaced in place by what it left out."""
    return left_out.args[0].args[1].name


def _ranks(node: Node) -> int:
    """How many ranks' parts a collective's result holds, or splits its input into."""
    arguments: Any = node.args
    return int(arguments[-2]) if node.target in (ALL_GATHER, REDUCE_SCATTER) else 1


def _region_call(region: Region) -> str:
    left = [node.name for node in region.outputs]
    assigned = f"    {', '.join(left)} = " if left else "    "
    if len(assigned) > WIDTH // 2:
        assigned = _wrapped("    (", left, ") = ", indent="    ")
    return _wrapped(f"{assigned}{region.name}(", [node.name for node in region.inputs], ")", indent="    ")


def _last_uses(pieces: Sequence[Region | Node]) -> dict[Node, Region | Node]:
    """The piece behind which a value is needed no more."""
    last: dict[Node, Region | Node] = {}
    made: set[Node] = set()
    for piece in pieces:
        used = piece.inputs if isinstance(piece, Region) else piece.all_input_nodes
        for node in used:
            if node in made:
                last[node] = piece
        made.update(piece.outputs if isinstance(piece, Region) else [piece] if is_exchange(piece) else ())
    return last


def _returned(gm: GraphModule) -> str:
    outputs: Any = gm.graph.output_node().args[0]
    loss, aux = outputs[:2]
    return f"{_text(loss)}, {_text(tuple(aux))}"


# Layout


def _wrapped(head: str, items: Sequence[str], tail: str, *, indent: str) -> str:
    """`head` items `tail` on one line if it fits, else the items on lines of their own. `head` brings its indent."""
    joined = ", ".join(items)
    if len(head.splitlines()[-1]) + len(joined) + len(tail) <= WIDTH:
        return f"{head}{joined}{tail}"
    inner = indent + "    "
    body = _lines(joined, WIDTH - len(inner) - 1)
    return f"{head.rstrip()}\n" + "\n".join(inner + line for line in body) + f",\n{indent}{tail.lstrip(',')}"


_WORD = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^ "])+')
"""What a line does not end inside of: a parameter's name may hold spaces, and stands in quotes."""


def _lines(text: str, width: int) -> list[str]:
    """The text on as few lines as it takes; a word that is longer than a line has one of its own."""
    lines = [""]
    for word in _WORD.findall(text):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines
