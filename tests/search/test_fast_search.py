"""The search's own prices, its two implementations, and what it must never miss."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from workloads import COSTS, cluster, layers, matrices

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.processors import Processors
from fxcomp.compressors import kernels
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.curve import TOLERANCE, trace
from fxcomp.cost.table import CostTable
from fxcomp.optimum.oracle import optimum
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.modes import Content, Mode, strategies
from fxcomp.search.atoms import atoms_of
from fxcomp.search.choose import bf16_everywhere, choose, flip_gbit, predict_us, searches_of_mode, uniform
from fxcomp.search.descent.cells import MOST_CELLS, lane_of
from fxcomp.search.descent.descent import Descent
from fxcomp.search.descent.engine import Compiled
from fxcomp.search.descent.parts import Limits, Part, Parts
from fxcomp.search.descent.plan_search import Found, PlanSearch, Question, question_of_mode
from fxcomp.search.descent.problem import TracedPrices
from fxcomp.search.exact_plans import ExactPlans
from fxcomp.search.workload import Gradient, Workload

TRANSPORT = {CollectiveKind.ALL_REDUCE: TransportCost(50.0, 300.0, 0.8, 20.0)}
TABLES = {
    "unshared": COSTS,
    "one processor": replace(COSTS, processors=Processors(1.0, 1.0), transport=TRANSPORT),
    "two processors": replace(COSTS, processors=Processors(2.0, 1.0), transport=TRANSPORT),
    "copies": replace(COSTS, copy_gb_per_s=10.0),
}


def every_option(workload: Workload, costs: CostTable, where: Cluster) -> PlanSearch:
    """A search among all strategies for all gradients."""
    choices = {Content.MIXED: strategies(Mode.AGGRESSIVE, where)}
    return PlanSearch(Question(workload, choices), TracedPrices(costs, where))


def random_parts(search: PlanSearch, chance: random.Random) -> Parts:
    """Buckets of neighbours with any options, of a search with one lane."""
    cells = search.lanes[0].cells
    borders = [0, *sorted(chance.sample(range(1, cells), min(cells - 1, chance.choice((1, 4, 12))))), cells]
    return tuple(Part(0, start, stop, chance.randrange(len(search.options[0]))) for start, stop in pairwise(borders))


def test_a_curve_follows_kinks_and_jumps():
    def price(size: float) -> float:
        return max(5.0, size / 100) + (50.0 if size > 100_000 else 0.0)

    curve = trace(price, 1e6)
    chance = random.Random(0)
    for size in [10 ** chance.uniform(0, 6) for _ in range(200)]:
        if not 99_800 < size < 100_200:  # across a jump a line is steep
            assert curve.at(size) == pytest.approx(price(size), rel=4 * TOLERANCE)
    assert curve.at(4e6) == pytest.approx(price(4e6), rel=0.01)


KEEPING = {"commits": True, "keeps_velocity": True, "clips": True, "finish_us": 100.0}
SHARING = {"broadcast_bytes": 10_000, "broadcast_ready_us": 30_000.0, "buffers_us": 50.0}


@pytest.mark.parametrize(
    ("hosts", "extra"),
    [((2, 1), {}), ((4, 1), KEEPING), ((2, 4), SHARING), ((8, 8), {**KEEPING, **SHARING})],
    ids=["2x1", "4x1", "2x4", "8x8"],
)
def test_plans_are_priced_as_their_tasks_are_to_half_a_percent(hosts: tuple[int, int], extra: dict[str, float]):
    chance = random.Random(0)
    where, workload = cluster(*hosts, "1gbit"), replace(layers(20), **extra)
    for costs in TABLES.values():
        search = every_option(workload, costs, where)
        plans = [random_parts(search, chance) for _ in range(3)]
        for parts, value in zip(plans, search.engine.values(plans), strict=True):
            plan = search.plan(Found(parts, value, search.lanes))
            assert value.us == pytest.approx(predict_us(workload, plan, costs, where), rel=5e-3)


@pytest.mark.skipif(not kernels.available(), reason="no kernels are built")
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
def test_the_search_in_python_and_in_cpp_give_the_same_bits(table: str, mixed: bool):
    costs, where = TABLES[table], cluster(2, 2, "1gbit")
    workload = replace(layers(9), broadcast_bytes=10_000, broadcast_ready_us=30_000, finish_us=0, commits=mixed)
    traced = TracedPrices(costs, where)
    question = question_of_mode(workload, traced, Mode.BALANCED, mixed=mixed)
    search = PlanSearch(question, traced)
    problem = search.problems.at(traced, question.bounds)
    compiled, plain = Compiled(problem), Descent(problem)
    starts = [found.parts for found in search.starts(range(len(search.options[0])))]
    assert compiled.values(starts) == plain.values(starts)
    limits = Limits(evaluations=120, options=3)
    assert compiled.improve(starts[-1], limits) == plain.improve(starts[-1], limits)
    options = [(number,) * len(search.lanes) for number in (0, 1)]
    assert compiled.with_options(starts[0], options) == plain.with_options(starts[0], options)


@pytest.mark.parametrize("hosts", [(2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("rate", ["300mbit", "10gbit"])
def test_what_is_found_is_never_slower_than_a_uniform_plan(rate: str, hosts: tuple[int, int]):
    where, costs, workload = cluster(*hosts, rate), replace(COSTS, error=0.0), layers(12)
    choice = choose(workload, costs, where, Mode.BALANCED)
    names = ["dense", "bf16", "int8", *map(str, strategies(Mode.BALANCED, where))]
    for name in dict.fromkeys(names):
        us = predict_us(workload, uniform(name, workload, costs, where), costs, where)
        assert choice.fastest_us <= us * (1 + 1e-9)
    assert choice.fastest_us <= min(choice.bf16_us, choice.dense_us) * (1 + 1e-9)


def test_bf16_everywhere_is_by_level_where_that_is_faster():
    where, workload = cluster(2, 8, "1gbit"), layers(12)
    plan = bf16_everywhere(workload, COSTS, where)
    flat = predict_us(workload, uniform("bf16", workload, COSTS, where), COSTS, where)
    assert all(bucket.strategy.is_hierarchical for bucket in plan.buckets)
    assert (
        choose(workload, COSTS, where, Mode.LOSSLESS).bf16_us == predict_us(workload, plan, COSTS, where) < 0.7 * flat
    )


def test_thousands_of_gradients_are_joined_to_few_cells_and_given_out_whole():
    workload = layers(400)
    atoms = atoms_of(workload, 2)
    lane = lane_of(atoms, range(len(atoms)))
    assert lane.cells == MOST_CELLS
    assert lane.borders[0] == 0
    assert lane.borders[-1] == len(atoms)
    assert list(lane.borders) == sorted(set(lane.borders))
    assert max(lane.sizes()) <= 2.5 * max(4 * atom.elements for atom in atoms) + workload.dense_bytes / MOST_CELLS
    plan = choose(workload, COSTS, cluster(2, 1, "1gbit"), Mode.BALANCED).fastest
    plan.check_covers(workload.sizes)


def test_two_changes_are_made_together_where_no_single_one_helps():
    """The error limit is used up: one bucket must lose less for another to lose more."""
    workload, where = matrices(900_000, 1_000_000, backward_us=9_000.0), cluster(2, 1, "300mbit")
    traced = TracedPrices(COSTS, where)
    choices = {Content.MIXED: strategies(Mode.BALANCED, where)}
    search = PlanSearch(Question(workload, choices), traced)
    names = [str(option.strategy) for option in search.options[0]]
    dense, int4 = (next(k for k, name in enumerate(names) if text in name) for text in ("all_reduce", "int4"))
    lossable = 1_000_001 * search.options[0][int4].error
    bounded = PlanSearch(replace(search.question, bounds=replace(search.question.bounds, lost=lossable)), traced)
    one, other = (Part(0, 0, 1, dense), Part(0, 1, 2, int4)), (Part(0, 0, 1, int4), Part(0, 1, 2, dense))
    slower, faster = sorted((one, other), key=lambda parts: -bounded.engine.values([parts])[0].us)
    found, _ = bounded.engine.improve(slower, Limits())
    assert bounded.engine.values([found])[0].us <= bounded.engine.values([faster])[0].us
    assert math.isinf(bounded.engine.values([(Part(0, 0, 1, int4), Part(0, 1, 2, int4))])[0].us)


def test_exact_plans_price_as_the_tasks_do():
    workload, where = layers(8), cluster(2, 2, "1gbit")
    exact = ExactPlans(workload, COSTS, where)
    for search in searches_of_mode(workload, TracedPrices(COSTS, where), Mode.BALANCED):
        for found in search.starts(range(len(search.options[0]))):
            plan = search.plan(found)
            assert exact.step_us(plan) == predict_us(workload, plan, COSTS, where)


def test_a_gradient_without_elements_is_no_obstacle():
    gradients = (Gradient("empty", (0, 4), 100.0, 0.0), Gradient("w", (500, 4), 1_000.0, 1.0))
    choice = choose(Workload(gradients, 1_000.0), COSTS, cluster(2, 1, "1gbit"), Mode.AGGRESSIVE)
    assert sorted(choice.plan.names) == ["empty", "w"]


def test_where_the_verdict_flips_is_known_above_2_gib():
    """A model 200 times as large that computes 200 times as long flips where the small one does."""
    where = cluster(4, 1, "1gbit")
    small, large = (layers(20, elements=size, backward_us=size / 175) for size in (14_000_000, 2_800_000_000))
    flips = [flip_gbit(workload, COSTS, where, Mode.BALANCED) for workload in (small, large)]
    assert flips[0] == pytest.approx(flips[1], rel=0.25)


def test_a_large_matrix_travels_whole_where_its_factors_are_dearer_in_parts():
    shapes = {"t0": (64, 15683), "t1": (384, 10429), "t3": (896, 1075), "t4": (1444, 1584), "t5": (1272, 1296)}
    ready_us = (50.0, 700.0, 840.0, 1280.0, 1780.0)
    gradients = tuple(
        Gradient(name, shape, us, 1.0) for (name, shape), us in zip(shapes.items(), ready_us, strict=True)
    )
    workload, where = Workload(gradients, 1800.0), cluster(2, 1, "100mbit")
    assert len(atoms_of(workload, 2)) > len(gradients)
    choice = choose(workload, COSTS, where, Mode.AGGRESSIVE)
    assert choice.fastest_us <= optimum(workload, COSTS, where, Mode.AGGRESSIVE, known=choice.fastest).step_us * 1.001
