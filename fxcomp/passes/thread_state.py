"""Pass residuals and compressor states to the next step.

    + %residual_0         input       f32[12]                    residual 0
    - %compress_0         compress    (u8[16], f32[0], f32[0])   int4_compress(%pack_0, None, [4, 8], 128, False)
    + %compress_0         compress    (u8[16], f32[12], f32[0])  int4_compress(%pack_0, %residual_0, [4, 8], 128, False)
    + %left_out_0         compress    f32[12]                    %compress_0[1]
    - output(%mean, ())
    + output(%mean, (), (%left_out_0))

A compressor's state:

    + %state_0       input     i64[4]  compressor state 0
    + %next_state_0  compress  i64[4]  %compress_0[2]

A state that is the payload summed over ranks:

    + %next_state_0  keep  f32[12]  keep(%state_0, %payloads_0)

In emitted code a fused kernel replaces residuals and states in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from fxcomp.compressors import Compressor
from fxcomp.graph.edit import call, placeholder, refresh_value, slot_text
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, info
from fxcomp.graph.lines import compressor_at
from fxcomp.graph.ops import KEEP


def _needs_one(compressor: Compressor) -> bool:
    return compressor.needs_error_feedback


def thread_state(gm: GraphModule, surrounds: Callable[[Compressor], bool] = _needs_one) -> GraphModule:
    """Add residuals for compressors that `surrounds` selects, and states for compressors with state."""
    carried: list[Node] = []
    for node in [n for n in gm.graph.nodes if _compresses(n)]:
        compressor = compressor_at(node)
        if surrounds(compressor):
            carried.append(_thread_residual(gm, node))
        if compressor.has_state:
            carried.append(_thread_state(gm, node, compressor))
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    output.args = ((*returned, tuple(carried)),)
    return gm


def _compresses(node: Node) -> bool:
    return node.op == "call_function" and info(node).role is Role.COMPRESS and node.target is not operator.getitem


def _thread_residual(gm: GraphModule, compress: Node) -> Node:
    value, name = compress.args[0], slot_text(compress)
    assert isinstance(value, Node), "a compressor compresses a node"
    source = _source(compress, InputKind.RESIDUAL)
    residual = placeholder(gm.graph, f"residual_{name}", value.meta["val"], NodeInfo(Role.INPUT, source=source))
    for node in [compress, *_of(gm, compress, Role.PROPOSE)]:
        node.update_arg(1, residual)
    refresh_value(compress)
    with gm.graph.inserting_after(compress):
        return call(gm.graph, operator.getitem, (compress, 1), info(compress), name=f"left_out_{name}")


def _thread_state(gm: GraphModule, compress: Node, compressor: Compressor) -> Node:
    name = slot_text(compress)
    segments: Any = compress.args[2]
    value: Any = compress.args[0]
    dtype = compressor.facts.state_dtype
    fresh = value.meta["val"].new_empty(compressor.state_bytes(segments) // dtype.itemsize, dtype=dtype)
    source = _source(compress, InputKind.COMPRESSOR_STATE)
    state = placeholder(gm.graph, f"state_{name}", fresh, NodeInfo(Role.INPUT, source=source))
    for node in [compress, *_of(gm, compress, Role.PROPOSE)]:
        node.update_kwarg("state", state)
    refresh_value(compress)
    (decompress,) = _of(gm, compress, Role.DECOMPRESS)
    if compressor.facts.state_from_payload:
        return _keep(gm, decompress, state)
    with gm.graph.inserting_after(compress):
        following = call(gm.graph, operator.getitem, (compress, 2), info(compress), name=f"next_state_{name}")
    if compressor.facts.decode_needs_state:
        decompress.update_kwarg("state", following)
    return following


def _keep(gm: GraphModule, decompress: Node, state: Node) -> Node:
    """Insert `keep`. It returns the payloads, or the old state where payloads are not finite."""
    payloads, known = decompress.args[0], info(decompress)
    label = NodeInfo(Role.KEEP, bucket=known.bucket, stage=known.stage, slot=known.slot)
    with gm.graph.inserting_before(decompress):
        return call(gm.graph, KEEP, (state, payloads), label, name=f"next_state_{slot_text(decompress)}")


def _of(gm: GraphModule, compress: Node, role: Role) -> list[Node]:
    """Return the lines that have `role` and the bucket and slot of `compress`."""
    mine = info(compress).bucket, info(compress).slot
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and info(node).role is role]
    return [node for node in nodes if (info(node).bucket, info(node).slot) == mine]


def _source(compress: Node, kind: InputKind) -> Source:
    number, slot = info(compress).bucket, info(compress).slot
    assert number is not None, f"{compress.name} belongs to a bucket"
    return Source(kind, index=number, slot=slot)
