"""Reduce inside the host first, then between hosts, where the plan says so.

    - %pack_0              pack        f32[12]  pack([%sum_1, %mm], 1.0)
    - %all_reduce_0        collective  f32[12]  all_reduce(%pack_0, avg, world)
    - %wait_0              wait        f32[12]  wait(%all_reduce_0)
    + %pack_0              pack        f32[12]  pack([%sum_1, %mm], 0.5)
    + %pad_0               pack        f32[12]  pad(%pack_0, 2)
    + %reduce_scatter_0    collective  f32[6]   reduce_scatter(%pad_0, sum, 2, intra)
    + %wait_0_1            wait        f32[6]   wait(%reduce_scatter_0)
    + %all_reduce_0_inter  collective  f32[6]   all_reduce(%wait_0_1, avg, inter)
    + %wait_0_2            wait        f32[6]   wait(%all_reduce_0_inter)
    + %all_gather_0_intra  collective  f32[12]  all_gather(%wait_0_2, 2, intra)
    + %wait_0_3            wait        f32[12]  wait(%all_gather_0_intra)
    + %slice_tensor        unpack      f32[12]  aten.slice.Tensor(%wait_0_3, 0, 0, 12)

Each rank of a host carries its share over the slow link, so every byte crosses it once.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.errors import BadPlan
from fxcomp.graph.edit import buckets, call, collective_of, wait_of
from fxcomp.graph.info import NodeInfo, Role
from fxcomp.graph.ops import ALL_GATHER, ALL_REDUCE, PAD, REDUCE_SCATTER, WAIT
from fxcomp.plan.plan import Plan


def split_by_level(gm: GraphModule, plan: Plan, cluster: Cluster) -> GraphModule:
    plan.check_fits(cluster)
    for number, pack in list(buckets(gm)):
        strategy = plan.buckets[number].strategy
        level = strategy.collectives[0].level
        if strategy.is_hierarchical:
            _split(gm, number, pack, cluster.ranks_per_host)
        elif level is not Level.WORLD:
            _check_covers_world(cluster, level)
    return gm


def _split(gm: GraphModule, number: int, pack: Node, ranks: int) -> None:
    graph = gm.graph
    flat = collective_of(pack)
    assert flat is not None, f"bucket {number} has no collective"
    done = wait_of(flat)
    pack.args = (pack.args[0], 1 / ranks)
    elements = pack.meta["val"].numel()

    def wait(collective: Node, stage: int) -> Node:
        return call(
            graph, WAIT, (collective,), NodeInfo(Role.WAIT, bucket=number, stage=stage), name=f"wait_{number}_{stage}"
        )

    with graph.inserting_before(flat):
        padded = call(graph, PAD, (pack, ranks), NodeInfo(Role.PACK, bucket=number), name=f"pad_{number}")
        label = NodeInfo(Role.COLLECTIVE, bucket=number)
        scatter = call(graph, REDUCE_SCATTER, (padded, "sum", ranks, "intra"), label, name=f"reduce_scatter_{number}")
        shard = wait(scatter, 1)
        label = NodeInfo(Role.COLLECTIVE, bucket=number, stage=1)
        between = call(graph, ALL_REDUCE, (shard, "avg", "inter"), label, name=f"all_reduce_{number}_inter")
        reduced = wait(between, 2)
        label = NodeInfo(Role.COLLECTIVE, bucket=number, stage=2)
        gather = call(graph, ALL_GATHER, (reduced, ranks, "intra"), label, name=f"all_gather_{number}_intra")
    with graph.inserting_before(done):
        whole = wait(gather, 3)
        trimmed = call(
            graph, torch.ops.aten.slice.Tensor, (whole, 0, 0, elements), NodeInfo(Role.UNPACK, bucket=number, stage=3)
        )
    done.replace_all_uses_with(trimmed)
    graph.erase_node(done)
    graph.erase_node(flat)


def _check_covers_world(cluster: Cluster, level: Level) -> None:
    if cluster.ranks_at(level) != cluster.world_size:
        raise BadPlan(
            f"a strategy reduces over {level.value} alone, which joins {cluster.ranks_at(level)} of"
            f" {cluster.world_size} ranks: replicas would drift apart.\n"
            "  Use @world, or the three collectives of a hierarchical strategy."
        )
