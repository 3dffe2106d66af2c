"""The search among numbers: its prices are those of tasks, its plans are legal, and pairs of changes are found."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.workloads import COSTS, cluster, layers, matrices

from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.compressors import kernels
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.table import CostTable
from fxcomp.plan.budget import plan_error, strategy_error
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.modes import Content, Mode, strategies
from fxcomp.plan.pins import Pins
from fxcomp.search.choose import predict_us
from fxcomp.search.descent.cells import Limits, Part, Parts, Value
from fxcomp.search.descent.plan_search import Found, PlanSearch
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Question, Terms, questions_of
from fxcomp.search.workload import Workload

TRANSPORT = {CollectiveKind.ALL_REDUCE: TransportCost(50.0, 300.0)}
TABLES = {
    "unshared": COSTS,
    "one processor": replace(COSTS, processors=Processors(1.0, 1.0), transport=TRANSPORT, overlap_speed=0.8),
    "two processors": replace(COSTS, processors=Processors(2.0, 1.0), transport=TRANSPORT),
    "copies": replace(COSTS, copy_gb_per_s=10.0),
}


def every_option(workload: Workload, costs: CostTable, where: Cluster) -> PlanSearch:
    """A search among all strategies for all gradients."""
    choices = {Content.MIXED: strategies(Mode.LOSSY, where)}
    return PlanSearch(Question(choices), StepPrices(workload, costs, where))


def random_parts(search: PlanSearch, chance: random.Random) -> Parts:
    """Buckets of neighbours with any options, of a search with one strand."""
    cells = search.strands[0].cells
    borders = [0, *sorted(chance.sample(range(1, cells), min(cells - 1, chance.choice((1, 4, 12))))), cells]
    return tuple(Part(0, start, stop, chance.randrange(len(search.options[0]))) for start, stop in pairwise(borders))


COMMITTING = {"commits": True, "clips": True, "finish_us": 100.0}
SHARING = {"broadcast_bytes": 10_000, "broadcast_ready_us": 30_000.0, "buffers_us": 50.0}


@pytest.mark.parametrize(
    ("hosts", "extra"),
    [((2, 1), {}), ((4, 1), COMMITTING), ((2, 4), SHARING), ((8, 8), {**COMMITTING, **SHARING})],
    ids=["2x1", "4x1", "2x4", "8x8"],
)
def test_plans_are_priced_as_their_tasks_are_to_half_a_percent(hosts: tuple[int, int], extra: dict[str, float]):
    chance = random.Random(0)
    where, workload = cluster(*hosts, "1gbit"), replace(layers(20), **extra)
    for costs in TABLES.values():
        search = every_option(workload, costs, where)
        plans = [random_parts(search, chance) for _ in range(3)]
        for parts, value in zip(plans, search.engine.values(plans), strict=True):
            plan = search.plan(Found(parts, value, search.strands))
            assert value.us == pytest.approx(predict_us(workload, plan, costs, where), rel=5e-3)


@pytest.mark.skipif(not kernels.available(), reason="no kernels are built")
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("mixed", "pins"),
    [(False, {}), (True, {}), (False, {"layer[0-3].*": "int8", "*.bias": "dense"})],
    ids=["apart", "mixed", "pinned"],
)
@pytest.mark.one_in(5)
def test_an_improved_plan_is_legal_no_slower_and_priced_as_its_tasks_are(table: str, mixed: bool, pins: dict[str, str]):
    costs, where = TABLES[table], cluster(2, 2, "1gbit")
    workload = replace(layers(9), broadcast_bytes=10_000, broadcast_ready_us=30_000, finish_us=0, commits=mixed)
    prices = StepPrices(workload, costs, where)
    question = questions_of(prices, Terms(Mode.BALANCED, pins=Pins.read(pins)))[mixed]
    search = PlanSearch(question, prices)
    starts = [found.parts for found in search.starts(range(len(search.options[0])))]

    def checked(parts: Parts, value: Value) -> float:
        """Return the error of a plan that covers every gradient and is priced as its tasks are."""
        assert search.engine.values([parts]) == [value]
        plan = search.plan(Found(parts, value, search.strands))
        plan.check_covers(workload.sizes)
        assert value.us == pytest.approx(predict_us(workload, plan, costs, where), rel=5e-3)
        assert value.lost <= question.bounds.lost
        assert value.lost == pytest.approx(plan_error(plan, where) * sum(workload.sizes.values()), rel=1e-6, abs=1e-3)
        return value.us

    for parts, value in zip(starts, search.engine.values(starts), strict=True):
        if math.isfinite(value.us):
            checked(parts, value)
    begun, limits = starts[-1], Limits(evaluations=120, options=3)
    begun_us = search.engine.values([begun])[0].us
    changes = ({}, {"dense_only": True}, {"price": 1e-3}, {"price": 1e-2, "borders": False})
    for asked in (limits._replace(**each) for each in changes):
        parts, looked_at = search.engine.improve(begun, asked)
        (value,) = search.engine.values([parts])
        assert looked_at > 0
        assert checked(parts, value) <= begun_us or asked.price
        if not asked.borders:
            assert [part._replace(option=0) for part in parts] == [part._replace(option=0) for part in begun]
    options = [(number,) * len(search.strands) for number in (0, 1)]
    changed = [tuple(part._replace(option=each[part.strand]) for part in starts[0]) for each in options]
    assert search.engine.with_options(starts[0], options) == search.engine.values(changed)
    for place, values in enumerate(search.engine.others(starts[0])):
        for option, value in enumerate(values):
            other = (*starts[0][:place], starts[0][place]._replace(option=option), *starts[0][place + 1 :])
            assert search.engine.values([other]) == [value]


def test_curves_of_processor_time_are_read_only_where_there_are_some():
    """They are not traced for unshared processors, whatever a table's transport and a broadcast take."""
    workload = replace(layers(3), **SHARING)
    for costs in (*TABLES.values(), replace(COSTS, transport=TRANSPORT)):
        p = every_option(workload, costs, cluster(2, 4, "1gbit")).problem
        kinds = 3 if p.shares else 1
        collectives = {number for number in p.task_collective if number >= 0}
        read = {number + kind for number in collectives for kind in range(kinds)}
        assert max(read) < len(p.curve_points) - 1
        assert not p.shares or not read & {number for number in p.term_curve if number not in collectives}


def test_two_changes_are_made_together_where_no_single_one_helps():
    """The error limit is used up: one bucket must lose less for another to lose more."""
    workload, where = matrices(900_000, 1_000_000, backward_us=9_000.0), cluster(2, 1, "300mbit")
    prices = StepPrices(workload, COSTS, where)
    choices = {Content.MIXED: strategies(Mode.BALANCED, where)}
    search = PlanSearch(Question(choices), prices)
    names = [str(option.strategy) for option in search.options[0]]
    dense, int4 = (next(k for k, name in enumerate(names) if text in name) for text in ("all_reduce", "int4"))
    lossable = 1_000_001 * strategy_error(search.options[0][int4].strategy, where)
    bounded = PlanSearch(replace(search.question, bounds=replace(search.question.bounds, lost=lossable)), prices)
    one, other = (Part(0, 0, 1, dense), Part(0, 1, 2, int4)), (Part(0, 0, 1, int4), Part(0, 1, 2, dense))
    slower, faster = sorted((one, other), key=lambda parts: -bounded.engine.values([parts])[0].us)
    found, _ = bounded.engine.improve(slower, Limits())
    assert bounded.engine.values([found])[0].us <= bounded.engine.values([faster])[0].us
    assert math.isinf(bounded.engine.values([(Part(0, 0, 1, int4), Part(0, 1, 2, int4))])[0].us)
