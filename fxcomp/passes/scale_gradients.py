"""Multiply gradients by a factor, a graph input, while they are packed.

    + %factor  input  f32[]    factor
    - %pack_0  pack   f32[12]  pack([%sum_1, %mm], 1.0)
    + %pack_0  pack   f32[12]  pack([%sum_1, %mm], 1.0, factor=%factor)

Residuals are then in units of the mean gradient. Sums over micro-batches may overflow fp16, so the factor is
applied before rounding. A single rank has no packs and multiplies each gradient:

    + %scaled    gradient  f32[4]    aten.mul.Tensor(%sum_1, %factor)  fc.bias

If the loss has a count (`weigh_gradients.py`), the factor multiplies %share instead of the gradients.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from fxcomp.graph.edit import SHARE, call, count_of, gradients, has_scale, multiply_gradients, placeholder
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, info


def scale_gradients(gm: GraphModule, micro_batches: int) -> GraphModule:
    local = gradients(gm)
    # The factor divides by the loss scale and, unless the loss has a count, by the number of micro-batches.
    is_scaled = has_scale(gm) or (micro_batches > 1 and count_of(gm) is None)
    if not is_scaled or not local:
        return gm
    fresh = next(iter(local.values())).meta["val"].new_empty((), dtype=torch.float32)
    label = NodeInfo(Role.INPUT, source=Source(InputKind.FACTOR))
    factor = placeholder(gm.graph, "factor", fresh, label)
    share = next((node for node in gm.graph.nodes if node.name == SHARE), None)
    if share is None:
        multiply_gradients(gm, factor, "scaled")
        return gm
    users = list(share.users)
    with gm.graph.inserting_after(share):
        product = call(gm.graph, torch.ops.aten.mul.Tensor, (share, factor), info(share), name="scaled_share")
    for user in users:
        user.replace_input_with(share, product)
    return gm
