"""Replace gradients that are casts of 16-bit values by the 16-bit values.

      %view                   compute     bf16[4]  aten.view(%sum_2, [4])
    ...
    - %all_reduce_default_1   collective  f32[4]   all_reduce(%_to_copy_6, avg, world)  bias
    + %alias_default_1        gradient    bf16[4]  aten.alias(%view)  bias
    + %all_reduce_default_1   collective  f32[4]   all_reduce(%alias_default_1, avg, world)  bias
      %wait_tensor_default_1  wait        f32[4]   wait(%all_reduce_default_1)  bias

The mean stays fp32, because packs cast to fp32. Since regions return 16-bit values, no compiler can drop the rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule

from fxcomp.graph.edit import call, collective_of, gradients, must_stay
from fxcomp.graph.exact_type import narrow_types, narrowed
from fxcomp.graph.info import NodeInfo, Role, update_info
from fxcomp.plan.kinds import ElementType


def narrow_gradients(gm: GraphModule, exact: Mapping[str, ElementType]) -> GraphModule:
    """Narrow the gradients named in `exact`, each to its 16-bit type.

    Skip a gradient that is no cast here. `Plan.check_covers` rejects a plan that sends it in 16 bits.
    """
    if not exact:
        return gm
    for name, gradient in gradients(gm).items():
        if name not in exact:
            continue
        narrow = exact[name].narrow
        assert narrow is not None, "an exact gradient has a 16-bit type"
        reduction = collective_of(gradient)
        if reduction is None or narrow not in narrow_types(gradient):  # a single rank sends nothing
            continue
        with gm.graph.inserting_before(reduction):
            source = narrowed(gm.graph, gradient, narrow)
            alias = call(gm.graph, torch.ops.aten.alias.default, (source,), NodeInfo(Role.GRADIENT, name))
        update_info(gradient, role=Role.COMPUTE)
        reduction.replace_input_with(gradient, alias)
    gm.graph.eliminate_dead_code(must_stay)
    return gm
