"""Pinned gradients stay so in every plan, in buckets of their own, and spend their error."""

import pytest
from helpers.workloads import COSTS, cluster, layers, matrices

from fxcomp.plan.budget import plan_error
from fxcomp.plan.modes import Mode, error_limit
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.bound import bound_us
from fxcomp.search.choose import Choice, bf16_everywhere, choose, flip_gbit
from fxcomp.search.descent.plan_search import searches_of
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms

WORKLOAD = layers(5)
SLOW = cluster(2, 1, "100mbit")
DEAL = "compress(int8)@gpu > all_to_all@world > decompress@gpu > compress(int4)@gpu > all_gather@world > decompress@gpu"


def pinned_to(plan: Plan, name: str) -> set[str]:
    """The compressors, or `dense`, of the buckets that hold a parameter."""
    buckets = [bucket for bucket in plan.buckets if name in bucket.names]
    return {", ".join(each.name for each in bucket.strategy.compressors) or "dense" for bucket in buckets}


def plans_of(choice: Choice) -> list[Plan]:
    return [choice.plan, choice.dense, choice.fastest, *(runner.plan for runner in choice.runners)]


@pytest.mark.parametrize(("mode", "ranks_per_host"), [(Mode.BALANCED, 1), (Mode.LOSSY, 2), (Mode.LOSSLESS, 2)])
def test_every_plan_of_a_choice_has_what_is_pinned(mode: Mode, ranks_per_host: int):
    pins = Pins.read({"*": "int8", "layer[0-2].*": "dense", "layer4.weight": DEAL})
    some = Pins.read({"layer0.weight": "dense", "layer4.*": "int8"})
    where = cluster(2, ranks_per_host, "100mbit")
    for plan in plans_of(choose(WORKLOAD, COSTS, where, Terms(mode, pins=pins))):
        assert pinned_to(plan, "layer3.bias") == {"int8"}
        assert pinned_to(plan, "layer2.weight") == {"dense"}
        assert {str(b.strategy) for b in plan.buckets if "layer4.weight" in b.names} == {str(Strategy.parse(DEAL))}
    choice = choose(WORKLOAD, COSTS, where, Terms(mode, pins=some))
    for plan in plans_of(choice):
        assert pinned_to(plan, "layer0.weight") == {"dense"}
        assert pinned_to(plan, "layer4.weight") == pinned_to(plan, "layer4.bias") == {"int8"}
    assert (pinned_to(choice.fastest, "layer3.weight") == {"dense"}) is (mode is Mode.LOSSLESS)


def test_the_dense_plan_and_bf16_are_so_wherever_nothing_is_pinned():
    pins = Pins.read({"layer4.*": "int8"})
    choice = choose(WORKLOAD, COSTS, SLOW, Terms(Mode.BALANCED, pins=pins))
    bf16 = bf16_everywhere(StepPrices(WORKLOAD, COSTS, SLOW), pins)
    for name in WORKLOAD.sizes:
        pinned = name.startswith("layer4.")
        assert pinned_to(choice.dense, name) == ({"int8"} if pinned else {"dense"})
        assert pinned_to(bf16, name) == ({"int8"} if pinned else {"bf16"})
    assert bf16 in [runner.plan for runner in choice.runners]


def test_no_bucket_holds_gradients_of_two_pins_or_free_ones():
    pins = Pins.read({"layer[0-2].*": "bf16", "layer3.*": "int8", "*.bias": "bf16"})
    for plan in plans_of(choose(WORKLOAD, COSTS, SLOW, Terms(Mode.LOSSY, pins=pins))):
        for bucket in plan.buckets:
            texts = {rule and rule.text for name in bucket.names if (rule := pins.rule_for(name)) or True}
            assert len(texts) == 1
    apart = searches_of(StepPrices(WORKLOAD, COSTS, SLOW), Terms(Mode.BALANCED, pins=pins))[0]
    assert len(apart.strands) == 4, (
        "matrices, vectors, and one for each strategy: patterns with the same one share buckets"
    )


def test_pinned_gradients_take_the_faster_of_the_ways_over_the_network():
    where = cluster(2, 4, "1gbit")
    for text in ("dense", "bf16"):
        plan = choose(WORKLOAD, COSTS, where, Terms(Mode.LOSSLESS, pins=Pins.read({"*": text}))).plan
        assert all(bucket.strategy.is_hierarchical for bucket in plan.buckets if bucket.elements > 1_000_000)
        assert all((bucket.strategy.compressor is None) is (text == "dense") for bucket in plan.buckets)
    exact = Pins.read({"*": "all_reduce@world"})
    plan = choose(WORKLOAD, COSTS, where, Terms(Mode.BALANCED, pins=exact)).plan
    assert {str(bucket.strategy) for bucket in plan.buckets} == {"all_reduce@world"}


def test_what_pins_lose_is_spent():
    free = choose(WORKLOAD, COSTS, SLOW, Mode.LOSSY).fastest
    pins = Pins.read({"layer[0-3].weight": "topk(0.01)"})
    choice = choose(WORKLOAD, COSTS, SLOW, Terms(Mode.LOSSY, pins=pins))
    assert plan_error(choice.fastest, SLOW) <= error_limit(Mode.LOSSY)
    assert pinned_to(choice.fastest, "layer0.weight") == {"topk"}
    assert Terms(Mode.LOSSY, pins=pins).notes(WORKLOAD, SLOW) == ()
    assert plan_error(free, SLOW) <= error_limit(Mode.LOSSY)


def test_pins_that_lose_more_than_the_mode_allows_leave_the_rest_dense_with_a_note():
    pins = Pins.read({"layer4.weight": "topk(0.01)"})
    choice = choose(WORKLOAD, COSTS, SLOW, Terms(Mode.BALANCED, pins=pins))
    for plan in plans_of(choice):
        assert pinned_to(plan, "layer4.weight") == {"topk"}
        assert all(bucket.strategy.is_dense for bucket in plan.buckets if "layer4.weight" not in bucket.names)
    assert choice.stays_dense
    (note,) = Terms(Mode.BALANCED, pins=pins).notes(WORKLOAD, SLOW)
    assert note.startswith("The pinned parameters lose 0.")
    assert "more than the 0.028 that mode balanced allows in all. So everything else stays dense." in note


def test_pins_that_burst_more_than_the_optimizer_takes_still_give_a_plan():
    pins = Pins.read({"*.weight": "topk(0.01)"})
    plan = choose(WORKLOAD, COSTS, SLOW, Terms(Mode.LOSSY, bursts=0.15, pins=pins)).plan
    assert pinned_to(plan, "layer3.weight") == {"topk"}


def test_pins_alone_are_no_reason_to_leave_dense():
    choice = choose(
        WORKLOAD, COSTS, cluster(2, 1, "400gbit"), Terms(Mode.BALANCED, pins=Pins.read({"layer4.*": "int8"}))
    )
    assert choice.stays_dense
    assert not choice.plan.is_dense
    assert "leaves dense" not in choice.reason
    assert Choice.from_json(choice.to_json()) == choice


def test_the_break_even_bandwidth_is_that_of_what_is_free():
    everything = Pins.read({"*": "int8"})
    assert flip_gbit(WORKLOAD, COSTS, SLOW, Terms(Mode.BALANCED, pins=everything)) is None
    assert flip_gbit(WORKLOAD, COSTS, SLOW, Mode.BALANCED) is not None


def test_a_large_gradient_is_cut_as_ever():
    workload = matrices(8_000_000, 100_000, backward_us=20_000.0)
    plan = choose(workload, COSTS, SLOW, Terms(Mode.BALANCED, pins=Pins.read({"w0": "int8"}))).fastest
    assert pinned_to(plan, "w0") == {"int8"}
    assert plan.sizes == workload.sizes


def test_no_plan_with_pins_is_faster_than_the_bound():
    for pins in ({"*": "int8"}, {"layer0.*": "dense"}, {"layer4.weight": "topk(0.01)"}):
        read = Pins.read(pins)
        bound = bound_us(WORKLOAD, COSTS, SLOW, Mode.BALANCED, pins=read)
        assert bound <= choose(WORKLOAD, COSTS, SLOW, Terms(Mode.BALANCED, pins=read)).fastest_us <= 1.2 * bound
    free = bound_us(WORKLOAD, COSTS, SLOW, Mode.BALANCED)
    assert bound_us(WORKLOAD, COSTS, SLOW, Mode.BALANCED, pins=Pins.read({"*": "dense"})) > 2 * free
