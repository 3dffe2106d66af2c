"""Broadcast rank 0's buffers (batch norm's running statistics) during backward.

      %mean                      compute     f32[4]    aten.mean.dim(%addmm, [0])
    + %pack_buffers              pack        f32[4]    pack([%mean], 1.0)
    + %broadcast_buffers         collective  f32[4]    broadcast(%pack_buffers, 0, world)
      %copy_                     compute     f32[4]    aten.copy_(%running_mean, %mean)
      %sub_                      update      f32[4,2]  aten.sub_.Tensor(%fc_weight, %mm)                 fc.weight
    + %wait_tensor_default       wait        f32[4]    wait(%broadcast_buffers)
    + %split_with_sizes_default  unpack      (f32[4])  aten.split_with_sizes(%wait_tensor_default, [4])
    + %getitem                   unpack      f32[4]    %split_with_sizes_default[0]
    + %view_default              unpack      f32[4]    aten.view(%getitem, [4])
    + %copy__default             unpack      f32[4]    aten.copy_(%running_mean, %view_default)

DDP broadcasts before each forward pass, without overlap. A broadcast after the step has the same result.

Ranks have agreed which buffers to send, and whether to send them before or after the gradients
(`leaves_early`). Buffers of several dtypes are sent as bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.graph.captured import last_writes
from fxcomp.graph.edit import call, last_result
from fxcomp.graph.info import NodeInfo, Role, info, set_info
from fxcomp.graph.ops import BROADCAST, PACK, WAIT
from fxcomp.runtime.packing import packed_sizes

_aten = torch.ops.aten
_COPY_BACK = NodeInfo(Role.UNPACK)
_BODY = (Role.COMPUTE, Role.EXCHANGE, Role.RANDOM_STATE, Role.GRADIENT)


def broadcast_buffers(gm: GraphModule, world_size: int) -> GraphModule:
    shared = [node for node in gm.graph.find_nodes(op="placeholder") if info(node).leaves_early is not None]
    if world_size == 1 or not shared:
        return gm
    shared.sort(key=lambda node: -node.meta["val"].element_size())  # wide types first, for alignment
    writes = last_writes(gm)
    known = {buffer: writes[buffer].value if buffer in writes else buffer for buffer in shared}
    _broadcast(gm, known, _place(gm, shared))
    return gm


def _place(gm: GraphModule, shared: list[Node]) -> Node:
    """Return the last node before the broadcast: a write or, unless buffers leave early, the end of backward."""
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    writes = last_writes(gm)
    after = [writes[buffer].ready for buffer in shared if buffer in writes]
    after += [node for node in order if node.op in ("placeholder", "get_attr")]
    if not info(shared[0]).leaves_early:
        after += [node for node in order if info(node).role in _BODY]
    return last_result(max(after, key=order.__getitem__))


def _broadcast(gm: GraphModule, known: dict[Node, Node], after: Node) -> None:
    graph, values = gm.graph, [value.meta["val"] for value in known.values()]
    with graph.inserting_after(after):
        packed = call(graph, PACK, (list(known.values()), 1.0), NodeInfo(Role.PACK), name="pack_buffers")
    with graph.inserting_after(packed):
        label = NodeInfo(Role.COLLECTIVE)
        broadcast = call(graph, BROADCAST, (packed, 0, "world"), label, name="broadcast_buffers")
    with graph.inserting_before(graph.output_node()):
        wait = call(graph, WAIT, (broadcast,), NodeInfo(Role.WAIT))
        pieces = call(graph, _aten.split_with_sizes.default, (wait, packed_sizes(values)), _COPY_BACK)
        arrived: dict[Node, Node] = {}
        for index, buffer in enumerate(known):
            value = buffer.meta["val"]
            piece = call(graph, operator.getitem, (pieces, index), _COPY_BACK)
            if value.dtype is not packed.meta["val"].dtype:
                piece = call(graph, _aten.view.dtype, (piece, value.dtype), _COPY_BACK)
            alike = value if value.is_contiguous() else None
            shape = list(value.shape)
            arrived[buffer] = call(graph, _aten.view.default, (piece, shape), _COPY_BACK, value=alike)
            if not compat.is_accelerator(value.device):
                call(graph, _aten.copy_.default, (buffer, arrived[buffer]), _COPY_BACK, value=value)
        if compat.is_accelerator(packed.meta["val"].device):
            _copy_in_lists(graph, arrived)


def _copy_in_lists(graph: Graph, arrived: Mapping[Node, Node]) -> None:
    for dtype in dict.fromkeys(buffer.meta["val"].dtype for buffer in arrived):
        alike = [buffer for buffer in arrived if buffer.meta["val"].dtype is dtype]
        given = alike, [arrived[buffer] for buffer in alike]
        node = graph.create_node("call_function", _aten._foreach_copy_.default, given)
        node.meta["val"] = None
        set_info(node, _COPY_BACK)
