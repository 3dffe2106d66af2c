"""Multiply all gradients by a number that is known when the step runs."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxcomp.graph.edit import buckets, call, gradients
from fxcomp.graph.info import InputKind, NodeInfo, Role, info, update_info

SHARE = "share"
"""The name of what weighs all gradients, where the loss has a count."""

_aten = torch.ops.aten


def multiply_gradients(gm: GraphModule, factor: Node, name: str) -> None:
    """Let packs multiply, where there are any; products that stand alone get a name.

    A sum that is rounded to a gradient's type is multiplied before that: in fp16 it may be too large.
    """
    local = gradients(gm)
    rounded = [gradient for gradient in local.values() if _is_rounded(gradient)]
    for gradient in rounded:
        _multiply_before(gm, gradient, factor, name)
    types = {gradient.meta["val"].dtype for gradient in rounded}
    packs = [pack for _, pack in buckets(gm)]
    for pack in packs:  # of gradients of one type
        if pack.meta["val"].dtype not in types:
            pack.update_kwarg("factor", factor)
    if not packs:
        for parameter, gradient in local.items():
            if gradient not in rounded:
                _multiply(gm, parameter, gradient, factor, name)


def _is_rounded(gradient: Node) -> bool:
    """Tell a gradient that is made of a sum in a wider type."""
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
