"""A micro-batch that ends no group runs forward and backward, and adds to the sums."""

from helpers.before_after import before_after
from helpers.graphs import linear_step, part

from fxcomp.graph.info import InputKind, Role, info
from fxcomp.passes.end_at_sums import end_at_sums
from fxcomp.passes.sum_gradients import sum_gradients


def test_nothing_is_updated(golden):
    text, gm = before_after(end_at_sums, sum_gradients(linear_step(), 2))
    golden("end_at_sums/linear.txt", text)
    assert part(gm, Role.GRADIENT) == "summed summed_1"


def test_gradients_are_clipped_where_the_group_ends():
    _, gm = before_after(end_at_sums, sum_gradients(linear_step(clip=True), 2))
    assert not part(gm, Role.CLIP, Role.UPDATE)


def test_what_the_forward_pass_writes_stays():
    _, gm = before_after(end_at_sums, sum_gradients(linear_step(buffer=True), 2))
    assert "copy_" in part(gm, Role.COMPUTE)
    kinds = {info(n).source.kind for n in gm.graph.find_nodes(op="placeholder")}
    assert kinds == {InputKind.PARAMETER, InputKind.BUFFER, InputKind.BATCH, InputKind.SUM}
