"""Add each gradient to the sum of its group of micro-batches.

    + %sum_fc_bias  input     f32[4]  sum fc.bias
    - %sum_1        gradient  f32[4]  aten.sum.dim_IntList(%mul_1, [0])     fc.bias
    + %sum_1        compute   f32[4]  aten.sum.dim_IntList(%mul_1, [0])     fc.bias
    + %summed       gradient  f32[4]  aten.add_.Tensor(%sum_fc_bias, %sum_1)  fc.bias

Sums are at least fp32 and precede all other use of gradients. The caller resets them to zero after a group. The sum of
narrower gradients is cast back to their type.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxcomp.graph.edit import call, gradients, placeholder
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, free_name, update_info

_aten = torch.ops.aten


def sum_gradients(gm: GraphModule, micro_batches: int) -> GraphModule:
    if micro_batches == 1:
        return gm
    for name, gradient in gradients(gm).items():
        _sum_up(gm, name, gradient)
    return gm


def _sum_up(gm: GraphModule, name: str, gradient: Node) -> None:
    graph, value, users = gm.graph, gradient.meta["val"], list(gradient.users)
    source = NodeInfo(Role.INPUT, name, source=Source(InputKind.SUM, name))
    fresh = value.new_empty(value.shape, dtype=torch.promote_types(value.dtype, torch.float32))
    total = placeholder(graph, free_name(f"sum_{name.replace('.', '_')}"), fresh, source)
    update_info(gradient, role=Role.COMPUTE)
    with graph.inserting_after(gradient):
        summed = call(graph, _aten.add_.Tensor, (total, gradient), NodeInfo(Role.COMPUTE, name), name="summed")
    if value.dtype is not fresh.dtype:
        with graph.inserting_after(summed):
            label = NodeInfo(Role.COMPUTE, name)
            summed = call(graph, _aten._to_copy.default, (summed,), label, kwargs={"dtype": value.dtype})
    update_info(summed, role=Role.GRADIENT)
    for user in users:
        user.replace_input_with(gradient, summed)
