"""Every gradient is averaged once: by us, or by the user's own reduction where there is one."""

import pytest
import torch
from helpers.before_after import before_after
from helpers.graphs import Step, linear_step
from torch.fx import GraphModule

from fxcomp.errors import Unsupported
from fxcomp.graph.info import Role
from fxcomp.graph.ops import ALL_GATHER, ALL_REDUCE, WAIT
from fxcomp.passes.canonicalize_sync import canonicalize_sync

aten = torch.ops.aten


def reduced_by_user(operation: str, *, divide_by: float | None = None, multiply_by: float | None = None) -> GraphModule:
    """A step whose loss function already reduces the gradient."""
    step = Step()
    weight, x = step.parameter("w", 4), step.batch(4)
    loss = step.do(aten.dot.default, weight, x)
    gradient = step.gradient("w", aten.mul.Tensor, x, 1.0)
    reduced = step.do(ALL_REDUCE, gradient, operation, "mine", role=Role.COLLECTIVE)
    value = step.do(WAIT, reduced, role=Role.WAIT)
    if divide_by is not None:
        value = step.do(aten.div.Tensor, value, divide_by)
    if multiply_by is not None:
        value = step.do(aten.mul.Tensor, value, multiply_by)
    step.update("w", aten.sub_.Tensor, weight, value)
    return step.returning(loss)


def reductions(gm: GraphModule) -> int:
    return sum(node.target is ALL_REDUCE for node in gm.graph.nodes)


def test_a_mean_goes_in_where_nothing_is_reduced(golden):
    text, after = before_after(canonicalize_sync, linear_step(), 2)
    golden("canonicalize_sync/insert.txt", text)
    assert reductions(after) == 2


def test_the_users_sum_and_division_become_one_mean(golden):
    text, after = before_after(canonicalize_sync, reduced_by_user("sum", divide_by=2), 2)
    golden("canonicalize_sync/sum_divided.txt", text)
    assert reductions(after) == 1


def test_the_users_sum_times_the_inverse_becomes_one_mean():
    _, after = before_after(canonicalize_sync, reduced_by_user("sum", multiply_by=0.5), 2)
    assert reductions(after) == 1
    assert not any(n.target is aten.mul.Tensor and n.args[1] == 0.5 for n in after.graph.nodes)


def test_the_users_mean_is_kept(golden):
    text, after = before_after(canonicalize_sync, reduced_by_user("avg"), 2)
    golden("canonicalize_sync/avg.txt", text)
    assert reductions(after) == 1


def test_running_it_twice_changes_nothing():
    _, once = before_after(canonicalize_sync, linear_step(), 2)
    text, _ = before_after(canonicalize_sync, once, 2)
    before, _, after = text.partition("\n\n-->\n\n")
    assert before == after


def test_one_rank_needs_no_reduction():
    _, after = before_after(canonicalize_sync, linear_step(), 1)
    assert reductions(after) == 0


@pytest.mark.parametrize("divide_by", [None, 3.0])
def test_a_sum_that_is_no_mean_is_refused(divide_by: float | None):
    with pytest.raises(Unsupported, match=r"'w' is summed over the ranks and not divided by their number, 2") as error:
        canonicalize_sync(reduced_by_user("sum", divide_by=divide_by), 2)
    assert "Reduce with 'avg'" in str(error.value)


def test_another_reduction_is_refused():
    with pytest.raises(
        Unsupported, match=r"'w' goes through .*all_reduce.* \(max\); only an all_reduce with sum or avg"
    ):
        canonicalize_sync(reduced_by_user("max"), 2)


def test_a_gather_of_gradients_is_refused():
    step = Step()
    weight, x = step.parameter("w", 4), step.batch(4)
    loss = step.do(aten.dot.default, weight, x)
    gradient = step.gradient("w", aten.mul.Tensor, x, 1.0)
    gathered = step.do(WAIT, step.do(ALL_GATHER, gradient, 2, "mine", role=Role.COLLECTIVE), role=Role.WAIT)
    step.update("w", aten.sub_.Tensor, weight, step.do(aten.slice.Tensor, gathered, 0, 0, 4))
    with pytest.raises(Unsupported, match="all_gather_into_tensor"):
        canonicalize_sync(step.returning(loss), 2)
