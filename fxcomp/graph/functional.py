"""Remove in-place operators from a traced forward and backward pass.

    %empty      f32[4,8]  empty_like(%x)
    %mask       f32[4,8]  bernoulli_(%empty, 0.9)          stays: fills fresh memory in eager's order
    %add_       f32[4,8]  add_(%mm, %bias)
    %counted    i64[]     add_(%num_batches, 1)
 -->
    %empty      f32[4,8]  empty_like(%x)
    %mask       f32[4,8]  bernoulli_(%empty, 0.9)
    %add        f32[4,8]  add(%mm, %bias)
    %counted    i64[]     add(%num_batches, 1)
    %copy_      i64[]     copy_(%num_batches, %counted)    at the end

If views of written values exist, forward and backward are traced again under torch.func.functionalize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat


def functional(
    traced: GraphModule, inputs: Sequence[Any], mode: compat.FakeMode, retracing: Callable[[], None]
) -> GraphModule:
    """Remove in-place operators, except random fills of fresh memory and copies into inputs.

    `mode` makes fakes of constants. `retracing` is called at the start of a second trace.
    """
    _look_instead_of_turning(traced)
    writes = [
        node for node in traced.graph.nodes if compat.is_operator(node.target) and compat.is_in_place(node.target)
    ]
    plain = _plain_writes(writes)
    if plain is None:
        _keep_strides(traced, writes)
        return compat.trace_functional(traced, inputs, mode, retracing)
    for node, (target, value) in plain.items():
        node.target = target
        node.meta["val"] = value
    last = {root: node for node in writes if (root := _root(node, plain)).op == "placeholder"}
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    for written in sorted(last, key=order.__getitem__):
        with traced.graph.inserting_before(traced.graph.output_node()):
            copy = traced.graph.call_function(torch.ops.aten.copy_.default, (written, last[written]))
        copy.meta["val"] = written.meta["val"]
    return traced


_VIEWS: dict[Any, Any] = {
    torch.ops.aten.transpose_.default: torch.ops.aten.transpose.int,
    torch.ops.aten.t_.default: torch.ops.aten.t.default,
    torch.ops.aten.squeeze_.default: torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze_.dim: torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze_.dims: torch.ops.aten.squeeze.dims,
    torch.ops.aten.unsqueeze_.default: torch.ops.aten.unsqueeze.default,
    torch.ops.aten.as_strided_.default: torch.ops.aten.as_strided.default,
    torch.ops.aten.detach_.default: torch.ops.aten.detach.default,
}
"""In-place changes of a shape, and the equivalent views."""


def _look_instead_of_turning(traced: GraphModule) -> None:
    """Replace in-place changes of a shape by views, so that a node's shape never changes.

    A `sym_size(%stack, 1)` after `transpose_(%stack, 0, 1)` would return the size after the transpose, but may mean the
    size before the transpose.
    """
    for node in traced.graph.nodes:
        if node.target in _VIEWS and node.args[0].op != "placeholder":
            node.target = _VIEWS[node.target]


def _keep_strides(traced: GraphModule, writes: Sequence[Node]) -> None:
    """Keep the strides of written tensors, because the order of random fills depends on strides.

    `masked_fill(%x)` is contiguous where `masked_fill_(%x)` was not.
    """
    for node in writes:
        new, place = compat.functional_operator(cast("Any", node.target)), node.args[0] if node.args else None
        if new is None or not isinstance(place, Node) or compat.is_random(node.target):
            continue
        before = node.meta["val"]
        if not isinstance(before, Tensor) or before.is_contiguous():
            continue
        value = _value(new, node, {})
        if value.shape == before.shape and value.stride() != before.stride():
            with traced.graph.inserting_before(node):
                made = traced.graph.call_function(new, node.args, node.kwargs)
            made.meta["val"] = value
            node.target, node.args, node.kwargs = torch.ops.aten.copy_.default, (place, made), {}


_Plain = dict[Node, tuple[Any, Any]]
"""For each in-place write: the operator that replaces it, and that operator's value."""


def _plain_writes(writes: Sequence[Node]) -> _Plain | None:
    """Return the replacements of all writes; None if the pass must be traced again."""
    plain: _Plain = {}
    for node in writes:
        target, place = cast("Any", node.target), node.args[0] if node.args else None
        if not isinstance(place, Node) or list(place.users) != [node]:
            return None
        if compat.written_arguments(target) != (target._schema.arguments[0].name,):
            return None
        if compat.is_random(target) and _is_fresh(place):
            plain[node] = target, node.meta["val"]
            continue
        new = compat.functional_operator(target)
        if new is None or not (place in plain or place.op == "placeholder" or _is_fresh(place)):
            return None
        value = _value(new, node, plain)
        if not _alike(value, node.meta["val"]):
            return None
        plain[node] = new, value
    return plain


def _root(node: Node, plain: _Plain) -> Node:
    while node in plain:
        node = cast("Node", node.args[0])
    return node


def _is_fresh(place: Node) -> bool:
    """Return whether an operator allocated its result and shares it with no argument."""
    target = place.target
    if place.op != "call_function" or not compat.is_operator(target):
        return False
    is_single = isinstance(place.meta.get("val"), Tensor)
    return is_single and not compat.is_in_place(target) and not compat.is_view(target) and target not in _SHARES


_SHARES = (torch.ops.aten._unsafe_view.default,)  # pyright: ignore[reportPrivateUsage]  # an operator's name
"""Operators whose result shares memory with an argument although their schema does not declare it."""


def _value(target: Any, node: Node, plain: _Plain) -> Any:
    def now(used: Node) -> Any:
        return plain[used][1] if used in plain else used.meta["val"]

    args, kwargs = map_arg((node.args, node.kwargs), now)
    return target(*args, **kwargs)


def _alike(value: Any, before: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(before, Tensor):
        return False
    return value.dtype is before.dtype and value.shape == before.shape and value.stride() == before.stride()
