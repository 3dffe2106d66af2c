"""Drop every node whose value nobody needs.

    %a  compute  f32[4]  relu(%x)
    %b  compute  f32[4]  neg(%x)
    output(%a)
 -->
    %a  compute  f32[4]  relu(%x)
    output(%a)

Nodes that write in place or draw random numbers stay: eager PyTorch would have written and drawn too. So do the loss
function's own collectives: another rank may need the value.
"""

from __future__ import annotations

from torch.fx import GraphModule

from fxcomp.graph.edit import must_stay


def remove_dead_nodes(gm: GraphModule) -> GraphModule:
    gm.graph.eliminate_dead_code(must_stay)
    return gm
