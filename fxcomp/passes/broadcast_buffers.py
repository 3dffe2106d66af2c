"""Give every rank rank 0's buffers (batch norm's running statistics), while backward still runs.

    %bn     compute     (f32[4,8], …)  aten.native_batch_norm(%x, …, %running_mean, %running_var, …)
 -->
    %bn     compute     (f32[4,8], …)  aten.native_batch_norm(%x, …, %running_mean, %running_var, …)
    %p      pack        f32[16]        pack([%running_mean, %running_var])
    %b      collective  f32[16]        broadcast(%p, 0, world)
    …
    %w      wait        f32[16]        wait_tensor(%b)
    copy_(%running_mean, %w[0:8]) …

DDP broadcasts before each forward pass, where it always costs time. After the step it comes to the same, is hidden
behind the backward pass, and leaves the same buffers on all ranks.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from fxcomp.graph.edit import call
from fxcomp.graph.info import InputKind, NodeInfo, Role, info
from fxcomp.graph.ops import BROADCAST, PACK, WAIT

_COPY_BACK = NodeInfo(Role.UNPACK)


def broadcast_buffers(gm: GraphModule, world_size: int) -> GraphModule:
    writes = _last_writes(gm) if world_size > 1 else {}
    if not writes:
        return gm
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    last = max(writes.values(), key=order.__getitem__)
    graph, buffers = gm.graph, list(writes)
    with graph.inserting_after(last):
        packed = call(graph, PACK, (buffers, 1.0), NodeInfo(Role.PACK), name="pack_buffers")
    with graph.inserting_after(packed):
        broadcast = call(graph, BROADCAST, (packed, 0, "world"), NodeInfo(Role.COLLECTIVE), name="broadcast_buffers")
    with graph.inserting_before(graph.output_node()):
        wait = call(graph, WAIT, (broadcast,), NodeInfo(Role.WAIT))
        sizes = [buffer.meta["val"].numel() for buffer in buffers]
        pieces = call(graph, torch.ops.aten.split_with_sizes.default, (wait, sizes), _COPY_BACK)
        for index, buffer in enumerate(buffers):
            piece = call(graph, operator.getitem, (pieces, index), _COPY_BACK)
            shaped = call(graph, torch.ops.aten.view.default, (piece, list(buffer.meta["val"].shape)), _COPY_BACK)
            call(graph, torch.ops.aten.copy_.default, (buffer, shaped), _COPY_BACK)
    return gm


def _last_writes(gm: GraphModule) -> dict[Node, Node]:
    """The fp32 buffers that the step changes, with the last node that does.

    Integer buffers count steps and agree on all ranks by themselves.
    """
    writes: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        for buffer in _written(node):
            source = info(buffer).source
            if source is not None and source.kind is InputKind.BUFFER and buffer.meta["val"].dtype is torch.float32:
                writes[buffer] = node
    return writes


def _written(node: Node) -> list[Node]:
    """The inputs that a node changes; batch norm's operators change their running statistics without declaring it."""
    if node.op != "call_function":
        return []
    if node.target is torch.ops.aten.copy_.default:
        return [arg for arg in node.args[:1] if isinstance(arg, Node)]
    if node.target is torch.ops.aten.native_batch_norm.default and node.args[5]:
        return [arg for arg in node.args[3:5] if isinstance(arg, Node)]
    if node.target is torch.ops.aten.cudnn_batch_norm.default and node.args[5]:
        return [arg for arg in node.args[3:5] if isinstance(arg, Node)]
    return []
