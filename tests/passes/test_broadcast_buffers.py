"""Buffers that ranks share leave the step as rank 0's on every rank."""

import torch
from helpers.before_after import before_after
from helpers.graphs import linear_step
from helpers.pretended import as_accelerator

from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import BROADCAST
from fxcomp.passes.broadcast_buffers import broadcast_buffers


def test_shared_buffers_are_broadcast_as_soon_as_their_values_are_known(golden):
    text, _ = before_after(broadcast_buffers, linear_step(buffer=True), 2)
    golden("broadcast_buffers/running_mean.txt", text)


def test_nothing_is_broadcast_where_nothing_is_written_or_nobody_listens():
    _, unwritten = before_after(broadcast_buffers, linear_step(), 2)
    _, alone = before_after(broadcast_buffers, linear_step(buffer=True), 1)
    assert not any(n.target is BROADCAST for gm in (unwritten, alone) for n in gm.graph.nodes)


def test_on_an_accelerator_buffers_of_a_type_are_copied_back_at_once():
    with as_accelerator():
        _, gm = before_after(broadcast_buffers, linear_step(buffer=True), 2)
    (copy,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten._foreach_copy_.default)
    assert [[each.name for each in argument] for argument in copy.args] == [["running_mean"], ["view_default"]]
    assert info(copy).role is Role.UNPACK
