"""Recompute cheap values of the forward pass in the backward pass, to save memory.

    - %mul_3                  compute     f32[5,4]    aten.mul.Tensor(%mm_2, %silu)
    + %silu_again             compute     f32[5,4]    aten.silu(%mm)
    + %mul_3                  compute     f32[5,4]    aten.mul.Tensor(%mm_2, %silu_again)
      %mul_4                  compute     f32[5,4]    aten.mul.Tensor(%mm_2, %mm_1)

Runs where Inductor compiles regions, because there an elementwise operator costs about as much as reading its result.
Inductor recomputes only inside a region.

A value is recomputed if

1. a few elementwise operators make it from parameters, the batch, or values that are kept in any case;
2. backward reads it only in elementwise operators and sums, since a matrix product needs it in memory;
3. neither the value nor its inputs are random or written in place.

So memory never increases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.graph.captured import written_nodes
from fxcomp.graph.info import Role, info
from fxcomp.graph.kernels import is_view, memory_of
from fxcomp.graph.regions import BODY

MOST_OPERATORS = 12
"""Maximum number of operators that recompute one value."""


def recompute_in_backward(gm: GraphModule, devices: Collection[str]) -> GraphModule:
    nodes = list(gm.graph.nodes)
    outputs: Any = nodes[-1].args[0]
    loss = outputs[0]
    if not isinstance(loss, Node) or loss.op != "call_function" or loss.meta["val"].device.type not in devices:
        return gm
    recomputation = _Recomputation(nodes, nodes.index(loss) + 1)
    for node in nodes[: recomputation.turn]:
        operators = recomputation.operators_for(node)
        if operators is not None:
            recomputation.repeat(gm, node, operators)
    return gm


class _Recomputation:
    """The values that backward recomputes. Nodes from index `turn` on follow the loss."""

    def __init__(self, nodes: Sequence[Node], turn: int) -> None:
        self.turn = turn
        self._nodes = nodes
        self._place = {node: place for place, node in enumerate(nodes)}
        plain = [node for node in nodes if info(node).role is not Role.UPDATE]
        self._written = {memory_of(place) for node in plain for place in written_nodes(node)}
        self._views: dict[Node, list[Node]] = {}
        """Nodes that share the memory of each value of forward, itself included."""
        for node in nodes[:turn]:
            self._views.setdefault(memory_of(node), []).append(node)
        self._users = {node: [user for user in node.users if self._place[user] >= turn] for node in nodes[:turn]}
        self._readers = {value: list(self._readers_of(value)) for value in self._views}
        """Nodes after forward that read each value, possibly through views."""
        self._copies: dict[Node, Node] = {}
        """Copies of recomputed values, and of their views."""

    def operators_for(self, value: Node) -> Sequence[Node] | None:
        """Return the operators that recompute a value for backward, or None if the value must be kept."""
        readers = self._readers.get(value)
        if not readers or not _is_elementwise(value) or not all(map(_reads_elementwise, readers)):
            return None
        first, found, todo = self._first_use(value), set[Node](), [value]
        while todo:
            node = todo.pop()
            found.add(node)
            is_cheap = _is_elementwise(node) or is_view(node)
            if not is_cheap or memory_of(node) in self._written or len(found) > MOST_OPERATORS:
                return None
            todo += [each for each in node.all_input_nodes if each not in found and not self._is_there(each, first)]
        return sorted(found, key=self._place.__getitem__)

    def repeat(self, gm: GraphModule, value: Node, operators: Sequence[Node]) -> None:
        own: dict[Node, Node] = {}

        def now(node: Node) -> Node:
            return own.get(node) or self._copies.get(node, node)

        def copy(node: Node) -> None:
            args, kwargs = map_arg((node.args, node.kwargs), now)
            own[node] = gm.graph.create_node(node.op, cast("Any", node.target), args, kwargs, f"{node.name}_again")
            own[node].meta = dict(node.meta)

        views = [node for node in self._views[value] if node is not value and self._leads_to_backward(node)]
        with gm.graph.inserting_before(self._nodes[self._first_use(value)]):
            for node in (*operators, *views):
                copy(node)
        for node in (value, *views):
            self._copies[node] = own[node]
            for user in self._users[node]:
                user.replace_input_with(node, own[node])

    def _is_there(self, node: Node, first: int) -> bool:
        """Return whether backward can read a value at index `first` without keeping it longer."""
        if node.op in ("placeholder", "get_attr"):
            return node not in self._written
        if not isinstance(node.meta.get("val"), Tensor):
            return isinstance(node.meta.get("val"), int | torch.SymInt)
        root = memory_of(node)
        is_kept = node is root or node in self._copies or bool(self._users[node])
        readers = self._readers[root]
        if root in self._written or not is_kept or not readers:
            return False
        is_made = root not in self._copies or self._first_use(root) <= first
        return is_made and max(map(self._place.__getitem__, readers)) >= first

    def _first_use(self, value: Node) -> int:
        return min(self._place[user] for view in self._views[value] for user in self._users[view])

    def _readers_of(self, value: Node) -> Iterator[Node]:
        todo = [user for view in self._views[value] for user in self._users[view]]
        while todo:
            user = todo.pop()
            if is_view(user):
                todo += user.users
            else:
                yield user

    def _leads_to_backward(self, view: Node) -> bool:
        inner = (user for user in view.users if self._place.get(user, self.turn) < self.turn and is_view(user))
        return bool(self._users[view]) or any(map(self._leads_to_backward, inner))


_CAST = torch.ops.aten._to_copy.default  # pyright: ignore[reportPrivateUsage]


def _is_elementwise(node: Node) -> bool:
    """Return whether Inductor computes a value inside its readers' kernels."""
    target: Any = node.target
    if not compat.is_operator(target) or info(node).role is not Role.COMPUTE:
        return False
    is_quiet = not (compat.is_in_place(target) or compat.is_random(target) or compat.checks_values(node))
    return is_quiet and isinstance(node.meta.get("val"), Tensor) and (compat.is_pointwise(target) or _casts(node))


def _casts(node: Node) -> bool:
    return node.target is _CAST and "device" not in node.kwargs


def _reads_elementwise(node: Node) -> bool:
    """Return whether Inductor computes a node's inputs inside the node's kernel."""
    target: Any = node.target
    if not compat.is_operator(target) or compat.is_in_place(target) or info(node).role not in BODY:
        return False
    return compat.is_bound_by_memory(target) or _casts(node)
