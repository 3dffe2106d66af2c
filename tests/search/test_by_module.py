"""Plans of plain FSDP, module by module: the shortest step within the limit, none as short loses less."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.workloads import COSTS, cluster, layers

from fxcomp.cost.timeline import step_time_us
from fxcomp.errors import BadOption, BadPlan
from fxcomp.plan.budget import plan_error, polluting_share
from fxcomp.plan.modes import Mode, error_limit
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import Bucket
from fxcomp.search.by_module import (
    SCATTERED,
    ModuleTime,
    _Search,  # pyright: ignore[reportPrivateUsage]
    choose_by_module,
    module_tasks,
    module_times,
    scattered_by,
)
from fxcomp.search.choose import Choice
from fxcomp.search.question import Terms
from fxcomp.search.shared_draws import LEAST_GAIN

MODULES = 4
WORKLOAD = layers(MODULES)
BUCKETS = [
    Bucket((f"layer{k}.bias", f"layer{k}.weight"), (384, WORKLOAD.sizes[f"layer{k}.weight"]), SCATTERED)
    for k in range(MODULES)
]


def names(choice: Choice) -> list[str]:
    return [str(bucket.strategy.compressor or "dense") for bucket in choice.plan.buckets]


def chosen(inter: str, mode: Mode, *, overlaps: bool, hosts: int = 4, **terms: Any) -> Choice:
    where = cluster(hosts, 1, inter)
    return choose_by_module(WORKLOAD, BUCKETS, COSTS, where, Terms(mode, **terms), overlaps=overlaps)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("inter", ["100mbit", "1gbit", "10gbit", "100gbit"])
@pytest.mark.parametrize(("mode", "bursts"), [(Mode.BALANCED, 1.0), (Mode.LOSSY, 0.4)])
def test_no_other_choice_of_all_is_shorter_by_a_thousandth(inter: str, mode: Mode, bursts: float, overlaps: bool):
    where, terms = cluster(4, 1, inter), Terms(mode, bursts)
    search = _Search(WORKLOAD, BUCKETS, COSTS, where, terms, overlaps=overlaps)
    choice = search.choice()
    assert plan_error(choice.plan, where) <= error_limit(mode)
    assert polluting_share(choice.plan, where) <= bursts
    allowed = [each for each in itertools.product(*search._offered) if search._is_allowed(each)]
    assert len(allowed) > 10
    mine, best_us = [bucket.strategy for bucket in choice.plan.buckets], min(map(search._step_us, allowed))
    if set(mine) == {SCATTERED}:
        assert best_us > (1 - LEAST_GAIN) * choice.dense_us / 1.001
        return
    assert choice.step_us <= 1.001 * best_us
    for k, offered in enumerate(search._offered):
        for other in offered:
            if search._lost(k, other) < search._lost(k, mine[k]):
                assert search._step_us([*mine[:k], other, *mine[k + 1 :]]) > choice.step_us


def test_what_compute_hides_stays_dense_and_what_it_does_not_is_compressed():
    hidden = names(chosen("100gbit", Mode.LOSSY, overlaps=True))[:-1]  # nothing is left to hide the last one
    assert set(hidden) == {"dense"}
    assert set(names(chosen("1gbit", Mode.BALANCED, overlaps=False))) == {"int8"}
    assert set(names(chosen("1gbit", Mode.LOSSLESS, overlaps=False))) == {"dense"}
    fast = chosen("1gbit", Mode.BALANCED, overlaps=False)
    assert fast.step_us < 0.8 * fast.dense_us
    assert fast.dense_us == chosen("1gbit", Mode.LOSSLESS, overlaps=False).step_us


def times(choice: Choice, inter: str = "1gbit", *, overlaps: bool) -> tuple[ModuleTime, ...]:
    return module_times(choice.plan, WORKLOAD, COSTS, cluster(4, 1, inter), overlaps=overlaps)


def test_a_step_is_compute_and_what_modules_wait_for_one_after_the_other():
    choice = chosen("1gbit", Mode.BALANCED, overlaps=False)
    waited = times(choice, overlaps=False)
    assert choice.step_us == pytest.approx(WORKLOAD.free_us + sum(each.own_us for each in waited))
    choice = chosen("1gbit", Mode.BALANCED, overlaps=True)
    end, overlapped = 0.0, times(choice, overlaps=True)
    for each in overlapped:
        end = max(end, each.ready_us) + each.own_us
    assert choice.step_us == pytest.approx(end + WORKLOAD.free_us - WORKLOAD.backward_us)
    assert Choice.from_json(choice.to_json()) == choice


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_timeline_of_a_choice_takes_as_long_as_it_is_predicted_to(overlaps: bool):
    choice = chosen("1gbit", Mode.BALANCED, overlaps=overlaps)
    tasks = module_tasks(times(choice, overlaps=overlaps), WORKLOAD, cluster(4, 1, "1gbit"), overlaps=overlaps)
    assert step_time_us(tasks) == pytest.approx(choice.step_us)


def test_dense_times_are_those_of_a_reduce_scatter_and_of_the_gather_where_both_take_the_wire():
    where = cluster(4, 1, "1gbit")
    alone, both = (times(chosen("1gbit", Mode.LOSSLESS, overlaps=each), overlaps=each) for each in (False, True))
    for bucket, waited, overlapped in zip(BUCKETS, alone, both, strict=True):
        wire_us = 3 / 4 * 4 * bucket.elements / (where.inter.gb_per_s * 1e3)
        assert waited.dense_us == pytest.approx(wire_us, rel=0.2)
        assert overlapped.dense_us == pytest.approx(2 * wire_us, rel=0.2)


def test_a_pinned_parameter_decides_for_its_module():
    pins = Pins.read({"layer1.weight": "dense", "layer2.*": "int4"})
    found = names(chosen("100mbit", Mode.BALANCED, overlaps=False, pins=pins))
    assert found == ["int8", "dense", "int4", "int8"]
    split = Pins.read({"layer1.weight": "int8", "layer1.bias": "dense"})
    with pytest.raises(BadOption, match="scatters together"):
        chosen("100mbit", Mode.BALANCED, overlaps=False, pins=split)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("powersgd(4)", "needs whole parameters"),
        (
            "compress(int8) > all_to_all@world > decompress > compress(int8) > all_gather@world > decompress",
            "once at most",
        ),
    ],
)
def test_what_cannot_be_scattered_is_refused(text: str, words: str):
    with pytest.raises(BadPlan, match=words):
        scattered_by(text)


def test_a_compressor_and_the_strategy_that_it_means_are_the_same():
    assert scattered_by("dense") == SCATTERED
    assert scattered_by("int8") == scattered_by("compress(int8) > all_to_all@world > decompress > all_gather@world")
    assert scattered_by("int8") == scattered_by("compress(int8) > all_to_all@world > decompress > shards")
