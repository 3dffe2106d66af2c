"""Find the optimizer's mean of gradients, which ranks can exchange instead of gradients.

    %lerp_     update  f32[4]  lerp_(%exp_avg, %grad, %sub)                 the mean: linear in the gradient
    %addcmul_  update  f32[4]  addcmul_(%mul_, %grad, %grad, value=%sub_1)  a magnitude: a second moment
    %sqrt      update  f32[4]  sqrt(%addcmul_)
    %div       update  f32[4]  div(%sqrt, %correction)                      bias correction
    %add_      update  f32[4]  add_(%div, 1e-08)                            the divisor of the mean

The rules follow operators, not the optimizer's class. While means are exchanged, the magnitude is frozen
(`passes/move_exchange.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.graph.info import InputKind, Role, has_info, info
from fxcomp.graph.update_kinds import UpdateReading, divisors, name_of

LARGEST_MEAN = 10.0
"""Largest absolute value of a shared mean, in units of the root of the frozen second moment.

Cauchy-Schwarz bounds Adam's mean by (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)) of this root: 7.3
with default betas. Clamping to 10 keeps updates hardly larger than Adam's.
"""


class NoMoment(Exception):
    """The update has no mean of gradients to exchange; the exception's text is the reason."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Bias correction of a magnitude that starts at zero. The correction grows to 1."""

    number: Node
    power: int
    """Exponent in magnitude / `number` ** `power`, the corrected magnitude. It is 2 if `number` divides the root."""


@dataclass(frozen=True, slots=True)
class Magnitude:
    """A second moment and, computed from it, the divisor of the mean."""

    state: Node
    writes: tuple[Node, ...]
    """Nodes that write `state`, in order."""
    divisor: Node
    correction: Correction | None


@dataclass(frozen=True, slots=True)
class Moment:
    """The mean of gradients in one parameter's update."""

    state: Node
    writes: tuple[Node, ...]
    entering: Node
    """Value that the last write adds to `state`: the gradient, with coupled weight decay."""
    recovered: tuple[Node, ...]
    """Nodes that use `entering` in addition to the last write, as in Nesterov momentum."""
    magnitude: Magnitude | None


class Update:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.parameter: Node | None = None
        self.states: list[Node] = []

    def gradient(self) -> Node:
        """Return the gradient: the only input tensor of the update that another operator computes.

        Raise NoMoment for none or several.
        """
        inside = set(self.nodes)
        outer = dict.fromkeys(n for node in self.nodes for n in node.all_input_nodes if n not in inside)
        found = [n for n in outer if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
        if len(found) != 1:
            raise NoMoment("it reads tensors other than its gradient")
        return found[0]

    def moment(self) -> Moment:
        assert self.parameter is not None, "an update is of a parameter"
        return moment_of(self.nodes, self.gradient(), self.parameter, self.states)


def updates_of(gm: GraphModule) -> dict[str, Update]:
    found: dict[str, Update] = {}
    for node in gm.graph.nodes:
        label = info(node)
        if label.role is Role.UPDATE and node.op == "call_function" and label.parameter is not None:
            found.setdefault(label.parameter, Update()).nodes.append(node)
    for node in gm.graph.find_nodes(op="placeholder"):
        source = info(node).source
        if source is not None and source.name in found:
            if source.kind is InputKind.PARAMETER:
                found[source.name].parameter = node
            elif source.kind is InputKind.STATE:
                found[source.name].states.append(node)
    return found


def moment_of(nodes: Sequence[Node], gradient: Node, parameter: Node, states: Collection[Node]) -> Moment:
    """Find the mean of gradients in one parameter's update. Raise NoMoment if the mean cannot be exchanged."""
    _check_no_view_is_written(nodes, {gradient, *states})
    reading = UpdateReading(nodes, parameter, states)
    if not reading.means:
        raise NoMoment("it keeps no mean of gradients")
    if len(reading.means) > 1:
        raise NoMoment("it keeps several means of gradients")
    if len(reading.magnitudes) > 1:
        raise NoMoment("it keeps several magnitudes of gradients, such as the largest one (amsgrad)")
    (state,) = reading.means
    for each in (state, *reading.magnitudes):
        value = each.meta["val"]
        if value.shape != parameter.meta["val"].shape or value.dtype is not torch.float32:
            raise NoMoment(f"{each.name} is not like the parameter in f32")
    writes = _writes(nodes, state)
    if gradient in _with_inputs(writes[:-1], nodes):
        raise NoMoment("its mean takes in the gradient more than once")
    entering = _entering(writes[-1])
    frozen = [_magnitude(nodes, each) for each in reading.magnitudes]
    for each in frozen:
        _check_is_adams(each, nodes)
    known = {node for group in (writes, *(each.writes for each in frozen)) for node in group}
    recovered = _uses_beside(nodes, gradient, entering, known)
    return Moment(state, writes, entering, recovered, frozen[0] if frozen else None)


def _check_no_view_is_written(nodes: Sequence[Node], known: Collection[Node]) -> None:
    """Raise NoMoment for writes through views, which are not tracked."""
    inside = set(nodes)
    for node in nodes:
        place = node.args[0] if compat.is_operator(node.target) and compat.is_in_place(node.target) else None
        through = False
        while isinstance(place, Node) and place in inside and compat.is_operator(place.target):
            if not (compat.is_view(place.target) or compat.is_in_place(place.target)):
                break
            through = through or compat.is_view(place.target)
            place = place.args[0]
        if through and place in known:
            raise NoMoment("it writes through a view")


def _with_inputs(ends: Iterable[Node], nodes: Sequence[Node]) -> set[Node]:
    made = _sources(ends, nodes)
    return made | {each for node in made for each in node.all_input_nodes}


def memory_of(node: Node) -> Node:
    """Return the input that a chain of in-place operators, up to `node`, changes."""
    while node.op == "call_function" and compat.is_operator(node.target) and compat.is_in_place(node.target):
        place = node.args[0]
        assert isinstance(place, Node), "an operator writes into a node"
        node = place
    return node


def _writes(nodes: Sequence[Node], state: Node) -> tuple[Node, ...]:
    found = tuple(node for node in nodes if memory_of(node) is state and node is not state)
    order = {node: place for place, node in enumerate(nodes)}
    versions = (state, *found)
    for before, after in itertools.pairwise(versions):
        if any(order.get(user, -1) > order[after] for user in before.users):
            raise NoMoment(f"it reads an older value of {state.name} after that was written")
    return found


def _entering(write: Node) -> Node:
    name = name_of(write)
    entering = write.args[1] if name in ("lerp", "add") else None
    is_number = name == "lerp" and isinstance(write.args[2], Node) and isinstance(write.args[2].meta["val"], Tensor)
    if not isinstance(entering, Node) or is_number:
        raise NoMoment(f"its mean is written by {write.target}, which is not supported")
    return entering


def _uses_beside(nodes: Sequence[Node], gradient: Node, entering: Node, known: Collection[Node]) -> tuple[Node, ...]:
    """Return the nodes besides the last write that use `entering`. Raise NoMoment if the gradient is used otherwise."""
    needed = _sources(known, nodes)
    follows = {gradient}
    found: list[Node] = []
    for node in nodes:
        inputs = [each for each in node.all_input_nodes if each in follows]
        if not inputs or node in known:
            continue
        if node in needed:
            follows.add(node)
            if compat.is_operator(node.target) and compat.is_in_place(node.target):
                raise NoMoment("it changes the gradient in place")
        elif inputs == [entering]:
            found.append(node)
        else:
            raise NoMoment("it uses the gradient outside its mean, in an unsupported way")
    return tuple(found)


def _sources(ends: Iterable[Node], nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes of an update that `ends` depend on, including `ends`."""
    inside, found, open_ = set(nodes), set[Node](), list(ends)
    while open_:
        node = open_.pop()
        if node in inside and node not in found:
            found.add(node)
            open_ += node.all_input_nodes
    return found


def _magnitude(nodes: Sequence[Node], state: Node) -> Magnitude:
    writes = _writes(nodes, state)
    shape = state.meta["val"].shape
    follows = {state, *writes}
    for node in nodes:
        if any(each in follows for each in node.all_input_nodes):
            follows.add(node)
    found = {each for node in nodes for each in divisors(node) if each in follows and each.meta["val"].shape == shape}
    if len(found) != 1:
        raise NoMoment("its mean is not divided by one root of a magnitude")
    (divisor,) = found
    if name_of(divisor) != "add" or isinstance(divisor.args[1], Node):
        raise NoMoment("the divisor of its mean is not a root plus a small number")
    return Magnitude(state, writes, divisor, _correction(divisor, writes[-1], nodes))


def _check_is_adams(magnitude: Magnitude, nodes: Sequence[Node]) -> None:
    """Raise NoMoment unless a second moment is Adam's: in state `exp_avg_sq`, with a bias correction by beta2."""
    source, correction = info(magnitude.state).source, magnitude.correction
    numbers = set[Node]() if correction is None else _leaves(correction.number, nodes)
    betas = {info(each).source.key for each in numbers if _is_input(each, InputKind.HYPER)}  # pyright: ignore[reportOptionalMemberAccess]
    if source is None or source.key != "exp_avg_sq" or betas != {"betas_1"}:
        raise NoMoment("its second moment is not kept and corrected as Adam's is, by betas and exp_avg_sq")


def _correction(divisor: Node, magnitude: Node, nodes: Sequence[Node]) -> Correction | None:
    """Return the bias correction between magnitude and divisor.

    Raise NoMoment for any other dependence on the step or the learning rate.
    """
    found: list[Correction] = []
    node, after_root = divisor, False
    roots = [each for each in _sources([divisor], nodes) if name_of(each) == "sqrt"]
    while node is not magnitude:
        name, others = name_of(node), node.all_input_nodes[1:]
        if name == "sqrt":
            after_root = True
        elif name == "div" and others and _counts_steps(others[0], nodes):
            found.append(Correction(others[0], 1 if after_root else 2))
            others = []
        elif name not in ("add", "div"):
            raise NoMoment(f"the divisor of its mean is made by {node.target}, which is not supported")
        if any(_counts_steps(each, nodes) or _is_rate(each, nodes) for each in others):
            raise NoMoment("the divisor of its mean changes with the step or the learning rate")
        node = node.all_input_nodes[0]
    if len(roots) != 1 or len(found) > 1:
        raise NoMoment("its mean is not divided by one root of a magnitude")
    if not found:
        if any(not isinstance(each.meta.get("val"), Tensor) and _counts_steps(each, nodes) for each in nodes):
            raise NoMoment("its second moment is not divided by its correction, and something else counts steps")
        return None
    number = found[0].number
    if isinstance(number.meta["val"], Tensor):
        raise NoMoment("its numbers are tensors (capturable)")
    counted = [each for each in _sources([number], nodes) if _counts(each)]
    if len(counted) != 1:
        raise NoMoment("its steps are not counted by one add_ to a state, before they are read")
    return found[0]


def _counts(node: Node) -> bool:
    is_in_place = compat.is_operator(node.target) and compat.is_in_place(node.target)
    return is_in_place and name_of(node) == "add" and _is_input(memory_of(node), InputKind.STATE)


def _counts_steps(node: Node, nodes: Sequence[Node]) -> bool:
    """Return whether a value depends on a state, such as a step counter."""
    return any(_is_input(each, InputKind.STATE) for each in _leaves(node, nodes))


def _is_rate(node: Node, nodes: Sequence[Node]) -> bool:
    return any(_is_input(each, InputKind.HYPER) and info(each).source.key == "lr" for each in _leaves(node, nodes))  # pyright: ignore[reportOptionalMemberAccess]


def _leaves(node: Node, nodes: Sequence[Node]) -> set[Node]:
    inside = set(nodes)
    made = _sources([node], nodes)
    return {each for inner in made for each in inner.all_input_nodes if each not in inside} | ({node} - inside)


def _is_input(node: Node, kind: InputKind) -> bool:
    source = info(node).source if has_info(node) else None
    return source is not None and source.kind is kind
