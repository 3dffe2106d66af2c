"""Update parameters only if the received means are finite; otherwise roll back compression's state.

      %sub__1    update     f32[4]   aten.sub_.Tensor(%fc_bias, %view_default)           fc.bias
    + %own_0     roll back  f32[12]  int4_decompress(%payload_0, 1, [4, 8], 128, False)
    + %before_0  roll back  f32[12]  roll_back(%left_out_0, %own_0, %pack_0)
    + %finite    commit     b8[]     all_finite([%mean_0])

A non-finite gradient makes the means of all ranks non-finite, so all ranks decide alike without communication. The old
residual is the new residual plus the rank's decompressed payload minus the rank's bucket, up to rounding; for
non-finite values, the kernel has kept the old residual. A payload summed in place is saved for the roll back.
Compressor states, and with a GradScaler also residuals, are saved and restored exactly.

order_for_overlap moves the updates after the emitted step's early return.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxcomp.graph.edit import call, collective_kind, gradients, has_scale, is_collective, slot_text
from fxcomp.graph.info import NodeInfo, Role, info
from fxcomp.graph.ops import ALL_FINITE, ROLL_BACK, SAVE


def commit_if_finite(gm: GraphModule, skip_nonfinite: bool) -> GraphModule:
    if not skip_nonfinite:
        return gm
    graph, arrived, saves_residuals = gm.graph, _arrived(gm), has_scale(gm)
    for compress in [n for n in graph.nodes if info(n).role is Role.COMPRESS and n.target is not operator.getitem]:
        if _result(compress, 1) is not None:
            residual: Any = compress.args[1]
            if saves_residuals:
                _restore(gm, compress, residual, "residual_")
            else:
                _roll_back(gm, compress)
        state = compress.kwargs.get("state")
        if isinstance(state, Node):
            _restore(gm, compress, state, "")
    if arrived:
        with graph.inserting_before(graph.output_node()):
            call(graph, ALL_FINITE, (arrived,), NodeInfo(Role.COMMIT), name="finite")
    return gm


def _arrived(gm: GraphModule) -> list[Node]:
    """Return the means of buckets, or a single rank's gradients."""
    splits = [n for n in gm.graph.nodes if n.target is torch.ops.aten.split_with_sizes.default]
    means = [_behind_views(n) for n in splits if info(n).role is Role.UNPACK and info(n).bucket is not None]
    return means or list(gradients(gm).values())


def _behind_views(node: Node) -> Node:
    while info(node).role is Role.UNPACK:
        (node, *_) = node.all_input_nodes
    return node


def _roll_back(gm: GraphModule, compress: Node) -> None:
    graph, name = gm.graph, slot_text(compress)
    payload, left_out = _result(compress, 0), _result(compress, 1)
    assert payload is not None, "a compressor makes a payload"
    mine = info(compress).bucket, info(compress).slot
    decompress: Any = next(
        n for n in graph.nodes if info(n).role is Role.DECOMPRESS and (info(n).bucket, info(n).slot) == mine
    )
    if any(is_collective(user) and collective_kind(user).is_in_place for user in payload.users):
        payload = _saved(gm, payload, f"sent_{name}")
    label = NodeInfo(Role.ROLL_BACK, bucket=mine[0], slot=mine[1])
    with graph.inserting_before(graph.output_node()):
        own = call(graph, decompress.target, (payload, 1, *compress.args[2:]), label, name=f"own_{name}")
        pieces = {key: value for key, value in compress.kwargs.items() if key == "pieces"}
        own.kwargs = {**{key: value for key, value in decompress.kwargs.items() if key != "pieces"}, **pieces}
        call(graph, ROLL_BACK, (left_out, own, compress.args[0]), label, name=f"before_{name}")


def _restore(gm: GraphModule, node: Node, state: Node, kind: str) -> None:
    """Save a state before `node` changes it in place, and restore it at the end."""
    with gm.graph.inserting_before(node):
        saved = call(gm.graph, SAVE, (state,), _beside(node), name=f"saved_{kind}{slot_text(node)}")
    with gm.graph.inserting_before(gm.graph.output_node()):
        label = NodeInfo(Role.ROLL_BACK, bucket=info(node).bucket, slot=info(node).slot)
        call(gm.graph, torch.ops.aten.copy_.default, (state, saved), label, name=f"restored_{kind}{slot_text(node)}")


def _saved(gm: GraphModule, payload: Node, name: str) -> Node:
    with gm.graph.inserting_after(payload):
        return call(gm.graph, SAVE, (payload,), _beside(payload), name=name)


def _beside(node: Node) -> NodeInfo:
    return NodeInfo(Role.PACK, bucket=info(node).bucket, stage=info(node).stage, slot=info(node).slot)


def _result(compress: Node, index: int) -> Node | None:
    return next((user for user in compress.users if user.target is operator.getitem and user.args[1] == index), None)
