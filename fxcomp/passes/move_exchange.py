"""Exchange the optimizer's momentum (its running mean of gradients) instead of gradients.

    - %t_3            gradient    f32[2,3]    aten.t(%t_2)                                                        weight
    - %pack_0         pack        f32[6]      pack([%t_3], 1.0)
    + %t_3            compute     f32[2,3]    aten.t(%t_2)                                                        weight
    + %lerp_scalar    compute     f32[2,3]    aten.lerp.Scalar(%weight_exp_avg, %t_3, %sub_5)                     weight
    + %div_tensor_1   gradient    f32[2,3]    aten.div.Tensor(%lerp_scalar, %add_tensor)                          weight
    + %pack_0         pack        f32[6]      pack([%div_tensor_1], 1.0)
    - %lerp_          update      f32[2,3]    aten.lerp_.Scalar(%weight_exp_avg, %view_default, %sub_1)           weight
    - %addcmul_       update      f32[2,3]    aten.addcmul_(%mul__1, %view_default, %view_default, value=%sub_2)  weight
    + %mul__tensor    update      f32[2,3]    aten.mul_.Tensor(%weight_exp_avg_sq, %mul_3)                        weight
    + %clamp_default  update      f32[2,3]    aten.clamp(%view_default, -10.0, 10.0)                              weight
    + %mul_tensor     update      f32[2,3]    aten.mul.Tensor(%clamp_default, %add__1)                            weight
    + %copy__default  update      f32[2,3]    aten.copy_(%weight_exp_avg, %mul_tensor)                            weight

A rank sends the momentum that its optimizer would compute from the shared momentum and its own gradient, divided by the
root of the second moment. The average over ranks is the next shared momentum, which the update reads. The second moment
is frozen: it grows only with its bias correction, so that its corrected value is constant and the user's optimizer can
resume at any step. Received values are clamped to the bound of Adam's own update.

If an update also uses the gradient, as Nesterov's does, the gradient is computed from old and new momentum:

    + %mul_tensor_1   update      f32[2,3]    aten.mul.Tensor(%weight_momentum_buffer, %momentum)            weight
    + %sub_tensor     update      f32[2,3]    aten.sub.Tensor(%view_default, %mul_tensor_1)                  weight
    + %copy__default  update      f32[2,3]    aten.copy_(%weight_momentum_buffer, %view_default)             weight

Optimizer states are written only after the averages arrive, so a skipped step leaves them unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.errors import Unsupported
from fxcomp.graph.edit import buckets, call, gradients, last_result
from fxcomp.graph.info import NodeInfo, Role, info, update_info
from fxcomp.graph.moments import LARGEST_MEAN, NoMoment, Update, memory_of, updates_of
from fxcomp.graph.update_kinds import name_of
from fxcomp.plan.plan import ExchangePoint, Plan

_aten = torch.ops.aten


def move_exchange(gm: GraphModule, plan: Plan) -> GraphModule:
    moved = set(plan.moved)
    if not moved:
        return gm
    local, updates = gradients(gm), updates_of(gm)
    for name in (name for name in local if name in moved):
        _Move(gm, name, local[name], updates[name]).run()
    for number, pack in list(buckets(gm)):
        if plan.buckets[number].at is ExchangePoint.MOMENTUM:
            pack.kwargs = {key: value for key, value in pack.kwargs.items() if key != "factor"}
    return gm


class _Move:
    """Moves the exchange of one parameter from gradient to momentum."""

    def __init__(self, gm: GraphModule, name: str, local: Node, update: Update) -> None:
        self._graph: Graph = gm.graph
        self._name, self._local, self._update = name, local, update
        try:
            self._moment, self._arrived = update.moment(), update.gradient()
        except NoMoment as error:
            raise self._refused(str(error)) from None

    def _refused(self, why: str) -> Unsupported:
        return Unsupported(
            f"the mean over ranks cannot stand at the momentum: in the update of {self._name!r} {why}.\n"
            '  Leave at="momentum" out, or pass plan.at_gradients() for a plan with it: gradients are exchanged then.'
        )

    def run(self) -> None:
        self._send()
        self._receive()
        if self._update.parameter is not None:
            update_info(self._update.parameter, fused=None)  # the traced update has changed

    def _send(self) -> None:
        moment, local = self._moment, self._local
        users = [user for user in local.users if info(user).role in (Role.PACK, Role.PART)]
        update_info(local, role=Role.COMPUTE)
        own = _Copies(self._graph, last_result(local), NodeInfo(Role.COMPUTE, self._name))
        gradient = self._weighed(own, users)
        sent = own.of(moment.writes[-1], {self._arrived: gradient})
        if moment.magnitude is not None:
            known = dict.fromkeys(moment.magnitude.writes, moment.magnitude.state)
            divisor = own.of(moment.magnitude.divisor, known | self._not_counted())
            sent = own.call(_aten.div.Tensor, sent, divisor)
        update_info(sent, role=Role.GRADIENT)
        for user in users:
            user.replace_input_with(local, sent)

    def _weighed(self, own: _Copies, users: Iterable[Node]) -> Node:
        packs = (pack for user in users for pack in (user, *user.users) if info(pack).role is Role.PACK)
        factor = next((pack.kwargs["factor"] for pack in packs if "factor" in pack.kwargs), None)
        return self._local if factor is None else own.call(_aten.mul.Tensor, self._local, factor)

    def _not_counted(self) -> dict[Node, Node]:
        """Map incremented step counters to the counters before this step."""
        nodes = self._update.nodes
        return {n: memory_of(n) for n in nodes if memory_of(n) in self._update.states and name_of(n) == "add"}

    def _receive(self) -> None:
        moment, label = self._moment, NodeInfo(Role.UPDATE, self._name)
        last, mean = moment.writes[-1], self._arrived
        frozen = self._freeze(label) if moment.magnitude is not None else None
        place = self._places()
        start = max(last, frozen or last, key=place.__getitem__)
        uses = sorted(moment.recovered, key=place.__getitem__)
        if uses and place[uses[0]] < place[start]:
            if frozen is start:
                raise self._refused("the gradient is used before the divisor of the mean is known")
            start = uses[0].prev
        here = _Copies(self._graph, start, label)
        if frozen is not None:
            within = here.call(_aten.clamp.default, mean, -LARGEST_MEAN, LARGEST_MEAN)
            mean = here.call(_aten.mul.Tensor, within, frozen)
        if moment.recovered:
            self._recover(here, mean)
        place = self._places()
        at_last = _Copies(self._graph, max(last, here.last, key=place.__getitem__), label)
        kept = at_last.call(_aten.copy_.default, moment.state, mean)
        for user in [user for user in last.users if user is not kept]:
            user.replace_input_with(last, kept)
        self._erase(moment.writes)

    def _places(self) -> dict[Node, int]:
        return {node: number for number, node in enumerate(self._graph.nodes)}

    def _recover(self, here: _Copies, mean: Node) -> None:
        """Compute the value that entered the momentum, given the momentum before and after."""
        moment = self._moment
        last = moment.writes[-1]
        rest: Any = last.args[0]
        before = here.of(rest, {})
        entered = here.call(_aten.sub.Tensor, mean, before)
        if name_of(last) == "lerp":
            entered = here.call(_aten.add.Tensor, here.call(_aten.div.Tensor, entered, last.args[2]), before)
        else:
            if (alpha := last.kwargs.get("alpha", 1)) != 1:
                entered = here.call(_aten.div.Tensor, entered, alpha)
        for user in moment.recovered:
            user.replace_input_with(moment.entering, entered)

    def _freeze(self, label: NodeInfo) -> Node:
        """Keep the bias-corrected second moment constant. Return the divisor of sent values."""
        magnitude = self._moment.magnitude
        assert magnitude is not None, "there is one to freeze"
        last, kept = magnitude.writes[-1], magnitude.state
        if (correction := magnitude.correction) is not None:
            before = _Copies(self._graph, self._update.nodes[0].prev, label)
            earlier = before.of(correction.number, self._not_counted())
            place = self._places()
            if any(place[user] < place[correction.number] for user in last.users):
                raise self._refused("the second moment is read before its correction is known")
            here = _Copies(self._graph, max(last, correction.number, key=place.__getitem__), label)
            growth = here.call(operator.truediv, correction.number, earlier)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            if correction.power == 2:
                growth = here.call(operator.mul, growth, growth)
            kept = here.call(_aten.mul_.Tensor, magnitude.state, growth)
        for user in [user for user in last.users if user is not kept]:
            user.replace_input_with(last, kept)
        self._erase(magnitude.writes)
        return magnitude.divisor

    def _erase(self, writes: Iterable[Node]) -> None:
        for node in reversed(list(writes)):
            if node.users:
                raise self._refused("an older value is used after it was written")
            self._graph.erase_node(node)
            self._update.nodes.remove(node)


class _Copies:
    """Inserts operators, and out-of-place copies of operators, after a node."""

    def __init__(self, graph: Graph, after: Node, label: NodeInfo) -> None:
        self._graph, self.last, self._label = graph, after, label
        """`last` is the node after which the next node is inserted."""
        self._made: dict[Node, Node] = {}

    def call(self, target: Callable[..., Any], *arguments: Any, **keywords: Any) -> Node:
        with self._graph.inserting_after(self.last):
            self.last = call(self._graph, target, arguments, self._label, kwargs=keywords or None)
        return self.last

    def of(self, node: Node, known: Mapping[Node, Node]) -> Node:
        """Copy an update's node and, recursively, the node's inputs, except nodes that `known` replaces."""
        if node in known:
            return known[node]
        if node.op != "call_function" or info(node).role is not Role.UPDATE:
            return node
        if node not in self._made:
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: self.of(each, known))
            target: Any = node.target
            if compat.is_operator(target) and compat.is_in_place(target):
                target = compat.functional_operator(target)
                assert target is not None, f"{node.target} has a form that changes nothing"
            self._made[node] = self.call(target, *args, **kwargs)
        return self._made[node]
