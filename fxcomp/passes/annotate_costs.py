"""Write the predicted time on every node.

    %mm   gradient    f32[4,2]              aten.mm(%a, %x)
    %r    collective  f32[12]               all_reduce(%p, sum, world)
 -->
    %mm   gradient    f32[4,2]     1.2 us   aten.mm(%a, %x)
    %r    collective  f32[12]     52.0 us   all_reduce(%p, sum, world)

Plain operators cost what was measured for them, else what the roofline says of their floating-point operations and
bytes; of which `graph/work.py` knows neither cost nothing, and its `unknowns` lists them. The rest is priced by bytes
and links. A collective of the loss function's own takes compute's time, which stands still for it, as if it were over
all ranks.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import compressor_of
from fxcomp.cost.table import CostTable
from fxcomp.graph.edit import is_collective
from fxcomp.graph.info import Role, info, update_info
from fxcomp.graph.ops import (
    ACCUMULATE,
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    D2H,
    EXCHANGE,
    H2D,
    MASK_VELOCITY,
    PACK,
    PAD,
    REDUCE_SCATTER,
    SAVE,
)
from fxcomp.graph.work import Basis, basis, work
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.strategy import Device

_KIND = {
    ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    ALL_GATHER: CollectiveKind.ALL_GATHER,
    REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
    BROADCAST: CollectiveKind.BROADCAST,
}


def annotate_costs(gm: GraphModule, costs: CostTable, cluster: Cluster) -> GraphModule:
    on_host: set[Node] = set()
    for node in gm.graph.nodes:
        follows = bool(on_host) and any(source in on_host for source in node.all_input_nodes)
        if node.target is D2H or (follows and node.target is not H2D):
            on_host.add(node)
        is_there = node in on_host
        cost_us = _cost_us(node, costs, cluster, Device.CPU if is_there else Device.GPU)
        pool_load = costs.pool_load if is_there else 0.0
        if node.target in _KIND and is_collective(node):
            what = _KIND[node.target], Level(str(node.args[-1])), _bytes(node.args[0]), cluster
            # The broadcast of buffers is started by the thread that has just made them, and not counted.
            launch_us = costs.launch_us if info(node).bucket is not None else 0.0
            update_info(node, cost_us=cost_us, starting_us=launch_us, launcher_load=pool_load)
            update_info(node, load=costs.load_of(*what), overlap_speed=costs.overlap_speed(*what))
        elif info(node).cost_us != cost_us or info(node).load != pool_load:
            update_info(node, cost_us=cost_us, load=pool_load)
    return gm


def _cost_us(node: Node, costs: CostTable, cluster: Cluster, device: Device) -> float:
    role = info(node).role
    target: Any = node.target
    arguments: Any = node.args
    if node.op != "call_function" or node.target is operator.getitem or role is Role.WAIT:
        return 0.0
    if role is Role.EXCHANGE:
        kind = _exchange_kind(node)
        return costs.collective_us(kind, Level.WORLD, _sent_bytes(node), cluster) if kind is not None else 0.0
    if node.target in _KIND:
        level = Level(str(node.args[-1]))
        return costs.collective_us(_KIND[target], level, _bytes(node.args[0]), cluster)
    if role is Role.ROLL_BACK:
        return 0.0  # hardly ever done
    if role is Role.COMMIT:
        return sum(costs.pack_us(_bytes(value)) for value in node.all_input_nodes) / 2  # reads, and writes nothing
    if node.target in (PACK, PAD, SAVE):
        return costs.pack_us(_bytes(node))
    if role is Role.COPY:
        return costs.copy_us(_bytes(node))
    if role is Role.VELOCITY:
        return _velocity_us(node, costs)
    if role is Role.KEEP:
        return costs.keep_us(_bytes(node))
    if role is Role.PROPOSE:
        return costs.propose_us(compressor_of(target, arguments[3:]), sum(arguments[2]), device)
    if role is Role.COMPRESS:
        elements = sum(arguments[2])
        return costs.encode_us(compressor_of(target, arguments[3:]), elements, device)
    if role is Role.DECOMPRESS:
        elements, ranks = sum(arguments[2]), int(arguments[1])
        return costs.decode_us(compressor_of(target, arguments[3:]), elements, ranks, device)
    if basis(node) in (Basis.NOTHING_TO_DO, Basis.NONE):
        return 0.0
    known = info(node).work
    if known is None:  # asking takes most of this pass, which runs a few times over the same nodes
        known = work(node)
        update_info(node, work=known)
    return costs.compute_us(known.key, known.flops, known.touched_bytes, known.math_type).us


def _velocity_us(node: Node, costs: CostTable) -> float:
    """Keeping costs nothing: a velocity is replaced while it is accumulated."""
    if node.target is ACCUMULATE:
        return costs.accumulate_us(_bytes(node))
    return costs.mask_us(_bytes(node)) if node.target is MASK_VELOCITY else 0.0


_EXCHANGES = {
    **{kind.value: kind for kind in CollectiveKind},
    "all_gather_single": CollectiveKind.ALL_GATHER,
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "reduce_scatter_single": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "scatter": CollectiveKind.GATHER,
    "barrier": CollectiveKind.ALL_REDUCE,
}


def _exchange_kind(node: Node) -> CollectiveKind | None:
    """What a collective of the loss function's own costs as much as; None for a wait."""
    target: Any = node.target
    name = str(node.args[0]) if target is EXCHANGE else compat.bare_name(target).removesuffix("_coalesced")
    return _EXCHANGES.get(name)


def _sent_bytes(node: Node) -> int:
    """What goes out, or where this rank only receives, what comes in."""
    arguments: Any = node.args
    values = arguments[:1] if node.target is not EXCHANGE else arguments[1] or arguments[2]
    return sum(_bytes(value) for value in pytree.tree_leaves(values))


def _bytes(node: object) -> int:
    assert isinstance(node, Node), "a collective carries a node"
    value = node.meta["val"]
    return value.numel() * value.element_size()
