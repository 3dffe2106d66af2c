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

from torch.fx import GraphModule, Node

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.graph.edit import is_collective
from fxcomp.graph.info import Role, info, update_info
from fxcomp.graph.ops import D2H, H2D, SAVE
from fxcomp.plan.streams import Stream


def assign_streams(gm: GraphModule, cluster: Cluster) -> GraphModule:
    on_host: set[Node] = set()
    for node in gm.graph.nodes:
        if node.target is D2H or (node.target is not H2D and any(source in on_host for source in node.all_input_nodes)):
            on_host.add(node)
        update_info(node, stream=_stream(node, node in on_host, cluster))
    return gm


def _stream(node: Node, on_host: bool, cluster: Cluster) -> Stream:
    if is_collective(node):
        level = Level(str(node.args[-1]))
        return Stream.INTRA if level is Level.INTRA or cluster.hosts == 1 else Stream.INTER
    if node.target is D2H:
        return Stream.D2H
    if node.target is H2D:
        return Stream.H2D
    on_pool = (Role.VELOCITY, Role.PROPOSE, Role.COMPRESS, Role.KEEP, Role.DECOMPRESS)
    is_on_pool = info(node).role in on_pool or node.target is SAVE
    return Stream.CPU if on_host and is_on_pool else Stream.COMPUTE
