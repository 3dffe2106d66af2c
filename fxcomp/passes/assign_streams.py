"""Assign a stream to each node.

    - %reduce_scatter_0_intra  collective  f32[6]  5.0 us          reduce_scatter(%pack_0, [6, 6], 0, intra)
    + %reduce_scatter_0_intra  collective  f32[6]  5.0 us  @intra  reduce_scatter(%pack_0, [6, 6], 0, intra)
    - %d2h_0                   copy        f32[6]  0.0 us          d2h(%wait_0_1)
    + %d2h_0                   copy        f32[6]  0.0 us  @d2h    d2h(%wait_0_1)
    - %all_gather_0_int8       collective  u8[32]  25.3 us         all_gather(%payload_0, 2, inter)
    + %all_gather_0_int8       collective  u8[32]  25.3 us @inter  all_gather(%payload_0, 2, inter)

Compressors on the host get the pool's streams, collectives the link of their level, other lines the compute stream
(`graph/lines.py`).

On an asynchronous device, a bucket that is compressed or sent in stages runs on the side stream, so that compute does
not wait. Predictions count the side stream as compute, because both streams share the device.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.graph.edit import is_collective, level_of, nodes_on_host
from fxcomp.graph.info import BUCKET_LINES, Role, info, update_info
from fxcomp.graph.lines import LAUNCH, line_of
from fxcomp.graph.ops import D2H, IN_PLACE, PACK
from fxcomp.plan.kinds import POOL, Stream, wire_of


def assign_streams(gm: GraphModule, cluster: Cluster) -> GraphModule:
    on_host = nodes_on_host(gm)
    for node in gm.graph.nodes:
        update_info(node, stream=_stream(node, node in on_host, cluster))
    for lines in _lines_by_bucket(gm):
        if _go_aside(lines):
            for node in lines:
                update_info(node, is_aside=node.target not in (PACK, IN_PLACE))
    return gm


def _lines_by_bucket(gm: GraphModule) -> Iterable[Sequence[Node]]:
    found: defaultdict[int, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        label = info(node)
        if node.op == "call_function" and label.bucket is not None and label.role in BUCKET_LINES:
            found[label.bucket].append(node)
    return found.values()


def _go_aside(lines: Sequence[Node]) -> bool:
    """Return True for a bucket on an accelerator that is compressed or sent by several collectives.

    A bucket that uses the pool is excluded: compute waits for the pool in any case.
    """
    if not compat.is_accelerator(lines[0].meta["val"].device) or any(node.target is D2H for node in lines):
        return False
    return sum(map(is_collective, lines)) > 1 or any(info(node).role is Role.COMPRESS for node in lines)


def _stream(node: Node, on_host: bool, cluster: Cluster) -> Stream:
    line = line_of(node)
    if line is None:  # part of a result
        source = node.args[0] if node.target is operator.getitem else None
        return info(source).stream or Stream.COMPUTE if isinstance(source, Node) else Stream.COMPUTE
    if line is LAUNCH:
        return wire_of(level_of(node), cluster.hosts)
    return Stream.COMPUTE if line.stream in POOL and not on_host else line.stream
