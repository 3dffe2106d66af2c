"""Gradients of several types: each type has buckets of its own, and is priced by its bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from helpers.workloads import cluster

from fxcomp.compressors import CastCompressor, kernels
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadPlan
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Mode
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE
from fxcomp.search.bound import bound_us
from fxcomp.search.choose import Choice, choose, predict_us, uniform
from fxcomp.search.descent.plan_search import Found, searches_of
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms
from fxcomp.search.workload import Gradient, Workload

F32, BF16, F16, F64, *_ = ElementType
COSTS = CostTable()


def drawn(seed: int, types: tuple[ElementType, ...]) -> Workload:
    """Layers of a matrix and a bias, and norms."""
    chance = random.Random(seed)
    gradients: list[Gradient] = []
    ready_us = 0.0
    for k in range(chance.randrange(4, 12)):
        ready_us += chance.uniform(0.0, 2000.0)
        shape = chance.choice([(chance.randrange(1, 900), 512), (chance.randrange(1, 3000),)])
        gradients.append(Gradient(f"g{k}", shape, ready_us, 20.0, chance.choice(types)))
    return Workload(tuple(gradients), ready_us)


def as_type(workload: Workload, element_type: ElementType) -> Workload:
    return replace(workload, gradients=tuple(replace(g, element_type=element_type) for g in workload.gradients))


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_keeps_types_apart_and_no_plan_beats_the_bound(seed: int):
    workload, where = drawn(seed, (F32, BF16, F16)), cluster(2 + seed % 2, 1 + seed % 3, "300mbit")
    choice = choose(workload, COSTS, where, Mode.BALANCED)
    for plan in (choice.plan, choice.dense, choice.fastest, *(runner.plan for runner in choice.runners)):
        plan.check_covers(workload.sizes, workload.types)
    assert bound_us(workload, COSTS, where, Mode.BALANCED) <= choice.fastest_us
    assert predict_us(workload, choice.fastest, COSTS, where) == pytest.approx(choice.fastest_us)
    assert Choice.from_json(choice.to_json()) == choice
    assert Workload.from_json(workload.to_json()) == workload


def test_half_the_bytes_take_half_the_wire():
    workload, where = drawn(1, (F32,)), cluster(2, 1, "1gbit")
    narrow = as_type(workload, BF16)
    assert 2 * narrow.dense_bytes == workload.dense_bytes
    wide, half = (uniform("dense", each, COSTS, where) for each in (workload, narrow))
    assert sum(bucket.dense_bytes for bucket in half.buckets) == narrow.dense_bytes
    assert predict_us(narrow, half, COSTS, where) < predict_us(workload, wide, COSTS, where)


def test_sixteen_bits_are_never_compressed_to_sixteen():
    for seed in range(4):
        workload = drawn(seed, (BF16, F16))
        choice = choose(workload, COSTS, cluster(2, 2, "300mbit"), Mode.BALANCED)
        assert choice.bf16_us >= choice.dense_us * (1 - 1e-9)
        for runner in choice.runners:
            for bucket in runner.plan.buckets:
                assert not any(isinstance(each, CastCompressor) for each in bucket.strategy.compressors)


def test_narrow_gradients_stay_dense_where_wide_ones_are_compressed():
    """On a link where int8 gains by a quarter of the bytes, and not by half of them."""
    gradients = tuple(Gradient(f"g{k}", (1024, 1024), 10_000.0 * (k + 1), 100.0) for k in range(8))
    workload, verdicts = Workload(gradients, 80_000.0), set[tuple[bool, bool]]()
    for gbit in ("1gbit", "2gbit", "3gbit", "4gbit", "6gbit", "8gbit"):
        where = cluster(2, 1, gbit)
        wide, narrow = (choose(each, COSTS, where, Mode.BALANCED) for each in (workload, as_type(workload, BF16)))
        verdicts.add((wide.stays_dense, narrow.stays_dense))
    assert (False, True) in verdicts
    assert (True, False) not in verdicts


def test_pinned_gradients_of_two_types_have_buckets_of_their_own():
    workload = drawn(2, (F32, BF16))
    terms = Terms(Mode.BALANCED, pins=Pins.read({"g*": "int8"}))
    plan = choose(workload, COSTS, cluster(2, 1, "300mbit"), terms).plan
    plan.check_covers(workload.sizes, workload.types)
    assert {str(bucket.strategy.compressor) for bucket in plan.buckets} == {"int8"}


def test_a_plan_says_the_type_of_its_gradients():
    plan = Plan((Bucket(("w",), (8,), DENSE, element_type=BF16), Bucket(("v",), (2,), DENSE)))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.buckets[0].dense_bytes == 16
    plan.check_covers({"w": 8, "v": 2}, {"w": BF16, "v": F32})
    with pytest.raises(BadPlan, match="bucket 0 of the plan holds bf16 gradients; the gradient of 'w' is f32 here"):
        plan.check_covers({"w": 8, "v": 2}, {"w": F32, "v": F32})


@pytest.mark.skipif(not kernels.available(), reason="needs the C++ search")
def test_many_pins_of_several_types_are_priced_apart():
    """Sixty strands: two types of each of 14 pins, and what is not pinned."""
    names = ("int8", "int4", "bf16", "sign", "int2", "fp16", "cmax", *(f"topk({k / 100})" for k in range(1, 8)))
    gradients = [
        Gradient(f"{number}.{kind}", (64 + number, 64), 10.0 * number, 1.0, kind)
        for number in range(len(names))
        for kind in ElementType
    ]
    pins = Pins.read({f"{number}.*": name for number, name in enumerate(names)})
    workload, where = Workload(tuple(gradients), 200.0), cluster(2, 1, "300mbit")
    for search in searches_of(StepPrices(workload, COSTS, where), Terms(Mode.BALANCED, pins=pins)):
        parts = search.starts([0], 1)[0].parts
        assert len({part.strand for part in parts}) == len(gradients)
        (value,) = search.engine.values([parts])
        plan = search.plan(Found(parts, value, search.strands))
        assert value.us == pytest.approx(predict_us(workload, plan, COSTS, where), rel=5e-3)
