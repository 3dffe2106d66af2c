"""Clip by the global norm with one norm and one product over a list of buckets, on an accelerator.

    - %linalg_vector_norm    clip  f32[]     aten.linalg_vector_norm(%view_default_1, 2.0)
    - %linalg_vector_norm_1  clip  f32[]     aten.linalg_vector_norm(%view_default, 2.0)
    - %stack                 clip  f32[2]    aten.stack([%linalg_vector_norm, %linalg_vector_norm_1])
    + %_foreach_norm_scalar  clip  (f32[])   aten._foreach_norm.Scalar([%wait_0], 2.0)
    + %getitem_2             clip  f32[]     %_foreach_norm_scalar[0]
    + %stack                 clip  f32[1]    aten.stack([%getitem_2])
    ...
    - %mul_3                 clip  f32[2,3]  aten.mul_.Tensor(%view_default_1, %clamp)
    - %mul_4                 clip  f32[2]    aten.mul_.Tensor(%view_default, %clamp)
    + %_foreach_mul__tensor  clip  NoneType  aten._foreach_mul_.Tensor([%wait_0], %clamp)

Gradients outside of buckets are themselves items of the lists. The norm over buckets differs in the last bits
from the norm over gradients.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.graph.edit import call
from fxcomp.graph.info import NodeInfo, Role, info, set_info

_aten = torch.ops.aten
_LABEL = NodeInfo(Role.CLIP)


def clip_in_lists(gm: GraphModule, *, by_bucket: bool = True) -> GraphModule:
    """Join norms and products; without `by_bucket`, each gradient has a norm of its own."""
    for stack in [node for node in gm.graph.nodes if node.target is _aten.stack.default]:
        norms = cast("list[Node]", stack.args[0])
        is_ours = info(stack).role is Role.CLIP and norms[0].target is _aten.linalg_vector_norm.default
        if is_ours and compat.is_accelerator(stack.meta["val"].device):
            gradients = [cast("Node", norm.args[0]) for norm in norms]
            clips = [user for each in gradients for user in each.users if info(user).role is Role.CLIP]
            products = [user for user in clips if user.target in (_aten.mul.Tensor, _aten.mul_.Tensor)]
            _join_norms(gm.graph, stack, norms, by_bucket=by_bucket)
            _join_products(gm.graph, products)
    return gm


def _join_norms(graph: Graph, stack: Node, norms: Sequence[Node], *, by_bucket: bool) -> None:
    one, wholes = norms[0].meta["val"], dict[Node, None]()
    for norm in norms:
        gradient = cast("Node", norm.args[0])
        wholes |= dict.fromkeys((_buckets_of(gradient) if by_bucket else ()) or [gradient])
    found: list[Node] = []
    with graph.inserting_before(stack):
        for alike in _by_type(wholes):
            keywords = {} if alike[0].meta["val"].dtype is one.dtype else {"dtype": one.dtype}
            values = [one] * len(alike)
            made = call(graph, _aten._foreach_norm.Scalar, (alike, 2.0), _LABEL, kwargs=keywords, value=values)
            found += [call(graph, operator.getitem, (made, k), _LABEL, value=one) for k in range(len(alike))]
    stack.args = (found,)
    stack.meta["val"] = stack.meta["val"].new_empty(len(found))
    for norm in norms:
        graph.erase_node(norm)


def _join_products(graph: Graph, products: Sequence[Node]) -> None:
    """Multiply whole buckets and other gradients in lists.

    Other gradients are changed in place only if their products were.
    """
    buckets = dict[Node, None]()
    others: list[Node] = []
    for product in products:
        gradient, _ = _operands(product)
        if (bucket := _seen_in(gradient)) is None:
            others.append(product)
        else:
            buckets[bucket] = None
    _, factor = _operands(products[0])
    copied = [product for product in others if product.target is _aten.mul.Tensor]
    written = [_operands(product)[0] for product in others if product not in copied]
    with graph.inserting_before(products[0]):
        for alike in _by_type([*buckets, *written]):
            node = graph.create_node("call_function", _aten._foreach_mul_.Tensor, (alike, factor))
            node.meta["val"] = None
            set_info(node, _LABEL)
        results: dict[Node, Node] = {}
        for alike in _by_type(_operands(product)[0] for product in copied):
            values = [node.meta["val"] for node in alike]
            made = call(graph, _aten._foreach_mul.Tensor, (alike, factor), _LABEL, value=values)
            for k, (gradient, value) in enumerate(zip(alike, values, strict=True)):
                results[gradient] = call(graph, operator.getitem, (made, k), _LABEL, value=value)
    for product in products:
        gradient, _ = _operands(product)
        product.replace_all_uses_with(results.get(gradient, gradient))
        graph.erase_node(product)


def _operands(product: Node) -> tuple[Node, Node]:
    return cast("tuple[Node, Node]", product.args)


def _buckets_of(gradient: Node) -> list[Node]:
    """Return the buckets that hold a gradient or its parts."""
    if (bucket := _seen_in(gradient)) is not None:
        return [bucket]
    joined: Any = gradient.args[0] if gradient.target is _aten.view.default else gradient
    if info(gradient).role is not Role.UNPACK or joined.target is not _aten.cat.default:
        return []
    return [bucket for part in joined.args[0] if (bucket := _source_of(part)) is not None]


def _seen_in(gradient: Node) -> Node | None:
    """Return the bucket that a gradient is a view of."""
    return _source_of(gradient.args[0]) if gradient.target is _aten.view.default else None


def _source_of(piece: Any) -> Node | None:
    split: Any = piece.args[0] if isinstance(piece, Node) and piece.target is operator.getitem else None
    if split is None or info(split).role is not Role.UNPACK:
        return None
    return split.args[0] if split.target is _aten.split_with_sizes.default else None


def _by_type(nodes: Iterable[Node]) -> list[list[Node]]:
    found: defaultdict[torch.dtype, list[Node]] = defaultdict(list)
    for node in nodes:
        found[node.meta["val"].dtype].append(node)
    return list(found.values())
