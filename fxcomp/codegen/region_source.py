"""Write each region as a function; update rules shared by parameters are written once, as `optimizer_step_0`.

Parameters with the same rule are updated together by list operators, as in torch's `foreach` optimizers.

    mul_1 = aten.mul_.Tensor(exp_avg_sq, betas_1)      for one parameter
    aten._foreach_mul_.Scalar(exp_avg_sqs, betas_1)    for all of them

An operator without a list form runs once per parameter. Common values are computed once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxcomp import compat
from fxcomp.codegen.expressions import OWN_NAMES, Names, call_text, function_text, text, wrapped
from fxcomp.graph.info import InputKind, Role, free_name, info
from fxcomp.graph.regions import Region
from fxcomp.graph.work import is_sequence


@dataclass(slots=True)
class Statement:
    """Source line, the variable that it assigns, and the variables that it uses."""

    line: str
    made: str | None
    used: set[str] = field(default_factory=set[str])


def foreach_lines(group: Sequence[Node], names: Mapping[Node, str], lists: Sequence[Node]) -> list[str]:
    """Rewrite one parameter's update (`group`) for lists of parameters. `lists` are the inputs that become lists."""
    writer = _ListWriter(dict(names), set(lists), names[lists[0]])
    for node in group:
        writer.add(node)
    return writer.lines()


class _ListWriter:
    def __init__(self, names: dict[Node, str], lists: set[Node], every: str):
        self._names, self._lists, self._every = names, lists, every
        self._statements: list[Statement] = []

    def add(self, node: Node) -> None:
        is_operator = compat.is_operator(node.target)
        used = {self._names[each] for each in node.all_input_nodes}
        if not is_operator and not self._lists.intersection(node.all_input_nodes):
            self._append(node, call_text(node, self._names), used)
            return
        self._lists.add(node)
        if is_operator and compat.takes_lists(node.target):
            self._append(node, self._over_lists(node), used)
            return
        found = self._foreach(node) if is_operator else None
        if found is None:
            self._append(node, self._one_by_one(node), used | {self._every})
        elif compat.is_in_place(node.target):
            self._statements.append(Statement(found, None, used))
            self._names[node] = self._names[node.all_input_nodes[0]]
        else:
            self._append(node, found, used)

    def _over_lists(self, node: Node) -> str:

        def given(value: Any) -> str:
            alone = value[0] if is_sequence(value) and len(value) == 1 else None
            return text(alone if isinstance(alone, Node) and alone in self._lists else value, self._names)

        arguments = [given(value) for value in node.args]
        arguments += [f"{key}={given(value)}" for key, value in node.kwargs.items()]
        return f"{function_text(node.target)}({', '.join(arguments)})"

    def _append(self, node: Node, expression: str, used: set[str]) -> None:
        made = self._names[node] if node.users else None
        self._statements.append(Statement(f"{made} = {expression}" if made else expression, made, used))

    def _one_by_one(self, node: Node) -> str:
        listed = [each for each in dict.fromkeys(node.all_input_nodes) if each in self._lists]
        items = {each: f"{self._names[each]}_k" for each in listed}
        expression = call_text(node, {**self._names, **items})
        if not listed:
            return f"[{expression} for _ in {self._every}]"
        variables, values = ", ".join(items.values()), ", ".join(self._names[each] for each in listed)
        return f"[{expression} for {variables} in " + (f"zip({values})]" if len(listed) > 1 else f"{values}]")

    def _foreach(self, node: Node) -> str | None:
        """Return a call of the node's foreach operator; None if there is no such operator."""
        assert compat.is_operator(node.target), "only operators have list forms"
        name = compat.bare_name(node.target)
        kind, arguments = name.removesuffix("_"), list(node.args)
        if not all(self._is_listed_tensor(each) for each in arguments[: _TENSORS.get(kind, len(arguments))]):
            return None
        if kind in _UNARY and len(arguments) == 1 and not node.kwargs:
            return self._call(name, "default", arguments, {})
        if kind in _BINARY and len(arguments) == 2:
            return self._binary(name, arguments, node.kwargs)
        if kind in _PRODUCTS and len(arguments) == 3 and set(node.kwargs) <= {"value"}:
            value = node.kwargs.get("value", 1)
            return self._call(name, self._scalar(value), [*arguments, value], {})
        is_lerp = kind == "lerp" and len(arguments) == 3 and not node.kwargs and self._scalar(arguments[2]) == "Scalar"
        return self._call(name, "Scalar", arguments, {}) if is_lerp else None

    def _binary(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> str | None:
        other = arguments[1]
        if self._is_listed_tensor(other):
            are_shared = set(options) <= {"alpha"} and all(
                self._scalar(value) == "Scalar" for value in options.values()
            )
            return self._call(name, "List", arguments, options) if are_shared else None
        if options or (isinstance(other, Node) and isinstance(other.meta.get("val"), Tensor)):
            return None
        return self._call(name, self._scalar(other), arguments, {})

    def _scalar(self, value: Any) -> str:
        """Return the foreach overload for `value`: ScalarList for a number per parameter, else Scalar."""
        return "ScalarList" if isinstance(value, Node) and value in self._lists else "Scalar"

    def _is_listed_tensor(self, value: Any) -> bool:
        return isinstance(value, Node) and value in self._lists and isinstance(value.meta.get("val"), Tensor)

    def _call(self, name: str, form: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> str | None:
        operator = getattr(torch.ops.aten, f"_foreach_{name}", None)
        if operator is None or form not in operator.overloads():
            return None
        given = [text(argument, self._names) for argument in arguments]
        given += [f"{key}={text(value, self._names)}" for key, value in options.items()]
        return f"aten._foreach_{name}.{form}({', '.join(given)})"

    def lines(self) -> list[str]:
        last = {name: k for k, statement in enumerate(self._statements) for name in statement.used}
        made = {statement.made for statement in self._statements if statement.made is not None}
        lines: list[str] = []
        for k, statement in enumerate(self._statements):
            dead = sorted(name for name in made if last.get(name) == k)
            lines.append(statement.line + (f"; del {', '.join(dead)}" if dead else ""))
        return lines


_UNARY = ("sqrt", "neg", "abs", "reciprocal", "exp", "sign", "rsqrt")
_BINARY = ("add", "sub", "mul", "div")
_PRODUCTS = ("addcmul", "addcdiv")
_TENSORS = {"add": 1, "sub": 1, "mul": 1, "div": 1, "addcmul": 3, "addcdiv": 3, "lerp": 2}
"""Number of leading arguments of a list form that must be tensors, one per parameter."""


class OptimizerSteps:
    """The optimizer's update rules, each written once."""

    def __init__(self, listed_elements: float = 0) -> None:
        self._listed_elements = listed_elements
        """Maximum size, in elements, of parameters that are updated together."""
        self._names: dict[tuple[str, ...], str] = {}

    def joined(self, groups: Sequence[list[Node]]) -> list[list[Node]]:
        """Join updates without users that differ only in tensors. A joined update takes the last one's place."""
        found: dict[Hashable, list[Node]] = {}
        for group in groups:
            likeness: Hashable = group[-1]
            is_update = info(group[-1]).role is Role.UPDATE and not group[-1].users
            if is_update and _elements(group) <= self._listed_elements:
                likeness = _likeness(group)
            found[likeness] = [*found.pop(likeness, []), *group]
        return list(found.values())

    def call(self, group: Sequence[Node]) -> str:
        members = _by_parameter(group)
        if len(members) > 1:
            return self._call_for_all(members)
        inputs = _inputs(group)
        names = _names_in_rule(group, inputs)
        lines = _statements([[node] for node in group], (), names, None)
        return self._rule([names[n] for n in inputs], lines, [node.name for node in inputs])

    def _call_for_all(self, members: Sequence[Sequence[Node]]) -> str:
        rows = list(zip(*map(_inputs, members), strict=True))
        lists = [row[0] for row in rows if not _is_shared(row[0])]
        names = _names_in_rule(members[0], [row[0] for row in rows], lists)
        lines = foreach_lines(members[0], names, lists)
        given = [f"[{', '.join(n.name for n in row)}]" if row[0] in lists else row[0].name for row in rows]
        return self._rule([names[row[0]] for row in rows], lines, given)

    def _rule(self, names: Sequence[str], lines: Sequence[str], given: Sequence[str]) -> str:
        body = ("(" + ", ".join(names) + "):", *lines)
        name = self._names.setdefault(body, f"optimizer_step_{len(self._names)}")
        return f"{name}({', '.join(given)})"

    def functions(self) -> list[str]:
        return ["\n    ".join((f"def {name}{body[0]}", *body[1:])) for body, name in self._names.items()]


def _is_shared(node: Node) -> bool:
    source = info(node).source
    return source is not None and source.kind is InputKind.HYPER


def _elements(group: Sequence[Node]) -> float:
    """Return the elements of the largest tensor; infinite if list operators would round differently.

    On the CPU, list operators that multiply 16-bit tensors by a number first round the number to 16 bits.
    """
    tensors = [v for node in _inputs(group) if isinstance(v := node.meta.get("val"), Tensor)]
    is_narrow = any(v.is_floating_point() and v.itemsize < 4 and v.device.type == "cpu" for v in tensors)
    return math.inf if is_narrow else max(v.numel() for v in tensors)


def _likeness(group: Sequence[Node]) -> Hashable:
    inputs = _inputs(group)
    names = _names_in_rule(group, inputs)
    types = tuple((v.dtype, v.device) for n in inputs if isinstance(v := n.meta.get("val"), Tensor))
    lines = _statements([[node] for node in group], (), names, None)
    return (*lines, types, *(node for node in inputs if _is_shared(node)))


def _inputs(group: Sequence[Node]) -> list[Node]:
    inside = set(group)
    return list(dict.fromkeys(n for node in group for n in node.all_input_nodes if n not in inside))


def _by_parameter(group: Sequence[Node]) -> list[list[Node]]:
    members: dict[str | None, list[Node]] = {}
    for node in group:
        members.setdefault(info(node).parameter, []).append(node)
    return list(members.values())


def _names_in_rule(group: Sequence[Node], inputs: Sequence[Node], lists: Sequence[Node] = ()) -> dict[Node, str]:
    """Name an update's values by role; lists get the plural."""
    names: dict[Node, str] = {}
    taken = {"parameter", "gradient", "parameters", "gradients"}
    for node in inputs:
        role = f"{_role_name(node)}s" if node in lists else _role_name(node)
        names[node] = role if _is_tensor_of_rule(node) else _free(role, taken)
        taken.add(names[node])
    for node in group:
        stem = free_name(str(node.name).rstrip("0123456789").rstrip("_") or node.name)
        names[node] = _free(stem, taken)
        taken.add(names[node])
    return names


def _free(stem: str, taken: Collection[str]) -> str:
    return next(name for name in (stem, *(f"{stem}_{k}" for k in range(len(taken) + 1))) if name not in taken)


def _role_name(node: Node) -> str:
    source = info(node).source
    if node.op == "get_attr":
        return "constant"
    if source is None:
        return "gradient"
    clean = re.sub(r"\W|^(?=\d)", "_", source.key)
    return "parameter" if source.kind is InputKind.PARAMETER else free_name(clean)


def _is_tensor_of_rule(node: Node) -> bool:
    source = info(node).source
    return node.op != "get_attr" and (source is None or source.kind is InputKind.PARAMETER)


def region_function(region: Region, steps: OptimizerSteps) -> str:
    groups = _update_groups(region.nodes)
    lines = _statements(steps.joined(groups), region.outputs, OWN_NAMES, steps)
    if region.outputs:
        lines.append("return " + ", ".join(node.name for node in region.outputs))
    head = wrapped(f"def {region.name}(", [node.name for node in region.inputs], "):", indent="")
    return head + "\n" + "\n".join(f"    {line}" for line in lines)


def _statements(
    groups: Sequence[Sequence[Node]], keep: Sequence[Node], names: Names, steps: OptimizerSteps | None
) -> list[str]:
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
        if steps is not None and info(node).role is Role.UPDATE and not node.users:
            line = steps.call(group)
        else:
            line = (f"{names.get(node, node.name)} = " if node.users else "") + call_text(node, names)
        lines.append(line + (f"; del {', '.join(dead)}" if dead else ""))
    return lines


def _update_groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """Group consecutive updates of the same parameter; other nodes stay alone."""
    groups: list[list[Node]] = []
    for node in nodes:
        last = info(groups[-1][-1]) if groups else None
        same = last is not None and last.role is Role.UPDATE and last.parameter == info(node).parameter
        if same and info(node).role is Role.UPDATE:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups
