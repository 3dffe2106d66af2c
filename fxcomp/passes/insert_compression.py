"""Compress what a bucket's strategy compresses; make the mean explicit where it does not.

    %p   pack        f32[12]   pack([%g0, %g1], 1.0)
    %r   collective  f32[12]   all_reduce(%p, avg, world)
    %w   wait        f32[12]   wait_tensor(%r)
 -->
    %p   pack        f32[12]   pack([%g0, %g1], 1.0)
    %c   compress    (u8[20], f32[12])  int8_compress(%p, None, [8, 4], 512)
    %y   compress    u8[20]    %c[0]
    %r   collective  u8[40]    all_gather(%y, 2, world)
    %w0  wait        u8[40]    wait_tensor(%r)
    %w   decompress  f32[12]   int8_decompress(%w0, 2, [8, 4], 512)

A dense bucket is scaled while it is packed and summed on the wire: gloo has no mean, and a pass over memory is saved.
A compressor on the cpu gets copies to the host and back around it.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from fxcomp.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.graph.edit import buckets, call, wait_of
from fxcomp.graph.info import NodeInfo, Role, info
from fxcomp.graph.ops import ALL_GATHER, ALL_REDUCE, D2H, H2D, PACK, WAIT
from fxcomp.strategy import Bucket, Device, Plan


def insert_compression(gm: GraphModule, plan: Plan, cluster: Cluster, local_rank: int) -> GraphModule:
    for number, pack in list(buckets(gm)):
        bucket, mean = plan.buckets[number], _mean_of(gm, number)
        level = Level(str(mean.args[2]))
        ranks = cluster.ranks_at(level)
        compressor = bucket.strategy.compressor
        if compressor is None or compressor.is_linear:
            scale: Any = pack.args[1]
            pack.args = (pack.args[0], float(scale) / ranks)
            mean.args = (mean.args[0], "sum", mean.args[2])
        if compressor is not None:
            _compress(gm, number, bucket, compressor, mean, ranks, _segments(bucket, mean, cluster, local_rank))
    return gm


def _mean_of(gm: GraphModule, number: int) -> Node:
    """The collective of a bucket that averages, at whatever level."""
    return next(n for n in gm.graph.nodes if n.target is ALL_REDUCE and info(n).bucket == number)


def _compress(
    gm: GraphModule, number: int, bucket: Bucket, compressor: Compressor, mean: Node, ranks: int, segments: list[int]
) -> None:
    graph, stage, level = gm.graph, info(mean).stage, mean.args[2]
    on_cpu = bucket.strategy.device is Device.CPU
    before = NodeInfo(Role.COMPRESS, bucket=number, stage=stage)
    value, done = mean.args[0], wait_of(mean)
    assert isinstance(value, Node), "a collective carries a node"

    with graph.inserting_before(mean):
        if on_cpu:
            value = call(graph, D2H, (value,), NodeInfo(Role.COPY, bucket=number, stage=stage), name=f"d2h_{number}")
        arguments = (value, None, segments, *compressor.parameters)
        compressed = call(graph, compressor.compress_op, arguments, before, name=f"compress_{number}")
        payload = call(graph, operator.getitem, (compressed, 0), before, name=f"payload_{number}")
        label = NodeInfo(Role.COLLECTIVE, bucket=number, stage=stage)
        if compressor.is_linear:
            sent = call(
                graph, ALL_REDUCE, (payload, "sum", level), label, name=f"all_reduce_{number}_{compressor.name}"
            )
        else:
            sent = call(
                graph, ALL_GATHER, (payload, ranks, level), label, name=f"all_gather_{number}_{compressor.name}"
            )
    with graph.inserting_before(done):
        label = NodeInfo(Role.WAIT, bucket=number, stage=stage + 1)
        payloads = call(graph, WAIT, (sent,), label, name=f"payloads_{number}")
        copies = 1 if compressor.is_linear else ranks
        label = NodeInfo(Role.DECOMPRESS, bucket=number, stage=stage + 1)
        arguments = (payloads, copies, segments, *compressor.parameters)
        value = call(graph, compressor.decompress_op, arguments, label, name=f"mean_{number}")
        if on_cpu:
            label = NodeInfo(Role.COPY, bucket=number, stage=stage + 1)
            value = call(graph, H2D, (value,), label, name=f"h2d_{number}")
    done.replace_all_uses_with(value)
    graph.erase_node(done)
    graph.erase_node(mean)


def _segments(bucket: Bucket, mean: Node, cluster: Cluster, local_rank: int) -> list[int]:
    """The sizes of the parameters' parts that this rank compresses: all of them, or its shard's."""
    value = mean.args[0]
    assert isinstance(value, Node), "a collective carries a node"
    if value.target is PACK:
        return list(bucket.sizes)
    return shard_segments(bucket.sizes, cluster.ranks_per_host, local_rank)


def shard_segments(sizes: tuple[int, ...], shards: int, index: int) -> list[int]:
    """Cut the parameters of a bucket where its shard begins and ends; padding is a segment of its own."""
    padded = sum(sizes) + -sum(sizes) % shards
    start, stop = (padded // shards * i for i in (index, index + 1))
    segments: list[int] = []
    offset = 0
    for size in (*sizes, padded - sum(sizes)):
        part = min(stop, offset + size) - max(start, offset)
        if part > 0:
            segments.append(part)
        offset += size
    return segments
