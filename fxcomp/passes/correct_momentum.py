"""Let every rank keep its own momentum, before what is compressed.

    + %velocity_0         input       f32[12]                    velocity 0
      %pack_0             pack        f32[12]                    pack([%sum_1, %mm], 1.0)
    - %compress_0         compress    (u8[16], f32[12], f32[0])  topk_compress(%pack_0, %residual_0, [4, 8], 0.1)
    + %corrected_0        velocity    f32[12]                    accumulate(%pack_0, %velocity_0, 0.9)
    + %compress_0         compress    (u8[16], f32[12], f32[0])  topk_compress(%corrected_0, %residual_0, [4, 8], 0.1)
      %left_out_0         compress    f32[12]                    %compress_0[1]
      %all_gather_0_topk  collective  u8[32]                     all_gather(%payload_0, 2, world)
    + %next_velocity_0    velocity    f32[12]                    mask_velocity(%corrected_0, %velocity_0, %left_out_0)
    - output(%mean, (), (%left_out_0))
    + output(%mean, (), (%left_out_0, %next_velocity_0))

The mask forgets the velocity of what was sent, which is known where a compressor sends values as they are. Elsewhere,
in dense buckets too, the whole velocity is kept:

    + %next_velocity_0  velocity  f32[12]  keep(%velocity_0, %corrected_0)

A velocity is fp32, in its bucket's unit, and lies where the bucket is compressed: on the host after the copy to it, in
this rank's shard after the reduction inside the host. Emitted code replaces it in place, with the bucket.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxcomp.graph.edit import buckets, call, collective_kind, is_collective, placeholder
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, info
from fxcomp.graph.lines import compressor_at
from fxcomp.graph.ops import ACCUMULATE, CAST, KEEP, MASK_VELOCITY, TURN


def correct_momentum(gm: GraphModule, momentum: float) -> GraphModule:
    if momentum == 0:
        return gm
    following = [_correct(gm, number, momentum) for number, _ in list(buckets(gm))]
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    loss, aux, *carried = returned
    output.args = ((loss, aux, (*(node for nodes in carried for node in nodes), *following)),)
    return gm


def _correct(gm: GraphModule, number: int, momentum: float) -> Node:
    """Thread one bucket's velocity; returns the next one."""
    graph, readers = gm.graph, _readers(gm, number)
    first, value = readers[0], readers[0].args[0]
    assert isinstance(value, Node), "what is sent is a node"
    label = NodeInfo(Role.VELOCITY, bucket=number, stage=info(first).stage)
    source = Source(InputKind.VELOCITY, index=number)
    dtype = value.meta["val"].dtype
    if dtype is not torch.float32:
        with graph.inserting_before(first):
            value = call(graph, CAST, (value, torch.float32), _copied(first), name=f"whole_{number}")
    velocity = placeholder(graph, f"velocity_{number}", value.meta["val"], NodeInfo(Role.INPUT, source=source))
    with graph.inserting_before(first):
        corrected = call(graph, ACCUMULATE, (value, velocity, momentum), label, name=f"corrected_{number}")
    sent = corrected
    if dtype is not torch.float32:
        with graph.inserting_before(first):
            sent = call(graph, CAST, (corrected, dtype), _copied(first), name=f"rounded_{number}")
    for reader in readers:
        reader.update_arg(0, sent)

    left_out = _left_out_of_values(readers[-1])
    target, arguments = (KEEP, (velocity, corrected))
    if left_out is not None:
        target, arguments = MASK_VELOCITY, (corrected, velocity, left_out)
    label = NodeInfo(Role.VELOCITY, bucket=number, stage=info(readers[-1]).stage)
    with graph.inserting_after(_sender(readers[-1])):  # the payload does not wait for it
        return call(graph, target, arguments, label, name=f"next_velocity_{number}")


def _copied(reader: Node) -> NodeInfo:
    return NodeInfo(Role.COPY, bucket=info(reader).bucket, stage=info(reader).stage)


def _readers(gm: GraphModule, number: int) -> list[Node]:
    """List the nodes that see a rank's own bucket, or what a host has added up: propose and compress, or a collective.

    The collective of a dense bucket is the first that does not split it.
    """
    own = [n for n in gm.graph.nodes if n.op == "call_function" and info(n).bucket == number]
    encoders = [n for n in own if info(n).role in (Role.PROPOSE, Role.COMPRESS) and n.target is not operator.getitem]
    found = [n for n in encoders if info(n).slot == 0]
    first = next(n for n in own if is_collective(n) and not _splits_dense(n))
    return found if found and info(found[0]).stage <= info(first).stage else [first]


def _splits_dense(node: Node) -> bool:
    """Return whether a collective splits values that are not compressed yet: it sends no payload."""
    source: Any = node.args[0]
    while source.target is TURN or info(source).role is Role.COPY:
        source = source.args[0]
    return collective_kind(node).splits and info(source).role not in (Role.COMPRESS, Role.PROPOSE)


def _left_out_of_values(reader: Node) -> Node | None:
    """Find the new residual of a compressor that sends values as they are; None for others."""
    if info(reader).role is not Role.COMPRESS:
        return None
    if not compressor_at(reader).sends_values:
        return None
    return next((user for user in reader.users if user.target is operator.getitem and user.args[1] == 1), None)


def _sender(reader: Node) -> Node:
    """Find the collective that sends the payload, or a dense bucket."""
    if info(reader).role is not Role.COMPRESS:
        return reader
    payload = next(user for user in reader.users if user.target is operator.getitem and user.args[1] == 0)
    return next((user for user in payload.users if info(user).role is Role.COLLECTIVE), payload)
