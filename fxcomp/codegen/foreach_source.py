"""Write the update of several parameters at once: each operator runs over lists, as torch's `foreach` optimizers do.

    mul_1 = aten.mul_.Tensor(exp_avg_sq, betas_1)      for one parameter
    aten._foreach_mul_.Scalar(exp_avg_sqs, betas_1)    for all of them

An operator without a list form runs for one after the other. What is the same for all parameters is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxcomp import compat
from fxcomp.codegen.expressions import call_text, text


@dataclass(slots=True)
class Statement:
    """A line, the variable that it makes, and those that it uses."""

    line: str
    made: str | None
    used: set[str] = field(default_factory=set[str])


def foreach_lines(group: Sequence[Node], names: Mapping[Node, str], lists: Sequence[Node]) -> list[str]:
    """Write one parameter's update for lists. `lists` are the inputs of which every parameter has its own."""
    writer = _ListWriter(dict(names), set(lists), names[lists[0]])
    for node in group:
        writer.add(node)
    return writer.lines()


class _ListWriter:
    def __init__(self, names: dict[Node, str], lists: set[Node], every: str):
        self._names, self._lists, self._every = names, lists, every
        self._statements: list[Statement] = []

    def add(self, node: Node) -> None:
        """Append what does for all parameters what a node does for one."""
        is_operator = compat.is_operator(node.target)
        used = {self._names[each] for each in node.all_input_nodes}
        if not is_operator and not self._lists.intersection(node.all_input_nodes):
            self._append(node, call_text(node, self._names), used)
            return
        self._lists.add(node)
        found = self._foreach(node) if is_operator else None
        if found is None:
            self._append(node, self._one_by_one(node), used | {self._every})
        elif compat.is_in_place(node.target):
            self._statements.append(Statement(found, None, used))
            self._names[node] = self._names[node.all_input_nodes[0]]
        else:
            self._append(node, found, used)

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
        """Write the call of an operator's list form; None if it has none for these arguments."""
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
        """Tell the form of an operator that takes one number, and that which takes one for each parameter."""
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
        """Write the statements; what they make is deleted after its last use."""
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
"""So many of an operator's first arguments must be tensors of which every parameter has its own."""
