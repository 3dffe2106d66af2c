"""Say on which stream each node runs.

   %p   pack        f32[12]
   %c   compress    …
   %r   collective  u8[40]    all_gather(%y, 2, world)
-->
   %p   pack        f32[12]                              compute
   %c   compress    …                                    compute     (cpu between copies to the host and back)
   %r   collective  u8[40]    all_gather(%y, 2, world)   inter       (intra, if all ranks sit on one host)
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.graph.edit import level_of, nodes_on_host
from fxcomp.graph.info import info, update_info
from fxcomp.graph.lines import LAUNCH, line_of
from fxcomp.plan.streams import Stream


def assign_streams(gm: GraphModule, cluster: Cluster) -> GraphModule:
    on_host = nodes_on_host(gm)
    for node in gm.graph.nodes:
        update_info(node, stream=_stream(node, node in on_host, cluster))
    return gm


def _stream(node: Node, on_host: bool, cluster: Cluster) -> Stream:
    line = line_of(node)
    if line is None:  # a part of a result is where the whole is
        source = node.args[0] if node.target is operator.getitem else None
        return info(source).stream or Stream.COMPUTE if isinstance(source, Node) else Stream.COMPUTE
    if line is LAUNCH:
        return Stream.INTRA if level_of(node) is Level.INTRA or cluster.hosts == 1 else Stream.INTER
    return Stream.COMPUTE if line.stream is Stream.CPU and not on_host else line.stream
