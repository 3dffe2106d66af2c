"""Prove that fp32 gradients are casts of 16-bit values, and rebuild the 16-bit values.

    %mm      bf16[16,8]  mm(%t_18, %view)
    %t       bf16[8,16]  t(%mm)
    %cast    f32[8,16]   _to_copy(%t, dtype=float32)    every value is a bf16 number
    %view_1  f32[128]    view(%cast, [128])             so is every value here
    %add     f32[8,16]   add(%cast, %other)             not proved: a sum in fp32
 -->
    %view_2  bf16[128]   view(%t, [128])                the 16-bit value of %view_1

Proofs follow casts to a wider type, operators that move values, and constants that both types represent.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.graph.captured import written_nodes
from fxcomp.graph.edit import call, gradients
from fxcomp.graph.info import NodeInfo, Role, alike
from fxcomp.graph.work import operator_text

aten = torch.ops.aten

NARROW = frozenset({torch.bfloat16, torch.float16})
_WIDE = (torch.float32, torch.float64)
_NONE: frozenset[torch.dtype] = frozenset()

_MOVES = frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default),
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default, aten.clone.default),
        *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.detach.default),
        *(aten.slice.Tensor, aten.select.int, aten.flip.default, aten.split.Tensor, aten.split_with_sizes.default),
    }
)
"""Operators whose results contain values of their first argument, and no others."""

_PADS = frozenset({aten.slice_backward.default, aten.select_backward.default})
"""Operators that add zeros to the values of their first argument."""

_JOINS = frozenset({aten.cat.default, aten.stack.default})
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})

MOST_LAYERS = 6
"""Maximum number of layers that a note lists for one operator."""


def exact_types(gm: GraphModule) -> dict[str, torch.dtype]:
    """Return the 16-bit type of the fp32 gradients that are casts of 16-bit values, by parameter name."""
    fp32 = {name: node for name, node in gradients(gm).items() if node.meta["val"].dtype is torch.float32}
    found = {name: narrow_types(node) for name, node in fp32.items()}
    return {name: next(iter(types)) for name, types in found.items() if len(types) == 1}


def narrow_types(node: Node) -> frozenset[torch.dtype]:
    """Return the 16-bit types that represent every value of a node: fp16 and bf16 if all values are zero."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.dtype in NARROW:
        return frozenset({value.dtype})
    if node.op != "call_function" or _is_written(node):
        return _NONE
    if node.target in _ZEROS:
        return NARROW
    if isinstance(value, Tensor) and value.dtype not in _WIDE:
        return _NONE
    if node.target in _JOINS:
        parts = cast("Sequence[Node]", node.args[0])
        return NARROW.intersection(*map(narrow_types, parts))
    if node.target is aten.constant_pad_nd.default:
        padded_by, *_ = *node.args[2:], node.kwargs.get("value", 0)
        return narrow_types(cast("Node", node.args[0])) if padded_by == 0 else _NONE
    if (source := _cast_of(node)) is not None:
        return narrow_types(source)
    if node.target in _MOVES or node.target in _PADS or node.target is operator.getitem:
        return narrow_types(cast("Node", node.args[0]))
    return _NONE


def _is_written(node: Node) -> bool:
    """Return whether an operator writes a node's value, or a view of the value, in place."""
    views = (user for user in node.users if compat.is_operator(user.target) and compat.is_view(user.target))
    return any(node in written_nodes(user) for user in node.users) or any(map(_is_written, views))


def _cast_of(node: Node) -> Node | None:
    """Return the input of a cast that keeps shape, strides and device; None for other nodes."""
    if node.target not in (aten._to_copy.default, aten.copy.default):
        return None
    found = node.args[node.target is aten.copy.default]  # copy has its target first
    if not isinstance(found, Node):
        return None
    before, after = found.meta["val"], node.meta["val"]
    is_alike = (before.shape, before.stride(), before.device) == (after.shape, after.stride(), after.device)
    return found if is_alike and before.dtype.is_floating_point else None


def narrowed(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """Insert the 16-bit value of a node at the graph's insertion point. `dtype` is one of its `narrow_types`."""
    if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dtype is dtype:
        return node
    if (source := _cast_of(node)) is not None:
        return narrowed(graph, source, dtype)
    label = NodeInfo(Role.COMPUTE)
    if node.target in _ZEROS:
        value = node.meta["val"].to(dtype)
        return call(graph, node.target, node.args, label, kwargs={**node.kwargs, "dtype": dtype}, value=value)
    if node.target in _JOINS:
        parts = [narrowed(graph, part, dtype) for part in cast("Sequence[Node]", node.args[0])]
        return call(graph, node.target, (parts, *node.args[1:]), label, kwargs=dict(node.kwargs))
    source = narrowed(graph, cast("Node", node.args[0]), dtype)
    return call(graph, node.target, (source, *node.args[1:]), label, kwargs=dict(node.kwargs))


def proof_note(gm: GraphModule, exact: Collection[str]) -> str:
    """Describe which gradients are `exact` and which are not: their operators, sizes and layers."""
    if not exact:
        return ""
    sizes: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    layers: dict[tuple[bool, str], dict[str, None]] = {}
    found = gradients(gm)
    in_both = {alike(name) for name in found if name in exact} & {alike(name) for name in found if name not in exact}
    for name, node in found.items():
        kind = name in exact, computed_by(node)
        sizes[kind[0]][kind[1]] += int(node.meta["val"].numel())
        layers.setdefault(kind, {})[name if alike(name) in in_both else alike(name)] = None

    def listed(*, is_exact: bool) -> str:
        texts: list[str] = []
        for operator_name, size in sizes[is_exact].most_common():
            names = list(layers[is_exact, operator_name])
            more = ", ..." if len(names) > MOST_LAYERS else ""
            texts.append(f"{operator_name} ({size:,}: {', '.join(names[:MOST_LAYERS])}{more})")
        return ", ".join(texts)

    share = sizes[True].total() / (sizes[True].total() + sizes[False].total())
    others = f" Not so: {listed(is_exact=False)}, in fp32." if sizes[False] else ""
    return (
        f"{share:.1%} of the gradients' values are casts of 16-bit values, which 16 bits hold without error: those"
        f" computed by {listed(is_exact=True)}.{others}"
    )


def computed_by(node: Node) -> str:
    """Return the operator that computes a gradient, before casts and moves."""
    moves = (*_MOVES, *_PADS, operator.getitem)
    while node.op == "call_function":
        source = cast("Node", node.args[0]) if node.target in moves else _cast_of(node)
        if source is None:
            break
        node = source
    return operator_text(node.target)
