"""Classify optimizer updates by their dependence on the gradient, and group equal updates into lists.

    %mul_      update  f32[4]  mul_(%exp_avg_sq, %beta)                     neutral
    %addcmul_  update  f32[4]  addcmul_(%mul_, %grad, %grad, value=0.001)   magnitude: written into a state
    %sqrt      update  f32[4]  sqrt(%addcmul_)                              magnitude
    %addcdiv_  update  f32[4]  addcdiv_(%weight, %exp_avg, %sqrt)           divides by the root of a second moment

Each value is neutral (independent of the gradient), linear in it, a magnitude (an even function of it,
such as a square or a norm), or bent (any other function). The result of an operator without a rule is bent if an input
is linear or bent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.graph.info import InputKind, Role, has_info, info
from fxcomp.plan.error_feedback import UpdateKind

LISTED_ON_CPU = 2048
"""On the CPU, tensors of more elements are not updated in lists.

Time of AdamW on 200 tensors, with and without lists: 3.3 and 5.3 ms if the larger tensors have 256 elements, 9.3 and
10.2 ms for 4096, 17.6 and 15.2 ms for 9216, where values leave the cache (measured, one core, torch 2.13, 2026-11).
"""


def update_lists(gm: GraphModule, most_elements: float) -> list[list[Node]]:
    """Return groups of nodes that each run as one operator over a list. Updates of larger tensors run alone.

        %mul_    update  f32[4,2]  mul_(%fc_weight_exp_avg, %beta)   fc.weight  ┐ one operator over a list of two
        %mul__1  update  f32[4]    mul_(%fc_bias_exp_avg, %beta)     fc.bias    ┘

    Parameters with equal operators form one list. Emitted source has one list per bucket (`codegen/region_source.py`).
    """
    updates: defaultdict[str | None, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if has_info(node) and info(node).role is Role.UPDATE and node.op == "call_function":
            updates[info(node).parameter].append(node)
    rules: defaultdict[Hashable, list[list[Node]]] = defaultdict(list)
    for nodes in updates.values():
        if _elements(nodes) <= most_elements:
            rules[_rule(nodes)].append(nodes)
    alike = (members for members in rules.values() if len(members) > 1)
    rows = (list(row) for members in alike for row in zip(*members, strict=True))
    return [row for row in rows if _has_list_form(row[0].target)]


def _elements(nodes: Sequence[Node]) -> float:
    """Return the largest tensor's number of elements; infinity keeps 16-bit updates on the CPU out of lists."""
    inputs = (each for node in nodes for each in (node, *node.all_input_nodes))
    tensors = [value for each in inputs if isinstance(value := each.meta.get("val"), Tensor)]
    is_narrow = any(v.is_floating_point() and v.itemsize < 4 and v.device.type == "cpu" for v in tensors)
    return math.inf if is_narrow else max((v.numel() for v in tensors), default=0)


def _rule(nodes: Sequence[Node]) -> Hashable:
    """Return a key that is equal for updates that differ only in names and shapes."""
    places = {node: place for place, node in enumerate(nodes)}

    def described(node: Node) -> Any:
        if node in places:
            return f"value {places[node]}"
        source = info(node).source if has_info(node) else None
        if source is not None and source.kind is InputKind.HYPER:
            return f"number {node.name}"
        value = node.meta.get("val")
        kind = "gradient" if source is None else f"{source.kind} {source.key if source.kind is InputKind.STATE else ''}"
        return f"{kind} {value.dtype if isinstance(value, Tensor) else type(value)}"

    return tuple((str(node.target), repr(map_arg((node.args, node.kwargs), described))) for node in nodes)


def _has_list_form(target: Any) -> bool:
    if not compat.is_operator(target):
        return False
    return compat.takes_lists(target) or hasattr(torch.ops.aten, f"_foreach_{compat.bare_name(target)}")


def shared_starts(lists: Sequence[Sequence[Node]], us: Mapping[Node, float], launch_us: float) -> dict[Node, float]:
    """Return each node's time in µs, raised so that each list takes at least the time of one launch."""
    found: dict[Node, float] = {}
    for row in lists:
        total_us = sum(us[node] for node in row)
        more_us = max(0.0, launch_us - total_us) / len(row)
        found.update((node, us[node] + more_us) for node in row)
    return found


class Form(IntEnum):
    """Form of a value as a function of the gradient."""

    NEUTRAL = 0  # independent of the gradient
    LINEAR = 1
    MAGNITUDE = 2  # even in the gradient: a square, a norm, a root of a square
    BENT = 3


def update_kinds(gm: GraphModule) -> set[UpdateKind]:
    updates: dict[str, list[Node]] = {}
    parameters: dict[str, Node] = {}
    states: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        label = info(node)
        if label.role is Role.UPDATE and label.parameter is not None:
            updates.setdefault(label.parameter, []).append(node)
        elif label.source is not None and label.source.kind is InputKind.PARAMETER:
            parameters[label.source.name] = node
        elif label.source is not None and label.source.kind is InputKind.STATE:
            states.setdefault(label.source.name, []).append(node)
    known: dict[tuple[Any, ...], UpdateKind] = {}
    for name, nodes in updates.items():
        likeness = tuple(node.target for node in nodes)
        if likeness not in known:
            known[likeness] = kind_of_update(nodes, parameters[name], states.get(name, ()))
    return set(known.values())


def kind_of_update(nodes: Sequence[Node], parameter: Node, states: Collection[Node]) -> UpdateKind:
    reading = UpdateReading(nodes, parameter, states)
    if reading.divides_by(reading.magnitudes):
        return UpdateKind.TRUST_RATIO if reading.has_norm_of_parameter() else UpdateKind.SECOND_MOMENT
    if reading.form[parameter] > Form.LINEAR:
        return UpdateKind.OTHER
    return UpdateKind.MOMENTUM if reading.means else UpdateKind.PLAIN


class UpdateReading:
    """Forms of an update's values, in program order."""

    def __init__(self, nodes: Sequence[Node], parameter: Node, states: Collection[Node]):
        self._nodes, self._parameter = nodes, parameter
        self._memory: dict[Node, Node] = {}
        """For each node, the node whose memory holds its value."""
        self.form: dict[Node, Form] = {parameter: Form.NEUTRAL, **dict.fromkeys(states, Form.NEUTRAL)}
        """Form of each memory's present content."""
        self.means: set[Node] = set()
        self.magnitudes: set[Node] = set()
        inside = set(nodes)
        for node in nodes:
            for outer in node.all_input_nodes:
                if outer not in inside and outer not in self.form:
                    self.form[outer] = Form.LINEAR if _is_gradient(outer) else Form.NEUTRAL
        for node in nodes:
            self._read(node, states)

    def _read(self, node: Node, states: Collection[Node]) -> None:
        form = self._form_of(node)
        for memory in self._written(node):
            self.form[memory] = form
            if memory in states and form is Form.LINEAR:
                self.means.add(memory)
            elif memory in states and form is Form.MAGNITUDE:
                self.magnitudes.add(memory)
        self._memory[node] = self._memory_of_result(node)
        self.form[self._memory[node]] = form

    def _at(self, node: Node) -> Node:
        return self._memory.get(node, node)

    def _written(self, node: Node) -> list[Node]:
        if not compat.is_operator(node.target):
            return []
        given = compat.named_arguments(node.target, node.args, node.kwargs)
        written = (given.get(name) for name in compat.written_arguments(node.target))
        return [self._at(each) for each in written if isinstance(each, Node)]

    def _memory_of_result(self, node: Node) -> Node:
        """Return the node whose memory the operator writes or views, else the node itself."""
        if written := self._written(node):
            return written[0]
        is_view = compat.is_operator(node.target) and compat.is_view(node.target)
        return self._at(node.all_input_nodes[0]) if is_view and node.all_input_nodes else node

    def _form_of(self, node: Node) -> Form:
        name = name_of(node)
        inputs = [self.form[self._at(each)] for each in node.all_input_nodes]
        if not any(inputs) or name in _FILLS:
            return Form.NEUTRAL
        if name == "copy":
            return self._form_at(node.args[1])
        if name in _FACTORS:
            first, second = _FACTORS[name]
            product = self._product(node.args[first], node.args[second], divides=name in _DIVISORS)
            return _sum([product, *map(self._form_at, node.args[:first])])
        if name in _EVEN or (name == "pow" and node.args[1] == 2):
            return Form.MAGNITUDE
        if name in _LINEAR or (compat.is_operator(node.target) and compat.is_view(node.target)):
            return _sum(inputs)
        return Form.MAGNITUDE if set(inputs) <= {Form.NEUTRAL, Form.MAGNITUDE} else Form.BENT

    def _form_at(self, argument: Any) -> Form:
        return self.form[self._at(argument)] if isinstance(argument, Node) else Form.NEUTRAL

    def _product(self, first: Any, second: Any, *, divides: bool) -> Form:
        forms = self._form_at(first), self._form_at(second)
        if divides and forms[1] in (Form.LINEAR, Form.BENT):
            return Form.BENT
        if Form.NEUTRAL in forms or forms[0] is forms[1] is Form.MAGNITUDE:
            return max(forms)
        if Form.MAGNITUDE in forms:
            return Form.BENT
        same = isinstance(first, Node) and isinstance(second, Node) and self._at(first) is self._at(second)
        return Form.MAGNITUDE if same or Form.BENT not in forms else Form.BENT

    def divides_by(self, states: Collection[Node]) -> bool:
        follows = self._following(states) if states else set[Node]()
        return any(self._at(each) in follows for node in self._nodes for each in divisors(node))

    def has_norm_of_parameter(self) -> bool:
        """Return whether values computed from the parameter are reduced to one number."""
        values = self._following([self._parameter])
        norms = [node for node in self._nodes if name_of(node) in _REDUCTIONS and _is_scalar(node)]
        return any(self._at(each) in values for node in norms for each in node.all_input_nodes)

    def _following(self, starts: Iterable[Node]) -> set[Node]:
        found = set(starts)
        for node in self._nodes:
            if any(self._at(each) in found for each in node.all_input_nodes):
                found |= {self._memory[node], *self._written(node)}
        return found


def _is_gradient(outer: Node) -> bool:
    """Return whether an input of an update is its gradient, not an input of the graph."""
    is_input = has_info(outer) and info(outer).source is not None
    return isinstance(outer.meta.get("val"), Tensor) and outer.op != "get_attr" and not is_input


def _sum(forms: Iterable[Form]) -> Form:
    """Return the form of a sum. A magnitude plus a linear value is bent."""
    found = set(forms) - {Form.NEUTRAL}
    return found.pop() if len(found) == 1 else Form.BENT if found else Form.NEUTRAL


def name_of(node: Node) -> str:
    """Return an operator's name, without the suffix of in-place operators."""
    name = compat.bare_name(node.target) if compat.is_operator(node.target) else getattr(node.target, "__name__", "")
    return name.removesuffix("_")


def divisors(node: Node) -> list[Node]:
    name = name_of(node)
    place = _DIVISORS.get(name)
    if name == "pow" and isinstance(node.args[1], int | float) and node.args[1] < 0:
        place = 0
    return [each for each in (node.args[place],) if isinstance(each, Node)] if place is not None else []


def _is_scalar(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1


_DIVISORS = {"div": 1, "truediv": 1, "addcdiv": 2, "reciprocal": 0, "rsqrt": 0}
_FACTORS = {"mul": (0, 1), "addcmul": (1, 2), "div": (0, 1), "truediv": (0, 1), "addcdiv": (1, 2)}
"""Indices of two factors, or of dividend and divisor. Arguments before these are added to the result."""
_EVEN = {"abs", "square", "norm", "linalg_vector_norm", "_foreach_norm"}
_FILLS = {"zero", "fill", "zeros_like", "ones_like", "empty_like", "full_like"}
_LINEAR = {
    "add", "sub", "rsub", "neg", "lerp", "sum", "mean", "clone", "_to_copy", "to", "where", "contiguous", "getitem",
}  # fmt: skip
_REDUCTIONS = {"sum", "mean", "norm", "linalg_vector_norm", "dot"}
