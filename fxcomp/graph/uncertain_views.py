"""Replace views by reshapes where a tensor's strides are uncertain.

    %norm  f32[4,8,16]  native_batch_norm(%x, ...)       its fake has strides like %x, its real result has not
    %view  f32[32,16]   view(%norm, [32, 16])
 -->
    %norm  f32[4,8,16]  native_batch_norm(%x, ...)
    %view  f32[32,16]   reshape(%norm, [32, 16])

Some kernels and devices return other strides than the fake. A reshape is a view wherever possible, so it is free if the
fake was right. `as_strided` raises CaptureFailed unless it changes nothing.
"""

# Operators' names may begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.errors import CaptureFailed

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)

_CERTAIN = frozenset(
    {
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.clone.default),
        *(aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default, aten.arange.start_step),
        *(aten.arange.default, aten.arange.start, aten.rand.default, aten.randn.default, aten.scalar_tensor.default),
        *(aten.cat.default, aten.stack.default, aten.embedding.default, aten.native_layer_norm.default),
        *(aten._softmax.default, aten._log_softmax.default, aten._to_copy.default, aten.gather.default),
        *(aten.sum.dim_IntList, aten.mean.dim, aten._unsafe_view.default, aten.reshape.default),
        *(aten.embedding_dense_backward.default, aten._softmax_backward_data.default),
        *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
        *(aten.new_zeros.default, aten.new_empty.default, aten.new_full.default, aten.new_empty_strided.default),
        *(aten.bernoulli_.float, aten.slice_backward.default, aten.select_backward.default),
        aten.constant_pad_nd.default,
    }
)
"""Operators whose real results have the strides of their fakes, if all arguments have the strides of their fakes.

Elementwise operators qualify too, except _UNCERTAIN. Measured on the CPU: 470 operators with transposed,
channels_last and expanded arguments.
"""

_IN_ROWS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
"""Operators with contiguous results for any arguments."""

_UNCERTAIN = frozenset(
    {
        *(aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.hardswish_backward.default),
        *(aten.hardtanh_backward.default, aten.logit_backward.default, aten.threshold_backward.default),
        *(aten.pow.Scalar, aten.xlogy.Tensor, aten.normal.Tensor_Tensor, aten.native_dropout_backward.default),
        *(aten.mse_loss_backward.default, aten.huber_loss_backward.default, aten.smooth_l1_loss_backward.default),
    }
)
"""Elementwise operators whose real results were found to have other strides than their fakes."""


def reshape_uncertain_views(body: GraphModule, *, inputs_are_certain: bool = True) -> GraphModule:
    """Replace views of tensors with uncertain strides by reshapes, in place.

    Pass `inputs_are_certain=False` for a backward graph, whose inputs are results of the forward graph.
    """
    certain: set[Node] = set()
    for node in body.graph.nodes:
        if node.op != "call_function":
            if inputs_are_certain or node.op != "placeholder" or _lies_in_one_way(node.meta.get("val")):
                certain.add(node)
            continue
        tensor = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if tensor is not None and tensor not in certain:
            if node.target is aten.as_strided.default:
                _refuse_unless_nothing_moves(node, tensor)
                node.target, node.args = aten.alias.default, (tensor,)
            if node.target in _VIEWS:
                node.target, node.args = aten.reshape.default, node.args[:2]
        if _is_certain(node, certain):
            certain.add(node)
    return body


def _is_certain(node: Node, certain: set[Node]) -> bool:
    """Return whether the real results of a node have the strides of their fakes."""
    target, inputs_are = node.target, all(used in certain for used in node.all_input_nodes)
    if not compat.is_operator(target):  # getitem, arithmetic of sizes
        return inputs_are
    if target in _IN_ROWS or _lies_in_one_way(node.meta.get("val")):
        return True
    known = target in _CERTAIN or compat.is_view(target) or (compat.is_pointwise(target) and target not in _UNCERTAIN)
    return known and inputs_are


def _lies_in_one_way(value: object) -> bool:
    """Return whether a fake determines the real strides: a number, a scalar tensor, or a contiguous vector."""
    if not isinstance(value, Tensor):
        return not isinstance(value, tuple | list)
    return value.dim() == 0 or (value.dim() == 1 and not compat.is_open(value.stride(0)) and value.stride(0) == 1)


def _refuse_unless_nothing_moves(node: Node, tensor: Node) -> None:
    """Raise CaptureFailed for as_strided, unless it changes nothing, as in pooling to one pixel."""
    size, stride, *offset = node.args[1:]
    value: Any = tensor.meta["val"]
    wanted, present = (
        [(n, s) for n, s in zip(sizes, strides, strict=False) if n != 1]
        for sizes, strides in ((cast("Any", size), cast("Any", stride)), (value.shape, value.stride()))
    )
    if list(cast("Any", size)) == list(value.shape) and wanted == present and not any(offset):
        return
    maker = tensor
    while not compat.is_operator(maker.target) and isinstance(maker.args[0], Node):  # one of several results
        maker = maker.args[0]
    raise CaptureFailed(
        f"the step uses as_strided on the output of {maker.target}, of shape {tuple(tensor.meta['val'].shape)}; its"
        " layout in memory is known when the step runs, and not when it is captured.\n"
        "  Call .clone(memory_format=torch.contiguous_format) first, or use unfold or indexing instead of as_strided."
    )
