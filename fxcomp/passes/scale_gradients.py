"""Multiply gradients by a number that is known when the step runs, while they are packed.

    + %factor  input  f32[]    factor
    - %pack_0  pack   f32[12]  pack([%sum_1, %mm], 1.0)
    + %pack_0  pack   f32[12]  pack([%sum_1, %mm], 1.0, factor=%factor)

Whatever the factor is, what is packed is in the unit of the mean gradient, and so is what compression leaves out. A
sum that is rounded to a gradient's type is multiplied before that: in fp16 it may be too large. One rank alone has no
packs, and multiplies each gradient:

    + %scaled    gradient  f32[4]    aten.mul.Tensor(%sum_1, %factor)  fc.bias

Where a loss has a count, what weighs gradients is multiplied instead.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from fxcomp.graph.edit import SHARE, call, count_of, gradients, has_scale, multiply_gradients, placeholder
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, info


def scale_gradients(gm: GraphModule, micro_batches: int) -> GraphModule:
    local = gradients(gm)
    # The mean over micro-batches is made by a factor, but of a loss with a count; a scale is taken off by one.
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
