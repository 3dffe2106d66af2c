"""Carry from step to step what compression leaves out.

    %c  compress  (u8[20], f32[12])  int8_compress(%p, None, [8, 4], 512)
    output(%loss, ())
 -->
    %residual_0   input     f32[12]
    %c            compress  (u8[20], f32[12])  int8_compress(%p, %residual_0, [8, 4], 512)
    %left_out_0   compress  f32[12]            %c[1]
    output(%loss, (), (%left_out_0))

In the graph the residual comes in and goes out; emitted code lets a fused kernel replace it in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from fxcomp.compressors import Compressor
from fxcomp.graph.edit import call, placeholder, refresh_value
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, info
from fxcomp.strategy import Plan


def _is_needed(compressor: Compressor) -> bool:
    return compressor.needs_error_feedback


def thread_residuals(gm: GraphModule, plan: Plan, surrounds: Callable[[Compressor], bool] = _is_needed) -> GraphModule:
    """`surrounds` says which compressors get a residual."""
    left_out: list[Node] = []
    for node in list(gm.graph.nodes):
        compressor = (
            plan.buckets[number].strategy.compressor if (number := _compressed_bucket(node)) is not None else None
        )
        if compressor is not None and surrounds(compressor):
            left_out.append(_thread(gm, node, number or 0))
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    output.args = ((*returned, tuple(left_out)),)
    return gm


def _compressed_bucket(node: Node) -> int | None:
    """The bucket that a node compresses, if it does."""
    is_call = node.op == "call_function" and node.target is not operator.getitem
    return info(node).bucket if is_call and info(node).role is Role.COMPRESS else None


def _thread(gm: GraphModule, compress: Node, number: int) -> Node:
    value = compress.args[0]
    assert isinstance(value, Node), "a compressor compresses a node"
    source = Source(InputKind.RESIDUAL, index=number)
    residual = placeholder(gm.graph, f"residual_{number}", value.meta["val"], NodeInfo(Role.INPUT, source=source))
    compress.update_arg(1, residual)
    refresh_value(compress)
    with gm.graph.inserting_after(compress):
        return call(gm.graph, operator.getitem, (compress, 1), info(compress), name=f"left_out_{number}")
