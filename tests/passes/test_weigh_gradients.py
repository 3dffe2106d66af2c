"""Gradients of weighted losses are divided by the count of all ranks, before anything is packed."""

import torch
from helpers.before_after import before_after
from helpers.graphs import TWO, Step, part
from torch.fx import GraphModule

from fxcomp.graph.info import InputKind, Role, Source
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.weigh_gradients import weigh_gradients
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

aten = torch.ops.aten
PLAN = Plan((Bucket(("w",), (4,), DENSE),))


def weighted_step() -> GraphModule:
    """The loss is the sum of x W over the elements that are not zero."""
    step = Step()
    weight, x = step.parameter("w", 4), step.batch(4)
    so_far = step.input("count", (1,), Source(InputKind.COUNT))
    so_far.meta["val"] = so_far.meta["val"].double()
    counted = step.do(aten.add_.Tensor, so_far, step.do(aten.count_nonzero.default, x), name="counted")
    assert counted.users == {}
    loss = step.do(aten.dot.default, weight, x)
    gradient = step.gradient("w", aten.mul.Tensor, x, 1.0)
    step.update("w", aten.sub_.Tensor, weight, gradient)
    return step.returning(loss)


def test_the_count_is_summed_over_ranks_while_backward_runs(golden):
    gm = bucket_gradients(canonicalize_sync(weighted_step(), TWO.world_size), PLAN)
    text, gm = before_after(weigh_gradients, gm, TWO.world_size)
    golden("weigh_gradients/two_ranks.txt", text)
    assert part(gm, Role.COUNT) == "all_reduce_count wait_count"


def test_one_rank_alone_divides_by_its_own_count(golden):
    text, gm = before_after(weigh_gradients, weighted_step(), 1)
    golden("weigh_gradients/alone.txt", text)
    assert not part(gm, Role.COUNT)
