"""Edit a graph and find its nodes by role."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.cluster.cluster import Level
from fxcomp.graph.info import InputKind, NodeInfo, Role, has_info, info, set_info, update_info
from fxcomp.graph.ops import COLLECTIVE_KINDS, D2H, H2D, MOVES, PACK, WAIT
from fxcomp.plan.kinds import CollectiveKind


def clone(gm: GraphModule) -> GraphModule:
    """Copy a graph module's nodes; parameters and metadata values are shared."""
    return compat.graph_module(gm, compat.copied(gm.graph.nodes), type(gm).__name__)


def call(
    graph: Graph,
    target: Any,
    args: tuple[Any, ...],
    label: NodeInfo,
    *,
    name: str | None = None,
    kwargs: dict[str, Any] | None = None,
    value: Any = None,
) -> Node:
    """Insert a call at the graph's insertion point.

    `value` is the fake value. By default it is computed from the arguments' fakes, which is slow for some operators.
    """
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    if value is None:
        return set_info(refresh_value(node), label)
    node.meta["val"] = value
    return set_info(node, label)


def refresh_value(node: Node) -> Node:
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*args, **kwargs)
    return node


def placeholder(graph: Graph, name: str, value: torch.Tensor, label: NodeInfo) -> Node:
    """Add an input after the last input."""
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), None)
    first = next(iter(graph.nodes))
    with graph.inserting_before(first) if last is None else graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta["val"] = value
    return set_info(node, label)


def gradients(gm: GraphModule) -> dict[str, Node]:
    """Return the nodes that compute local gradients, by parameter name, in the order of backward."""
    return {str(info(n).parameter): n for n in gm.graph.nodes if has_info(n) and info(n).role is Role.GRADIENT}


def count_of(gm: GraphModule) -> Node | None:
    """Return the node with this rank's count of elements; None unless the loss is weighted."""
    for node in gm.graph.find_nodes(op="placeholder"):
        source = info(node).source if has_info(node) else None
        if source is not None and source.kind is InputKind.COUNT:
            return next(iter(node.users))
    return None


def has_scale(gm: GraphModule) -> bool:
    sources = [info(node).source for node in gm.graph.find_nodes(op="placeholder") if has_info(node)]
    return any(source is not None and source.kind is InputKind.SCALE for source in sources)


def with_parts(gradient: Node) -> Iterator[Node]:
    """Yield a gradient and the nodes that select parts of it."""
    yield gradient
    for user in gradient.users:
        if has_info(user) and info(user).role is Role.PART:
            yield from with_parts(user)


def result_of(node: Node) -> Node | None:
    """Return the node that a getitem node indexes; None for other nodes."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, Node) else None


def last_result(node: Node) -> Node:
    """Return the last of the consecutive getitem nodes after `node` that take results of the same operator."""
    source = result_of(node) or node
    results = [user for user in source.users if result_of(user) is source]
    while node.next in results:
        node = node.next
    return node


def is_collective(node: Node) -> bool:
    return node.op == "call_function" and node.target in COLLECTIVE_KINDS and not is_exchange(node)


def is_exchange(node: Node) -> bool:
    return has_info(node) and info(node).role is Role.EXCHANGE


def must_stay(node: Node) -> bool:
    """Return whether a node must stay even if unused: it has side effects, or other ranks wait for it."""
    source: Any = node.args[0] if node.target is WAIT else node
    moves = isinstance(source, Node) and source.op == "call_function" and source.target in MOVES
    return moves or compat.has_effect(node) or is_exchange(node)


def collective_kind(collective: Node) -> CollectiveKind:
    target: Any = collective.target
    return COLLECTIVE_KINDS[target]


def level_of(collective: Node) -> Level:
    return Level(str(collective.args[-1]))


def sent_bytes(collective: Node) -> int:
    """Return the bytes that determine a collective's price: the largest part if parts are joined, else the input."""
    value, cut = cast("tuple[Any, Any]", collective.args[:2])
    if collective.target in MOVES and not collective_kind(collective).splits:
        return max(cut) * value.meta["val"].element_size()
    return value_bytes(value)


def value_bytes(node: object) -> int:
    assert isinstance(node, Node), "a collective carries a node"
    value = node.meta["val"]
    return value.numel() * value.element_size()


def nodes_on_host(gm: GraphModule) -> set[Node]:
    """Return the nodes between a copy to the host and the copy back."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        follows = bool(found) and node.target is not H2D and any(source in found for source in node.all_input_nodes)
        if node.target is D2H or follows:
            found.add(node)
    return found


def wait_of(collective: Node) -> Node:
    waits = [user for user in collective.users if user.target is WAIT]
    assert len(waits) == 1, f"{collective.name} is awaited {len(waits)} times"
    return waits[0]


def collective_of(gradient: Node) -> Node | None:
    return next((user for user in gradient.users if is_collective(user)), None)


def mean_of(gradient: Node) -> Any:
    """Return the fake value of a gradient's mean; of the gradient itself if it is not sent."""
    reduction = collective_of(gradient)
    return (gradient if reduction is None else reduction).meta["val"]


def slot_text(node: Node) -> str:
    """Format a node's bucket, and its slot unless 0: `3`, `3_1`."""
    return f"{info(node).bucket}_{info(node).slot}" if info(node).slot else f"{info(node).bucket}"


def buckets(gm: GraphModule) -> Iterator[tuple[int, Node]]:
    for node in gm.graph.nodes:
        if node.target is PACK and (number := info(node).bucket) is not None:
            yield number, node


SHARE = "share"
"""Name of the node that holds the factor of a weighted loss's gradients.

The factor is the number of ranks / the number of elements over which the losses of all ranks sum.
"""

_aten = torch.ops.aten


def multiply_gradients(gm: GraphModule, factor: Node, name: str) -> None:
    """Multiply all gradients by a factor: in their pack nodes, or in new nodes called `name` if there are no packs.

    Sums over micro-batches are multiplied before they are rounded to a narrower type, since they may overflow fp16.
    """
    local = gradients(gm)
    rounded = [gradient for gradient in local.values() if _is_rounded(gradient)]
    for gradient in rounded:
        _multiply_before(gm, gradient, factor, name)
    types = {gradient.meta["val"].dtype for gradient in rounded}
    packs = [pack for _, pack in buckets(gm)]
    for pack in packs:  # a pack holds gradients of one type
        if pack.meta["val"].dtype not in types:
            pack.update_kwarg("factor", factor)
    if not packs:
        for parameter, gradient in local.items():
            if gradient not in rounded:
                _multiply(gm, parameter, gradient, factor, name)


def _is_rounded(gradient: Node) -> bool:
    """Return whether a gradient is rounded from a sum over micro-batches in a wider type."""
    source = gradient.args[0] if gradient.args else None
    if gradient.target is not _aten._to_copy.default or not isinstance(source, Node):
        return False
    total = source.args[0] if source.target is _aten.add_.Tensor else None
    known = info(total).source if isinstance(total, Node) else None
    return known is not None and known.kind is InputKind.SUM


def _multiply_before(gm: GraphModule, gradient: Node, factor: Node, name: str) -> None:
    (total,) = gradient.all_input_nodes
    with gm.graph.inserting_after(total):
        product = call(gm.graph, _aten.mul.Tensor, (total, factor), info(total), name=name)
    gradient.replace_input_with(total, product)


def _multiply(gm: GraphModule, parameter: str, gradient: Node, factor: Node, name: str) -> None:
    users = list(gradient.users)
    update_info(gradient, role=Role.COMPUTE)
    with gm.graph.inserting_after(gradient):
        label = NodeInfo(Role.GRADIENT, parameter)
        product = call(gm.graph, _aten.mul.Tensor, (gradient, factor), label, name=name)
    for user in users:
        user.replace_input_with(gradient, product)
