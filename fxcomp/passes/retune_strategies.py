"""Change parameters of compressors in a final graph, without changing its lines.

    - %compress_0         compress    (u8[28], f32[12], f32[0])    topk_compress(%pack_0, %residual_0, [4, 8], 0.3)
    + %compress_0         compress    (u8[16], f32[12], f32[0])    topk_compress(%pack_0, %residual_0, [4, 8], 0.1)
      %left_out_0         compress    f32[12]                      %compress_0[1]
    - %payload_0          compress    u8[28]                       %compress_0[0]
    - %all_gather_0_topk  collective  u8[56]                       all_gather(%payload_0, 2, world)
    + %payload_0          compress    u8[16]                       %compress_0[0]
    + %all_gather_0_topk  collective  u8[32]                       all_gather(%payload_0, 2, world)

Sizes, cuts and the order of payloads change too. Other changes of a plan (`Plan.differs_in_parameters_only`) need all
passes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.fx import GraphModule, Node

from fxcomp.cluster.cluster import Cluster
from fxcomp.graph.edit import buckets, refresh_value
from fxcomp.graph.info import Role, info, update_info
from fxcomp.graph.lines import compressor_at
from fxcomp.graph.ops import MOVES, PACK, TURN
from fxcomp.plan.legs import Route
from fxcomp.plan.lines import LineKind, Stages, lines_of, sent
from fxcomp.plan.plan import Plan
from fxcomp.plan.route import route_of


def retune_strategies(gm: GraphModule, plan: Plan, cluster: Cluster, rank: int) -> GraphModule:
    lines = _lines_by_bucket(gm)
    for number, pack in list(buckets(gm)):
        strategy, kind, gradients = plan.buckets[number].strategy, plan.buckets[number].element_type, pack.args[0]
        if strategy.is_dense:
            continue
        shapes = [gradient.meta["val"].shape for gradient in _nodes(gradients)]
        route = route_of(strategy, shapes, cluster, rank, kind)
        _set_compressors(lines[number], route)
        _set_cuts(lines[number], lines_of(route))
        _refresh(lines[number])
        lines_of_rank_0 = sent(lines_of(route_of(strategy, shapes, cluster, element_type=kind)))
        sizes = [line.size for line in lines_of_rank_0 if line.send.ranks > 1]
        for collective, size in zip(_collectives(lines[number]), sizes, strict=True):
            update_info(collective, sent_bytes=size)
    return gm


def _lines_by_bucket(gm: GraphModule) -> dict[int, list[Node]]:
    found: defaultdict[int, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is PACK:
            continue
        number = info(node).bucket
        if number is not None and info(node).role not in (Role.UNPACK, Role.PART):
            found[number].append(node)
    return found


def _set_compressors(lines: list[Node], route: Route) -> None:
    for node in lines:
        compressor = route.slots[info(node).slot].compressor if route.slots else None
        if compressor is None or node.target not in (
            compressor.compress_op,
            compressor.decompress_op,
            compressor.propose_op,
        ):
            continue
        node.args = (*node.args[:3], *compressor.parameters)
        state = node.kwargs.get("state")
        if node.target == compressor.compress_op and isinstance(state, Node) and state.op == "placeholder":
            _resize_state(state, node)


def _resize_state(state: Node, compress: Node) -> None:
    compressor, segments = compressor_at(compress), _sizes(compress.args[2])
    known = state.meta["val"]
    state.meta["val"] = known.new_empty(compressor.state_bytes(segments) // compressor.facts.state_dtype.itemsize)


def _set_cuts(lines: list[Node], stages: Stages) -> None:
    for node, line in zip(_collectives(lines), [line for line in sent(stages) if line.send.ranks > 1], strict=True):
        if node.target in MOVES:
            node.update_arg(1, list(line.send.parts))
    turns = [line.send.turned for stage in stages for line in stage if line.kind is LineKind.TURN]
    for node, turn in zip([node for node in lines if node.target is TURN], turns, strict=True):
        assert turn is not None, "a line that turns knows how"
        node.update_arg(2, list(turn.sizes))


def _refresh(lines: list[Node]) -> None:
    for node in lines:
        if info(node).role is not Role.COMMIT:
            refresh_value(node)


def _collectives(lines: list[Node]) -> list[Node]:
    return [node for node in lines if info(node).role is Role.COLLECTIVE]


def _nodes(argument: Any) -> list[Node]:
    return list(argument)


def _sizes(argument: Any) -> list[int]:
    return list(argument)
