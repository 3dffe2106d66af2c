"""Drop every node whose value nobody needs.

      %relu  compute  f32[4]  aten.relu(%x)
    - %neg   compute  f32[4]  aten.neg(%x)
    - %exp   compute  f32[4]  aten.exp(%neg)
      output(%relu, ())

Nodes that write in place or draw random numbers stay: eager PyTorch would have written and drawn too. So do the loss
function's own collectives, and those whose parts differ between ranks: another rank may need the value.
"""

from __future__ import annotations

from torch.fx import GraphModule

from fxcomp.graph.edit import must_stay


def remove_dead_nodes(gm: GraphModule) -> GraphModule:
    gm.graph.eliminate_dead_code(must_stay)
    return gm
