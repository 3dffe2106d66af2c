"""Velocities enter and leave the step, before what is compressed; what was sent is forgotten."""

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
from helpers.before_after import before_after
from helpers.graphs import COSTS, TWO, TWO_BY_TWO, one_bucket, part, two_buckets
from helpers.stages import lowered

from fxcomp.cluster.cluster import Cluster
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.ops import ACCUMULATE, KEEP, MASK_VELOCITY
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.passes.commit_if_finite import commit_if_finite
from fxcomp.passes.correct_momentum import correct_momentum
from fxcomp.passes.thread_state import thread_state
from fxcomp.plan.plan import Plan

TOPK = "compress(topk(0.1))@gpu > all_gather@world > decompress@gpu"
INT4 = "compress(int4)@gpu > all_gather@world > decompress@gpu"
DENSE = "all_reduce@world"
SHARDED = "reduce_scatter@intra > compress(topk(0.1))@cpu > all_gather@inter > decompress@cpu > all_gather@intra"
TWO_SHOTS = (
    "compress(topk(0.1))@gpu > all_to_all@world > decompress@gpu > compress(topk(0.1))@gpu > all_gather@world"
    " > decompress@gpu"
)
DENSE_THEN_INT4 = "reduce_scatter@world > compress(int4)@gpu > all_gather@world > decompress@gpu"
AGREED = "propose(shared_int8)@gpu > all_reduce@world > compress(shared_int8)@gpu > all_reduce@world > decompress@gpu"


def corrected(plan: Plan, cluster: Cluster = TWO):
    return before_after(correct_momentum, thread_state(lowered(plan, cluster)), 0.9)


def calls(gm, target):
    return [node for node in gm.graph.nodes if node.target is target]


def test_a_velocity_is_accumulated_and_what_was_sent_is_forgotten(golden):
    text, _ = corrected(one_bucket(TOPK))
    golden("correct_momentum/topk.txt", text)


def test_a_dense_bucket_keeps_its_velocity(golden):
    text, _ = corrected(one_bucket(DENSE))
    golden("correct_momentum/dense.txt", text)


def test_only_values_that_are_sent_as_they_are_are_forgotten():
    _, gm = corrected(two_buckets(INT4, TOPK))
    assert [info(node).bucket for node in calls(gm, ACCUMULATE)] == [0, 1]
    assert [info(node).bucket for node in calls(gm, MASK_VELOCITY)] == [1]
    assert [info(node).bucket for node in calls(gm, KEEP)] == [0]


def test_a_velocity_lies_where_its_bucket_is_compressed():
    _, gm = corrected(one_bucket(SHARDED), TWO_BY_TWO)
    (accumulate,) = calls(gm, ACCUMULATE)
    assert accumulate.args[0].name == "d2h_0"
    assert accumulate.args[1].meta["val"].shape == (6,)
    order = part(gm, Role.COPY, Role.VELOCITY, Role.COMPRESS, Role.COLLECTIVE)
    assert order.split() == [
        *("reduce_scatter_0_intra", "d2h_0", "corrected_0", "compress_0", "all_gather_0_topk", "next_velocity_0"),
        *("h2d_0", "all_gather_0_intra"),
    ]


def test_ranks_agree_on_what_they_compress():
    _, gm = corrected(one_bucket(AGREED))
    (accumulate,) = calls(gm, ACCUMULATE)
    assert [user.name for user in accumulate.users] == ["proposal_0", "compress_0", "next_velocity_0"]


def test_the_first_of_two_shots_alone_sees_the_velocity(golden):
    text, gm = corrected(one_bucket(TWO_SHOTS))
    golden("correct_momentum/two_shots.txt", text)
    (accumulate,) = calls(gm, ACCUMULATE)
    (mask,) = calls(gm, MASK_VELOCITY)
    assert [user.name for user in accumulate.users] == ["compress_0", "next_velocity_0"]
    assert mask.args[2].name == "left_out_0"


def test_where_the_mean_alone_is_compressed_its_owner_has_the_velocity():
    _, gm = corrected(one_bucket(DENSE_THEN_INT4))
    (accumulate,) = calls(gm, ACCUMULATE)
    assert accumulate.args[0].name == "wait_0_1"
    assert accumulate.args[1].meta["val"].shape == (6,)


def test_without_momentum_nothing_changes():
    before = thread_state(lowered(one_bucket(TOPK), TWO))
    assert correct_momentum(before, 0.0) is before
    assert all(info(n).source.kind is not InputKind.VELOCITY for n in before.graph.nodes if n.op == "placeholder")


def test_a_step_that_is_taken_back_has_its_velocities_back():
    _, gm = corrected(two_buckets(DENSE, TOPK))
    _, after = before_after(commit_if_finite, gm, True)
    order = [node.name for node in after.graph.nodes]
    for number in (0, 1):
        assert f"restored_velocity_{number}" in order
        assert order.index(f"saved_velocity_{number}") < order.index(f"corrected_{number}")


@pytest.mark.parametrize("strategy", [DENSE, INT4, TOPK])
def test_velocities_are_priced(strategy: str):
    _, gm = corrected(one_bucket(strategy))
    annotate_costs(gm, COSTS, TWO)
    costs = [info(node).cost_us for node in gm.graph.nodes if info(node).role is Role.VELOCITY]
    assert costs == [2 * 48 / 5000, 48 / 5000 if strategy == TOPK else 0]
