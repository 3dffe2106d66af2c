"""Choosing a plan: at both ends of bandwidth, what may race, and what a choice tells."""

from dataclasses import replace

import pytest
from helpers.workloads import COSTS, cluster, layers, matrices

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.plan.budget import plan_error, polluting_share
from fxcomp.plan.modes import Mode, error_limit
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE
from fxcomp.search.choose import Choice, choose, predict_us, uniform
from fxcomp.search.question import Terms
from fxcomp.search.runners import WORTH_FOLLOWING, WORTH_TRYING
from fxcomp.search.workload import Gradient, Workload


def test_a_fast_network_stays_dense_and_a_slow_one_takes_int4():
    workload = layers(20)
    assert choose(workload, COSTS, cluster(2, 1, "400gbit"), Mode.BALANCED).plan.is_dense
    slow = choose(workload, COSTS, cluster(2, 1, "100mbit"), Mode.BALANCED).plan
    sizes = {bucket.strategy.compressor.name: bucket.elements for bucket in slow.buckets if bucket.strategy.compressor}
    assert sizes["int4"] > 1_000_000


def test_lossless_is_always_dense():
    assert choose(layers(20), COSTS, cluster(2, 2, "10mbit"), Mode.LOSSLESS).plan.is_dense


@pytest.mark.parametrize("mode", Mode)
def test_a_plan_names_every_gradient_once_in_ready_order_and_is_as_careful_as_its_vectors_need(mode: Mode):
    workload, where = layers(20), cluster(2, 2, "1gbit")
    plan = choose(workload, COSTS, where, mode).plan
    position = {gradient.name: k for k, gradient in enumerate(workload.gradients)}
    vectors = {gradient.name for gradient in workload.gradients if gradient.is_vector}
    assert sorted(plan.names) == sorted(position)
    lasts = [max(position[name] for name in bucket.names) for bucket in plan.buckets]
    assert lasts == sorted(lasts)
    for bucket in plan.buckets:
        contents = {name in vectors for name in bucket.names}
        used = {compressor.name for compressor in bucket.strategy.compressors}
        if mode is Mode.BALANCED and True in contents:
            assert used <= ({"bf16"} if contents == {True} else {"bf16", "int8"})
    assert plan_error(plan, where) <= error_limit(mode)


def test_a_gradient_that_has_the_time_to_travel_loses_nothing():
    gradients = (Gradient("early", (1000, 1000), 100.0, 1.0), Gradient("late", (2000, 1000), 100_000.0, 1.0))
    workload = Workload(gradients, 100_000.0)
    plan = choose(workload, replace(COSTS, error=0.0, launch_us=0.0), cluster(2, 1, "1gbit"), Mode.BALANCED).plan
    assert not plan.is_dense
    assert plan.buckets[0] == Bucket(("early",), (1_000_000,), DENSE)  # has all of backward to travel


def test_a_tie_goes_to_dense():
    free = {key: CompressorCost.of(CompressorPoint(1, 0.0, 0.0)) for key in COSTS.compressors}
    costs = replace(COSTS, compressors=free, error=0.0, launch_us=0.0)  # which the pool would take over
    where = Cluster(2, 1, Link(0.0, 1e15), Link(0.0, 1e15))
    choice = choose(layers(10), costs, where, Mode.LOSSY)
    assert choice.fastest.is_dense
    assert choice.reason == "no compressed plan is predicted to be faster than the best dense one"


def test_a_gain_below_the_predictions_error_is_followed_where_both_plans_have_the_same_error():
    workload, where = layers(20), cluster(2, 1, "3gbit")
    choice = choose(workload, replace(COSTS, error=0.5, compute_error=0.75), where, Mode.BALANCED)
    assert 0.01 < choice.gain < choice.error
    assert choice.plan == choice.fastest
    assert choice.wins >= WORTH_FOLLOWING
    assert choice.reason.startswith("leaves dense: the plan predicted best saves")


def test_a_gain_that_may_as_well_be_a_loss_is_not_followed_but_worth_trying():
    """Compression that saves nearly what it costs, which may be a quarter more or less."""
    slow = {key: CompressorCost.of(CompressorPoint(1_000_000, 7_000.0, 7_000.0)) for key in COSTS.compressors}
    where = cluster(2, 1, "5gbit")
    choice = choose(matrices(10_000_000, backward_us=1_000.0), replace(COSTS, compressors=slow), where, Mode.BALANCED)
    assert not choice.fastest.is_dense
    assert WORTH_TRYING <= choice.wins < WORTH_FOLLOWING
    assert choice.plan == choice.dense
    assert choice.step_us == choice.dense_us
    assert choice.reason.startswith("stays dense: the plan predicted best saves")
    assert choice.fastest in [each.plan for each in choice.runners]


@pytest.mark.parametrize("mode", Mode)
def test_dense_and_bf16_may_always_race_and_others_differ(mode: Mode):
    choice = choose(layers(12), COSTS, cluster(2, 2, "300mbit"), mode)
    names = [each.name for each in choice.runners]
    assert ("bf16" in names) is (mode is not Mode.LOSSLESS), "here the fastest is another"
    assert choice.dense in [each.plan for each in choice.runners]
    assert choice.plan in [each.plan for each in choice.runners]
    assert [each.step_us for each in choice.runners] == sorted(each.step_us for each in choice.runners)
    assert len({each.plan for each in choice.runners}) == len(names) <= 5
    assert Choice.from_json(choice.to_json()) == choice


def test_bursts_that_an_optimizer_cannot_take_do_not_race():
    choice = choose(layers(12), COSTS, cluster(2, 1, "10mbit"), Terms(Mode.LOSSY, bursts=0.15))
    assert all(polluting_share(each.plan, cluster(2, 1, "10mbit")) <= 0.15 for each in choice.runners)


def test_a_choice_tells_what_the_others_cost():
    workload, where = layers(20), cluster(2, 1, "1gbit")
    choice = choose(workload, COSTS, where, Mode.BALANCED)
    assert choice.free_us < choice.step_us <= choice.dense_us
    assert choice.step_us <= choice.bf16_us
    assert choice.step_us == pytest.approx(predict_us(workload, choice.plan, COSTS, where))
    assert choice.dense_us == pytest.approx(predict_us(workload, choice.dense, COSTS, where))
    assert len(choice.alternatives) == len(choice.plan.buckets)
    other = choice.alternatives[0][0]
    buckets = choice.plan.buckets
    changed = choice.plan.with_strategies([other.strategy, *(bucket.strategy for bucket in buckets[1:])])
    assert other.step_us == pytest.approx(predict_us(workload, changed, COSTS, where), rel=5e-3)
    assert other.step_us >= choice.step_us * (1 - 1e-9)
    assert "bf16 everywhere" in str(choice)


@pytest.mark.parametrize("name", ["dense", "bf16", "int8", "int4", "sign", "topk(0.01)"])
def test_a_uniform_plan_has_one_compressor_and_leaves_vectors_alone_where_it_loses(name: str):
    workload = layers(10)
    vectors = {gradient.name for gradient in workload.gradients if gradient.is_vector}
    plan = uniform(name, workload, COSTS, cluster(2, 1, "1gbit"))
    assert sorted(plan.names) == sorted(gradient.name for gradient in workload.gradients)
    for bucket in plan.buckets:
        used = bucket.strategy.compressor.name if bucket.strategy.compressor else "dense"
        kept = bucket.names[0] in vectors and name != "bf16"
        assert used == ("dense" if kept else name.partition("(")[0])


def test_a_step_without_gradients_has_an_empty_plan():
    choice = choose(Workload((), 1000.0), COSTS, cluster(2, 1, "1gbit"), Mode.BALANCED)
    assert choice.plan == Plan(())
    assert choice.step_us == choice.free_us == 1000.0


def test_a_gradient_without_elements_is_no_obstacle():
    gradients = (Gradient("empty", (0, 4), 100.0, 0.0), Gradient("w", (500, 4), 1_000.0, 1.0))
    choice = choose(Workload(gradients, 1_000.0), COSTS, cluster(2, 1, "1gbit"), Mode.LOSSY)
    assert sorted(choice.plan.names) == ["empty", "w"]


def test_a_workload_goes_to_json_and_back():
    workload = layers(3)
    assert Workload.from_json(workload.to_json()) == workload
    assert workload.dense_bytes == sum(4 * gradient.elements for gradient in workload.gradients)
    assert str(workload).startswith("6 gradients, ")
