"""The bound is below the best plan of all, and that is below the choice, whatever the step waits for or shares."""

import random
from dataclasses import replace

import pytest
from helpers.optimum.oracle import EXACT, TooLarge, optimum
from helpers.workloads import COSTS, DISTINCT_MODES, cluster

from fxcomp.cluster.cluster import UNSHARED, Cluster, Processors
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.table import CostTable
from fxcomp.plan.budget import plan_error, polluting_share
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.modes import Mode, error_limit
from fxcomp.search.bound import bound_us
from fxcomp.search.choose import choose, predict_us
from fxcomp.search.question import Terms
from fxcomp.search.workload import Gradient, Workload

PROCESSORS = (UNSHARED, Processors(1.0, 1.0), Processors(2.0, 1.0), Processors(3.0, 1.0))
TRANSPORT = ({}, {CollectiveKind.ALL_REDUCE: TransportCost(50.0, 300.0)})
MOST = 3000  # partial plans: where there are more, the best one is not asked for


def drawn(seed: int) -> tuple[Workload, CostTable, Cluster, Mode, float]:
    chance = random.Random(seed)
    scale, ready_us = 10 ** chance.uniform(1, 6.5), 0.0
    gradients: list[Gradient] = []
    for k in range(chance.randint(1, 4)):
        ready_us += chance.random() * 10 ** chance.uniform(0, 4)
        shape = (768,) if chance.random() < 0.3 else (64, int(1 + scale * chance.uniform(0.1, 5) / 64))
        gradients.append(Gradient(f"g{k}", shape, ready_us, chance.uniform(0, 50)))
    waits = {
        "clips": chance.random() < 0.3,
        "commits": chance.random() < 0.3,
        "finish_us": chance.choice([0.0, 0.0, 500.0]),
    }
    shares = {"broadcast_bytes": 10_000, "broadcast_ready_us": ready_us / 2, "buffers_us": 30.0}
    workload = Workload(
        tuple(gradients), ready_us + chance.choice([0.0, 300.0]), **waits, **(shares if chance.random() < 0.3 else {})
    )
    costs = replace(
        COSTS,
        error=0.0,
        processors=chance.choice(PROCESSORS),
        transport=chance.choice(TRANSPORT),
        overlap_speed=0.8,
        copy_gb_per_s=chance.choice([None, None, 12.0]),
    )
    where = cluster(*chance.choice([(2, 1), (4, 1), (2, 2), (3, 4), (8, 8)]), f"{10 ** chance.uniform(-1, 2):.3g}gbit")
    return workload, costs, where, DISTINCT_MODES[seed % 3], chance.choice([1.0, 1.0, 0.5, 0.15])


@pytest.mark.parametrize("seed", range(9))
def test_the_bound_the_best_plan_and_the_choice_stand_in_this_order(seed: int):
    check(seed)


def check(seed: int) -> None:
    workload, costs, where, mode, bursts = drawn(seed)
    choice = choose(workload, costs, where, Terms(mode, bursts=bursts))
    for plan, us in (
        (choice.plan, choice.step_us),
        (choice.dense, choice.dense_us),
        (choice.fastest, choice.fastest_us),
    ):
        assert us == predict_us(workload, plan, costs, where) >= workload.free_us * (1 - 1e-9)
        assert plan_error(plan, where) <= error_limit(mode) * (1 + 1e-9)
        assert polluting_share(plan, where) <= bursts * (1 + 1e-9)
        plan.check_covers(workload.sizes)
    bound = bound_us(workload, costs, where, mode, bursts=bursts)
    assert bound <= choice.fastest_us <= choice.dense_us * (1 + 1e-9)
    if workload.broadcast_bytes or workload.commits:  # which the exact search does not know
        return
    try:
        best = optimum(workload, costs, where, Terms(mode, bursts=bursts), known=choice.fastest, most=MOST)
    except TooLarge:
        return
    assert bound <= best.step_us * (1 + EXACT)
    assert best.step_us <= choice.fastest_us
    assert best.step_us == pytest.approx(predict_us(workload, best.plan, costs, where))
