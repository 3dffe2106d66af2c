"""Solving again for a plan in force."""

from dataclasses import replace

import pytest
from helpers.drawn_errors import drawn_table
from helpers.workloads import COSTS, cluster, layers, matrices

from fxcomp.cluster.cluster import Processors
from fxcomp.compressors import parse_compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.error_tables import ASSUMED, ErrorRow, ErrorTable
from fxcomp.plan.budget import Budget, ErrorBudget, plan_error
from fxcomp.plan.modes import Mode
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.choose import choose, predict_us, uniform
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms
from fxcomp.search.resolve import WORTH_MOVING, Resolve
from fxcomp.search.workload import Workload

WORKLOAD, SLOW = layers(10), cluster(8, 1, "300mbit")


def terms_of(asked: str | float, table: ErrorTable = ASSUMED, pins: str = "") -> Terms:
    given = Pins.read({"layer3.weight": pins} if pins else None)
    return Terms(Mode.BALANCED, pins=given, budget=Budget(ErrorBudget.parse(asked), table))


def solved(plan: Plan, terms: Terms, workload: Workload = WORKLOAD, *, moves: bool = True) -> tuple[Plan, Resolve]:
    solving = Resolve(StepPrices(workload, COSTS, SLOW), plan, terms, moves=moves)
    while (found := solving.turn()) is None:
        pass
    return found, solving


@pytest.mark.parametrize("asked", ["topk(0.01)", "int4", "powersgd(4)", "int4 > int4", "balanced", 0.1, 0.0])
@pytest.mark.parametrize("moves", [False, True])
def test_a_solution_keeps_the_budget_and_is_predicted_as_it_says(asked: str | float, moves: bool):
    plan = choose(WORKLOAD, COSTS, SLOW, terms_of(asked)).fastest
    for seed in range(3):
        terms = terms_of(asked, drawn_table(WORKLOAD.shapes, seed))
        limit = terms.limit(WORKLOAD, SLOW)
        found, solving = solved(plan, terms, moves=moves)
        error = plan_error(found, SLOW, terms.table)
        assert error <= limit * (1 + 1e-8)
        assert solving.before is not None
        assert solving.after is not None
        assert solving.after.error == pytest.approx(error, rel=1e-6, abs=1e-12)
        assert solving.before.error == pytest.approx(plan_error(plan, SLOW, terms.table), rel=1e-6, abs=1e-12)
        assert solving.after.step_us == pytest.approx(predict_us(WORKLOAD, found, COSTS, SLOW), rel=6e-3)
        if not moves:
            assert [each.names for each in found.buckets] == [each.names for each in plan.buckets]
        plan = found


def test_other_buckets_are_taken_where_they_save_enough():
    """One bucket for all was right while all gradients were alike; now one of them must be sent whole."""
    workload = matrices(*[1_000_000] * 8, backward_us=5_000.0)
    names, sizes = tuple(workload.sizes), tuple(workload.sizes.values())
    plan = Plan((Bucket(names, sizes, Strategy.flat(parse_compressor("topk(0.01)"))),))
    even = ErrorRow((1000, 1000), 1.0, drawn_table({"w": (1000, 1000)}, 1).rows["w"].errors, 3)
    rows = {gradient.name: even for gradient in workload.gradients}
    rows["w0"] = ErrorRow((1000, 1000), 1e6, even.errors, 3)
    terms = terms_of(0.05, ErrorTable(rows))
    shut, stays = solved(plan, terms, workload, moves=False)
    free, moved = solved(plan, terms, workload)
    assert stays.after is not None
    assert moved.after is not None
    assert moved.after.step_us < stays.after.step_us * (1 - WORTH_MOVING)
    assert [each.names for each in free.buckets] != [each.names for each in shut.buckets]


def test_what_is_pinned_stays():
    terms = terms_of("topk(0.01)", drawn_table(WORKLOAD.shapes, 5), pins="int8")
    plan = choose(WORKLOAD, COSTS, SLOW, terms).fastest
    for moves in (False, True):
        found, _ = solved(plan, terms, moves=moves)
        (bucket,) = [each for each in found.buckets if "layer3.weight" in each.names]
        assert {compressor.name for compressor in bucket.strategy.compressors} == {"int8"}


def test_two_solutions_of_the_same_are_the_same():
    terms = terms_of("topk(0.01)", drawn_table(WORKLOAD.shapes, 6))
    plan = choose(WORKLOAD, COSTS, SLOW, terms).fastest
    assert solved(plan, terms)[0] == solved(plan, terms)[0]


def test_error_that_buys_no_time_is_given_back():
    """Compute hides everything on a fast network: nothing is compressed, whatever is allowed."""
    fast = cluster(8, 1, "400gbit")
    terms = terms_of("topk(0.01)", drawn_table(WORKLOAD.shapes, 7))
    plan = uniform("topk(0.01)", WORKLOAD, COSTS, fast)
    solving = Resolve(StepPrices(WORKLOAD, COSTS, fast), plan, terms)
    while (found := solving.turn()) is None:
        pass
    assert plan_error(found, fast, terms.table) < 1e-3


@pytest.mark.parametrize("moves", [False, True])
def test_the_pool_is_offered_only_where_a_processor_is_spare(moves: bool):
    """Its compressors are a hundred times as fast here, and would be taken."""
    slow = CompressorCost.of(*(CompressorPoint(n, 0.5 * n, 0.3 * n) for n in (4096, 1 << 20)))
    near = dict.fromkeys(COSTS.compressors, slow)
    far = {key.replace("@gpu", "@cpu"): curve for key, curve in COSTS.compressors.items()}
    costs = replace(COSTS, compressors={**near, **far}, processors=Processors(1, 1))
    terms = terms_of("topk(0.01)")
    solving = Resolve(StepPrices(WORKLOAD, costs, SLOW), uniform("dense", WORKLOAD, COSTS, SLOW), terms, moves=moves)
    while (found := solving.turn()) is None:
        pass
    assert not any("@cpu" in str(bucket.strategy) for bucket in found.buckets)
