"""Drop every node with an unused value.

      %relu  compute  f32[4]  aten.relu(%x)
    - %neg   compute  f32[4]  aten.neg(%x)
    - %exp   compute  f32[4]  aten.exp(%neg)
      output(%relu, ())

In-place writes and random draws stay, as in eager PyTorch. Collectives stay, because other ranks may wait for them.
"""

from __future__ import annotations

from torch.fx import GraphModule

from fxcomp.graph.edit import must_stay


def remove_dead_nodes(gm: GraphModule) -> GraphModule:
    gm.graph.eliminate_dead_code(must_stay)
    return gm
