"""Gradients are added to the sums of their group, in front of whatever is done with them."""

import torch
from helpers.before_after import before_after
from helpers.graphs import TWO, linear_step, node_named

from fxcomp.graph.edit import gradients
from fxcomp.graph.info import InputKind, info
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.sum_gradients import sum_gradients


def test_what_follows_takes_the_sum(golden):
    text, gm = before_after(sum_gradients, linear_step(), 4)
    golden("sum_gradients/linear.txt", text)
    assert [info(n).source.kind for n in gm.graph.nodes if n.name.startswith("sum_fc")] == [InputKind.SUM] * 2


def test_sums_are_reduced_and_nothing_else_is():
    gm = canonicalize_sync(sum_gradients(linear_step(), 2), TWO.world_size)
    for name, gradient in gradients(gm).items():
        assert gradient.args[0] is node_named(gm, f"sum_{name.replace('.', '_')}")
        assert len(gradient.users) == 1


def test_a_gradient_of_another_type_is_made_of_the_sum():
    gm = linear_step()
    for gradient in gradients(gm).values():
        gradient.meta["val"] = gradient.meta["val"].to(torch.bfloat16)
    for gradient in gradients(sum_gradients(gm, 2)).values():
        assert gradient.meta["val"].dtype is torch.bfloat16
        assert gradient.args[0].args[0].meta["val"].dtype is torch.float32


def test_one_micro_batch_needs_no_sums():
    text, _ = before_after(sum_gradients, linear_step(), 1)
    assert not text
