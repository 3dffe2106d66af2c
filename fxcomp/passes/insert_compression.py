"""Compress what a bucket's strategy compresses; make the mean explicit where it does not.

      %pack_0             pack        f32[12]                   pack([%sum_1, %mm], 1.0)
    - %all_reduce_0       collective  f32[12]                   all_reduce(%pack_0, avg, world)
    - %wait_0             wait        f32[12]                   wait(%all_reduce_0)
    + %compress_0         compress    (u8[20], f32[0], f32[0])  int8_compress(%pack_0, None, [4, 8], 512, False)
    + %payload_0          compress    u8[20]                    %compress_0[0]
    + %all_gather_0_int8  collective  u8[40]                    all_gather(%payload_0, 2, world)
    + %payloads_0         wait        u8[40]                    wait(%all_gather_0_int8)
    + %mean_0             decompress  f32[12]                   int8_decompress(%payloads_0, 2, [4, 8], 512, False)

Where ranks agree before they compress, the agreement is a stage of its own, before the compression:

    + %proposal_0             propose     f32[2]  shared_int8_propose(%pack_0, None, [4, 8], 512, False, 63)
    + %all_reduce_0_proposal  collective  f32[2]  all_reduce(%proposal_0, max, world)
    + %agreed_0               wait        f32[2]  wait(%all_reduce_0_proposal)

A dense bucket is scaled while it is packed and summed on the wire: gloo has no mean, and a pass over memory is saved.
A compressor on the cpu gets copies to the host and back around it. It is bound to the shapes that it compresses.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Agreement, Compressor
from fxcomp.graph.edit import buckets, call, wait_of
from fxcomp.graph.info import NodeInfo, Role, info, update_info
from fxcomp.graph.ops import ALL_GATHER, ALL_REDUCE, D2H, H2D, WAIT
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Device


def insert_compression(gm: GraphModule, plan: Plan, cluster: Cluster, local_rank: int) -> GraphModule:
    for number, pack in list(buckets(gm)):
        bucket, mean = plan.buckets[number], _mean_of(gm, number)
        ranks = cluster.ranks_at(Level(str(mean.args[2])))
        compressor = bucket.strategy.compressor
        if compressor is None or compressor.is_linear:
            scale: Any = pack.args[1]
            pack.args = (pack.args[0], float(scale) / ranks)
            mean.args = (mean.args[0], "sum", mean.args[2])
        if compressor is not None:
            segments = _segments(bucket, cluster, local_rank)
            bound = compressor.bound_to(_shapes(bucket, pack, segments), ranks)
            _compress(gm, _Compression(number, bucket, bound, segments, mean, ranks))
    return gm


def _mean_of(gm: GraphModule, number: int) -> Node:
    """Find the collective of a bucket that averages, at whatever level."""
    return next(n for n in gm.graph.nodes if n.target is ALL_REDUCE and info(n).bucket == number)


def _segments(bucket: Bucket, cluster: Cluster, local_rank: int) -> list[int]:
    """List the sizes of the parts that this rank compresses: whole parameters, or its shard's."""
    shards = cluster.ranks_per_host if bucket.strategy.is_hierarchical else 1
    return [size for _, size in bucket.segments(shards, local_rank if shards > 1 else 0)]


def _shapes(bucket: Bucket, pack: Node, segments: list[int]) -> list[tuple[int, ...]]:
    """List the shapes that are compressed: whole parameters, or flat parts of them."""
    if bucket.strategy.is_hierarchical:
        return [(size,) for size in segments]
    gradients: Any = pack.args[0]
    return [tuple(gradient.meta["val"].shape) for gradient in gradients]


@dataclass(frozen=True, slots=True)
class _Compression:
    """The ingredients of one bucket's lines."""

    number: int
    bucket: Bucket
    compressor: Compressor
    segments: list[int]
    mean: Node
    ranks: int

    @property
    def stage(self) -> int:
        return info(self.mean).stage

    @property
    def level(self) -> Any:
        return self.mean.args[2]

    @property
    def on_cpu(self) -> bool:
        return self.bucket.strategy.device is Device.CPU

    def add(
        self, graph: Graph, target: Any, args: tuple[Any, ...], role: Role, stage: int, name: str, **kwargs: Any
    ) -> Node:
        """A node of this bucket."""
        label = NodeInfo(role, bucket=self.number, stage=stage)
        return call(graph, target, args, label, name=name, kwargs=kwargs)


def _compress(gm: GraphModule, it: _Compression) -> None:
    graph, stage, number, compressor = gm.graph, it.stage, it.number, it.compressor
    value, done = it.mean.args[0], wait_of(it.mean)
    assert isinstance(value, Node), "a collective carries a node"
    agreed: dict[str, Node] = {}

    with graph.inserting_before(it.mean):
        if it.on_cpu:
            value = it.add(graph, D2H, (value,), Role.COPY, stage, f"d2h_{number}")
        if compressor.facts.agreement is not None:
            _delay_later_stages(gm, it)
            agreed = {"agreed": _agree(graph, it, value)}
            stage += 1
        arguments = (value, None, it.segments, *compressor.parameters)
        compressed = it.add(
            graph, compressor.compress_op, arguments, Role.COMPRESS, stage, f"compress_{number}", **agreed
        )
        payload = it.add(graph, operator.getitem, (compressed, 0), Role.COMPRESS, stage, f"payload_{number}")
        target, how = (ALL_REDUCE, "sum") if compressor.is_linear else (ALL_GATHER, it.ranks)
        kind = "all_reduce" if compressor.is_linear else "all_gather"
        name = f"{kind}_{number}_{compressor.name.replace('-', '_')}"
        sent = it.add(graph, target, (payload, how, it.level), Role.COLLECTIVE, stage, name)
    with graph.inserting_before(done):
        payloads = it.add(graph, WAIT, (sent,), Role.WAIT, stage + 1, f"payloads_{number}")
        copies = 1 if compressor.is_linear else it.ranks
        arguments = (payloads, copies, it.segments, *compressor.parameters)
        value = it.add(
            graph, compressor.decompress_op, arguments, Role.DECOMPRESS, stage + 1, f"mean_{number}", **agreed
        )
        if it.on_cpu:
            value = it.add(graph, H2D, (value,), Role.COPY, stage + 1, f"h2d_{number}")
    done.replace_all_uses_with(value)
    graph.erase_node(done)
    graph.erase_node(it.mean)


def _agree(graph: Graph, it: _Compression, value: Node) -> Node:
    """Reduce what the ranks propose; the result is there one stage later."""
    compressor, number = it.compressor, it.number
    arguments = (value, None, it.segments, *compressor.parameters)
    proposal = it.add(graph, compressor.propose_op, arguments, Role.PROPOSE, it.stage, f"proposal_{number}")
    how = "sum" if compressor.facts.agreement is Agreement.SUM else "max"
    sent = it.add(
        graph, ALL_REDUCE, (proposal, how, it.level), Role.COLLECTIVE, it.stage, f"all_reduce_{number}_proposal"
    )
    return it.add(graph, WAIT, (sent,), Role.WAIT, it.stage + 1, f"agreed_{number}")


def _delay_later_stages(gm: GraphModule, it: _Compression) -> None:
    """Move the collectives after a hierarchical strategy's mean one stage later."""
    for node in gm.graph.nodes:
        if info(node).bucket == it.number and info(node).stage > it.stage:
            update_info(node, stage=info(node).stage + 1)
