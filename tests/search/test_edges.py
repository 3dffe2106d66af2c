"""The search where numbers are extreme: gradients that a compressor cannot carry, steps that wait for everything."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from helpers.workloads import COSTS, DISTINCT_MODES, cluster, layers

from fxcomp.cluster.cluster import UNSHARED, Cluster, Processors
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.budget import plan_error
from fxcomp.plan.modes import Content, Mode, error_limit, strategies
from fxcomp.plan.plan import Plan
from fxcomp.search.bound import bound_us
from fxcomp.search.choose import choose, flip_gbit, predict_us, uniform
from fxcomp.search.descent.cells import Limits, Part
from fxcomp.search.descent.plan_search import PlanSearch, searches_of
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Question, Terms
from fxcomp.search.workload import Gradient, Workload

WHERE = cluster(2, 1, "1gbit")


def workload_of(*shapes: tuple[int, ...], **options: object) -> Workload:
    gradients = tuple(Gradient(f"w{k}", shape, 100.0 * (k + 1), 10.0) for k, shape in enumerate(shapes))
    return Workload(gradients, 100.0 * len(shapes), **options)


def selections(plan: Plan) -> list[range]:
    """The parts of gradients that a selection carries."""
    selecting = ("topk", "sidco")
    chosen = [bucket for bucket in plan.buckets if any(each.name in selecting for each in bucket.strategy.compressors)]
    return [extent for bucket in chosen for extent in bucket.extents]


@pytest.mark.parametrize("shape", [(3_000_000_000,), (60_000, 50_000), (2, 2_200_000_000)], ids=str)
def test_no_selection_carries_more_places_than_it_has_numbers_for(shape: tuple[int, ...]):
    workload = workload_of((100, 100), shape, (1000, 1000))
    choice = choose(workload, COSTS, WHERE, Mode.LOSSY)
    choice.fastest.check_covers(workload.sizes)
    assert all(len(extent) < 2**31 for plan in (choice.fastest, choice.plan) for extent in selections(plan))
    assert choice.fastest_us <= choice.dense_us
    assert bound_us(workload, COSTS, WHERE, Mode.LOSSY) <= choice.fastest_us


def test_where_the_verdict_flips_is_known_for_gradients_beyond_31_bits():
    vector, matrix = workload_of((3_000_000_000,)), workload_of((60_000, 50_000))
    for workload in (vector, matrix):
        workload = replace(workload, backward_us=5e6)
        assert flip_gbit(workload, COSTS, WHERE, Mode.LOSSY)


def test_a_selection_that_is_asked_for_by_name_is_refused_with_the_reason():
    workload = workload_of((2, 2_200_000_000))
    with pytest.raises(BadOption, match=r"nothing can be selected from [24]200000000 values"):
        predict_us(workload, uniform("topk(0.01)", workload, COSTS, WHERE), COSTS, WHERE)


def test_dense_is_left_where_nothing_else_is_carried():
    """Two atoms of a matrix fit into one bucket, all four do not."""
    workload = workload_of((60_000, 50_000))
    topk = next(each for each in strategies(Mode.LOSSY, WHERE) if "topk" in str(each))
    dense = next(each for each in strategies(Mode.LOSSY, WHERE) if each.is_dense)
    question = Question({Content.MATRICES: (dense, topk)})
    search = PlanSearch(question, StepPrices(workload, COSTS, WHERE))
    plans = [(Part(0, 0, 4, 1),), (Part(0, 0, 2, 1), Part(0, 2, 4, 1)), (Part(0, 0, 4, 0),)]
    values = search.engine.values(plans)
    assert [math.isinf(value.us) for value in values] == [True, False, False]
    improved, _ = search.engine.improve(plans[2], Limits())
    assert search.engine.values([improved])[0].us <= values[2].us


@pytest.mark.parametrize("waits", [*itertools.product([False, True], repeat=3)], ids=str)
def test_no_step_is_shorter_than_its_own_work(waits: tuple[bool, bool, bool]):
    """Or the search would take the work for a bound, and leave out faster plans."""
    clips, commits, shares = waits
    buffers = {"broadcast_bytes": 10_000, "broadcast_ready_us": 30_000.0, "buffers_us": 50.0} if shares else {}
    workload = replace(layers(6), clips=clips, commits=commits, finish_us=2_000.0, **buffers)
    where = cluster(2, 2, "100gbit")
    for search in searches_of(StepPrices(workload, COSTS, where), Terms(Mode.BALANCED)):
        assert all(found.value.us >= workload.free_us for found in search.starts(range(len(search.options[0]))))
    for name in ("dense", "bf16"):
        assert predict_us(workload, uniform(name, workload, COSTS, where), COSTS, where) >= workload.free_us


def tiny(seed: int) -> tuple[Workload, Cluster, CostTable, Mode]:
    """Gradients of a few elements, whose shards are rounded to far more than their share."""
    chance, ready_us = random.Random(seed), 0.0
    gradients: list[Gradient] = []
    for k in range(chance.randint(1, 4)):
        ready_us += chance.uniform(0.0, 200.0)
        shape = (chance.randint(1, 64),) if chance.random() < 0.4 else (chance.randint(1, 40), chance.randint(1, 40))
        gradients.append(Gradient(f"w{k}", shape, ready_us, chance.uniform(0.0, 5.0)))
    where = cluster(*chance.choice(CLUSTERS), f"{10 ** chance.uniform(-2, 2):.3g}gbit")
    costs = replace(COSTS, processors=chance.choice(PROCESSORS))
    return Workload(tuple(gradients), ready_us), where, costs, DISTINCT_MODES[seed % 3]


CLUSTERS = ((2, 1), (3, 1), (2, 3), (4, 4), (4, 8), (8, 8))
PROCESSORS = (UNSHARED, Processors(1.0, 1.0), Processors(2.0, 1.0))


@pytest.mark.parametrize("seed", [14, 160, *range(6)])
def test_no_uniform_plan_of_tiny_gradients_is_faster_than_the_choice(seed: int):
    workload, where, costs, mode = tiny(seed)
    choice = choose(workload, costs, where, mode)
    offered = strategies(mode, where, Content.MATRICES, offload=costs.offloads)
    for name in dict.fromkeys(["dense", *map(str, offered)]):
        plan = uniform(name, workload, costs, where)
        if plan_error(plan, where) <= error_limit(mode):
            assert choice.fastest_us <= predict_us(workload, plan, costs, where) * (1 + 1e-9)
    assert choice.fastest_us <= choice.dense_us * (1 + 1e-9)
