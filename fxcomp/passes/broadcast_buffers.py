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
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    for dtype in dict.fromkeys(buffer.meta["val"].dtype for buffer in writes):
        own = {buffer: node for buffer, node in writes.items() if buffer.meta["val"].dtype is dtype}
        suffix = "" if dtype is torch.float32 else f"_{str(dtype).removeprefix('torch.')}"
        _broadcast(gm, list(own), max(own.values(), key=order.__getitem__), suffix)
    return gm


def _broadcast(gm: GraphModule, buffers: list[Node], last: Node, suffix: str) -> None:
    """Share buffers of one dtype, behind the last node that changes one of them."""
    graph = gm.graph
    with graph.inserting_after(last):
        packed = call(graph, PACK, (buffers, 1.0), NodeInfo(Role.PACK), name=f"pack_buffers{suffix}")
    with graph.inserting_after(packed):
        label = NodeInfo(Role.COLLECTIVE)
        broadcast = call(graph, BROADCAST, (packed, 0, "world"), label, name=f"broadcast_buffers{suffix}")
    with graph.inserting_before(graph.output_node()):
        wait = call(graph, WAIT, (broadcast,), NodeInfo(Role.WAIT))
        sizes = [buffer.meta["val"].numel() for buffer in buffers]
        pieces = call(graph, torch.ops.aten.split_with_sizes.default, (wait, sizes), _COPY_BACK)
        for index, buffer in enumerate(buffers):
            piece = call(graph, operator.getitem, (pieces, index), _COPY_BACK)
            value = buffer.meta["val"]
            known = value if value.is_contiguous() else None
            shaped = call(graph, torch.ops.aten.view.default, (piece, list(value.shape)), _COPY_BACK, value=known)
            call(graph, torch.ops.aten.copy_.default, (buffer, shaped), _COPY_BACK, value=value)


def _last_writes(gm: GraphModule) -> dict[Node, Node]:
    """The buffers that the step changes, with the last node that does. Counters agree on all ranks by themselves."""
    writes: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        for buffer in _written(node):
            source = info(buffer).source
            if source is not None and source.kind is InputKind.BUFFER and not _counts(node):
                writes[buffer] = node
    return writes


def _counts(write: Node) -> bool:
    """Whether a buffer only grows by a constant, as batch norm's number of batches does."""
    value = write.args[1] if write.target is torch.ops.aten.copy_.default else None
    if not isinstance(value, Node) or value.target is not torch.ops.aten.add.Tensor:
        return False
    return value.args[0] is write.args[0] and not isinstance(value.args[1], Node)


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
