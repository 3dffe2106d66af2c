"""Write the predicted time on every node.

    - %sum_1  gradient  f32[4]            aten.sum.dim_IntList(%mul_1, [0])  fc.bias
    + %sum_1  gradient  f32[4]    2.0 us  aten.sum.dim_IntList(%mul_1, [0])  fc.bias
      %t_1    compute   f32[4,3]          aten.t(%mul_1)
    - %mm     gradient  f32[4,2]          aten.mm(%t_1, %x)                  fc.weight
    + %mm     gradient  f32[4,2]  2.0 us  aten.mm(%t_1, %x)                  fc.weight

A plain operator's time is measured, or estimated by the roofline; an operator without known flops or bytes is free,
and listed by `unknowns` (`graph/work.py`). On an absent device forward and backward are priced per kernel
(`graph/kernels.py`), fused as by Inductor or, if `joins` is false, one operator each. Update operators over lists share
launches (`graph/update_kinds.py`). Runtime calls are priced by bytes and links. A collective of the loss function
blocks compute and is priced over all ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cost.collectives import Library
from fxcomp.cost.table import CostTable
from fxcomp.graph.edit import collective_kind, level_of, nodes_on_host, sent_bytes, value_bytes
from fxcomp.graph.info import Role, has_info, info, update_info
from fxcomp.graph.kernels import kernels
from fxcomp.graph.lines import EXCHANGE, LAUNCH, line_of
from fxcomp.graph.ops import EXCHANGE as EXCHANGE_OPERATOR
from fxcomp.graph.regions import BODY, PLAIN
from fxcomp.graph.update_kinds import LISTED_ON_CPU, shared_starts, update_lists
from fxcomp.graph.work import Basis, OperatorWork, basis, work, work_key
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device


def annotate_costs(gm: GraphModule, costs: CostTable, cluster: Cluster, joins: bool = True) -> GraphModule:
    on_host = nodes_on_host(gm)
    listed = _in_lists(gm, costs) | (_in_kernels(gm, costs, joins) if costs.estimate else {})
    for node in gm.graph.nodes:
        pool_load = costs.pool_load if node in on_host else 0.0
        if line_of(node) is LAUNCH:
            price = costs.collective(collective_kind(node), level_of(node), sent_bytes(node), cluster)
            # Launches of buffers' broadcasts are assumed free.
            launch_us = costs.launch_us if info(node).bucket is not None else 0.0
            update_info(node, cost_us=price.us, starting_us=launch_us, launcher_load=pool_load)
            update_info(node, load=price.load, overlap_speed=price.overlap_speed)
            continue
        place = Device.CPU if node in on_host else Device.GPU
        cost_us = listed[node] if node in listed else _cost_us(node, costs, cluster, place)
        if info(node).cost_us != cost_us or info(node).load != pool_load:
            update_info(node, cost_us=cost_us, load=pool_load)
    return gm


def note_work(gm: GraphModule) -> None:
    """Store the flops and bytes of plain operators: counting is slow, and copies of the graph inherit the counts."""
    for node in gm.graph.nodes:
        if has_info(node) and info(node).work is None and _is_priced_by_work(node):
            update_info(node, work=work(node))


def cost_key(node: Node) -> str:
    known = info(node).work
    return known.key if known is not None else work_key(node)


def _is_priced_by_work(node: Node) -> bool:
    is_plain = node.op == "call_function" and line_of(node) is None and info(node).role in PLAIN
    return is_plain and basis(node) not in (Basis.NOTHING_TO_DO, Basis.NONE)


def _cost_us(node: Node, costs: CostTable, cluster: Cluster, device: Device) -> float:
    line = line_of(node)
    if line is EXCHANGE:
        kind = _exchange_kind(node)
        return costs.collective(kind, Level.WORLD, _sent_bytes(node), cluster).us if kind is not None else 0.0
    if line is not None:
        return line.price(costs, node, device) if line.price is not None else 0.0
    if _joins_parts(node):
        return costs.pack_us(value_bytes(node))
    known = _work_of(node)
    if known is None:
        return 0.0
    return costs.compute_us(known.key, known.flops, known.touched_bytes, known.math_type).us


def _work_of(node: Node) -> OperatorWork | None:
    if info(node).work is None and _is_priced_by_work(node):
        update_info(node, work=work(node))
    return info(node).work


def _in_lists(gm: GraphModule, costs: CostTable) -> dict[Node, float]:
    """Estimate update operators over lists, in us. Skip measured operators: their times include shared launches."""
    updates = [n for n in gm.graph.nodes if has_info(n) and info(n).role is Role.UPDATE and _is_priced_by_work(n)]
    works = {node: known for node in updates if (known := _work_of(node)) is not None}
    estimated = {node for node, known in works.items() if known.key not in costs.compute}
    if not estimated:
        return {}
    most = LISTED_ON_CPU if costs.library is Library.GLOO else math.inf
    rows = [row for row in update_lists(gm, most) if estimated.issuperset(row)]
    free = replace(costs.roofline, launch_us=0.0)
    listed = {node: works[node] for row in rows for node in row}
    us = {node: free.us(known.flops, known.touched_bytes, known.math_type) for node, known in listed.items()}
    return shared_starts(rows, us, costs.roofline.launch_us)


def _in_kernels(gm: GraphModule, costs: CostTable, joins: bool) -> dict[Node, float]:
    """Estimate forward and backward per kernel, in us. The time belongs to the kernel's first operator."""
    found = dict.fromkeys((node for node in gm.graph.nodes if has_info(node) and info(node).role in BODY), 0.0)
    for kernel in kernels(gm, joins=joins):
        found[kernel.nodes[0]] = costs.roofline.us(kernel.flops, kernel.touched_bytes, kernel.math_type)
    return found


def _joins_parts(node: Node) -> bool:
    """Return whether a node concatenates a gradient from several buckets."""
    label = info(node)
    return node.target is torch.ops.aten.cat.default and label.role is Role.UNPACK and label.bucket is not None


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
    """Return the kind that prices a collective of the loss function; None for a wait."""
    target: Any = node.target
    name = str(node.args[0]) if target is EXCHANGE_OPERATOR else compat.bare_name(target).removesuffix("_coalesced")
    return _EXCHANGES.get(name)


def _sent_bytes(node: Node) -> int:
    """Count the bytes that a rank sends, or receives if it sends none."""
    arguments: Any = node.args
    values = arguments[:1] if node.target is not EXCHANGE_OPERATOR else arguments[1] or arguments[2]
    return sum(value_bytes(value) for value in pytree.tree_leaves(values))
