"""Drop everything after the sums of gradients, for a micro-batch that does not end its group.

      %summed_1  gradient  f32[4,2]  aten.add_.Tensor(%sum_fc_weight, %mm)  fc.weight
    - %sub_      update    f32[4,2]  aten.sub_.Tensor(%fc_weight, %summed_1)  fc.weight
    - %sub__1    update    f32[4]    aten.sub_.Tensor(%fc_bias, %summed)      fc.bias

Runs before any reduction is inserted. Writes and communication of the forward pass stay.
"""

from __future__ import annotations

from torch.fx import GraphModule

from fxcomp.graph.edit import must_stay
from fxcomp.graph.info import InputKind, Role, info

_OF_UPDATES = (InputKind.STATE, InputKind.HYPER)


def end_at_sums(gm: GraphModule) -> GraphModule:
    for node in reversed(list(gm.graph.nodes)):
        if info(node).role in (Role.CLIP, Role.UPDATE):
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code(must_stay)
    for node in gm.graph.find_nodes(op="placeholder"):
        source = info(node).source
        if source is not None and source.kind in _OF_UPDATES and not node.users:
            gm.graph.erase_node(node)
    return gm
