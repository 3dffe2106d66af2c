"""Say on which stream each node runs.

    - %reduce_scatter_0_intra  collective  f32[6]  5.0 us          reduce_scatter(%pack_0, [6, 6], 0, intra)
    + %reduce_scatter_0_intra  collective  f32[6]  5.0 us  @intra  reduce_scatter(%pack_0, [6, 6], 0, intra)
    - %d2h_0                   copy        f32[6]  0.0 us          d2h(%wait_0_1)
    + %d2h_0                   copy        f32[6]  0.0 us  @d2h    d2h(%wait_0_1)
    - %all_gather_0_int8       collective  u8[32]  25.3 us         all_gather(%payload_0, 2, inter)
    + %all_gather_0_int8       collective  u8[32]  25.3 us @inter  all_gather(%payload_0, 2, inter)

The table of lines says where each line runs: compressors on the host's processor between a copy to the host and the
copy back, collectives on the links of their level, everything else with compute.
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from fxcomp.cluster.cluster import Cluster
from fxcomp.graph.edit import level_of, nodes_on_host
from fxcomp.graph.info import info, update_info
from fxcomp.graph.lines import LAUNCH, line_of
from fxcomp.plan.kinds import POOL, Stream, wire_of


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
        return wire_of(level_of(node), cluster.hosts)
    return Stream.COMPUTE if line.stream in POOL and not on_host else line.stream
