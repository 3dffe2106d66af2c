"""Gradients are multiplied by a live number while they are packed; one rank alone multiplies each."""

import torch
from helpers.before_after import before_after
from helpers.graphs import TWO, linear_step, node_named, one_bucket, part
from helpers.stages import bucketed
from torch.fx import Node

from fxcomp.graph.edit import gradients
from fxcomp.graph.info import Role
from fxcomp.graph.ops import PACK
from fxcomp.passes.lower_strategies import lower_strategies
from fxcomp.passes.scale_gradients import scale_gradients
from fxcomp.passes.sum_gradients import sum_gradients

PLAN = one_bucket("all_reduce@world")


def test_a_pack_takes_the_factor(golden):
    text, gm = before_after(scale_gradients, bucketed(PLAN, TWO), 2)
    golden("scale_gradients/bucket.txt", text)
    pack = node_named(lower_strategies(gm, PLAN, TWO, 0), "pack_0")
    assert pack.args[1] == 0.5, "the strategy's own scale stays apart"
    assert pack.kwargs == {"factor": node_named(gm, "factor")}


def test_one_rank_alone_multiplies_each_gradient(golden):
    text, gm = before_after(scale_gradients, linear_step(), 2)
    golden("scale_gradients/alone.txt", text)
    assert part(gm, Role.GRADIENT) == "scaled scaled_1"


def test_nothing_is_scaled_where_nobody_asks():
    text, _ = before_after(scale_gradients, bucketed(PLAN, TWO), 1)
    assert not text


def test_a_packed_bucket_is_scaled_by_both():
    packed = PACK([torch.ones(2), torch.full((3,), 2.0)], 0.5, factor=torch.tensor(0.25))
    assert packed.tolist() == [0.125] * 2 + [0.25] * 3


def test_a_sum_is_multiplied_before_it_is_rounded_to_a_narrower_type():
    gm = linear_step()
    for gradient in gradients(gm).values():
        gradient.meta["val"] = gradient.meta["val"].half()
    for gradient in gradients(scale_gradients(sum_gradients(gm, 2), 2)).values():
        scaled = gradient.args[0]
        assert isinstance(scaled, Node)
        assert scaled.args[1] is node_named(gm, "factor")
        assert scaled.meta["val"].dtype is torch.float32
