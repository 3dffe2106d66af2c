"""The exact search: against brute force, and never above what the search finds."""

import itertools
import random
from dataclasses import replace

import pytest
from helpers.optimum.oracle import EXACT, TooLarge, bound_us, optimum
from helpers.workloads import COSTS, cluster

from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cost.table import CostTable
from fxcomp.plan.modes import Content, Mode, strategies
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.search.choose import predict_us
from fxcomp.search.workload import Gradient, Workload

EAGER = replace(COSTS, error=0.0, launch_us=5.0)


def drawn(seed: int, count: int, *, vectors: bool = True) -> tuple[Workload, Cluster]:
    chance = random.Random(seed)
    scale, ready_us = 10 ** chance.uniform(4, 6.5), 0.0
    gradients: list[Gradient] = []
    for k in range(count):
        ready_us += chance.random() * 10 ** chance.uniform(1, 4)
        is_vector = vectors and chance.random() < 0.3
        shape = (768,) if is_vector else (64, int(2 + scale * chance.uniform(0.1, 5) / 64))
        gradients.append(Gradient(f"g{k}", shape, ready_us, chance.uniform(0, 50)))
    where = cluster(*chance.choice([(2, 1), (4, 1), (2, 2)]), f"{10 ** chance.uniform(-1, 2):.3g}gbit")
    return Workload(tuple(gradients), ready_us + chance.choice([0.0, 300.0]), clips=chance.random() < 0.3), where


def brute_force_us(workload: Workload, costs: CostTable, where: Cluster, mode: Mode) -> float:
    """All cuts of each row and all strategies, simulated; no gradient is large enough to be cut itself."""
    place = {gradient.name: k for k, gradient in enumerate(workload.gradients)}
    vectors = [gradient for gradient in workload.gradients if gradient.is_vector]
    others = [gradient for gradient in workload.gradients if not gradient.is_vector]
    groupings = [{Content.VECTORS: vectors, Content.MATRICES: others}, {Content.MIXED: list(workload.gradients)}]
    best = float("inf")
    for grouping in groupings if vectors and others else groupings[:1]:
        cut = [
            [[(content, group) for group in groups] for groups in cuts(row)] for content, row in grouping.items() if row
        ]
        for rows in itertools.product(*cut):
            buckets = sorted(itertools.chain(*rows), key=lambda bucket: place[bucket[1][-1].name])
            choices = [strategies(mode, where, content, offload=costs.offloads) for content, _ in buckets]
            for chosen in itertools.product(*choices):
                made = (
                    Bucket(tuple(g.name for g in group), tuple(g.elements for g in group), strategy)
                    for (_, group), strategy in zip(buckets, chosen, strict=True)
                )
                best = min(best, predict_us(workload, Plan(tuple(made)), costs, where))
    return best


def cuts(row: list[Gradient]) -> list[list[list[Gradient]]]:
    found: list[list[list[Gradient]]] = []
    for places in itertools.product((False, True), repeat=len(row) - 1):
        borders = [0, *(k + 1 for k, is_cut in enumerate(places) if is_cut), len(row)]
        found.append([row[a:b] for a, b in itertools.pairwise(borders)])
    return found


@pytest.mark.parametrize("seed", [3, 4, 6])
def test_the_optimum_is_what_brute_force_finds(seed: int):
    workload, where = drawn(seed, 3)
    costs = replace(EAGER, processors=Processors(1.0, 1.0))  # no pool, or there is too much to try
    mode = Mode.BALANCED
    best = brute_force_us(workload, costs, where, mode)
    assert optimum(workload, costs, where, mode).step_us == pytest.approx(best, rel=2 * EXACT)


@pytest.mark.parametrize("processors", [3.0, 2.0], ids=["spare", "shared"])
def test_the_optimum_is_what_brute_force_finds_with_a_pool(processors: float):
    workload, where = drawn(1, 2, vectors=False)
    costs = replace(EAGER, processors=Processors(processors, 1.0))
    best = brute_force_us(workload, costs, where, Mode.LOSSY)
    assert optimum(workload, costs, where, Mode.LOSSY).step_us == pytest.approx(best, rel=2 * EXACT)


def test_a_large_workload_is_refused_by_number():
    workload, where = drawn(3, 6)
    with pytest.raises(TooLarge, match="more than 5 partial plans for"):
        optimum(workload, EAGER, where, Mode.BALANCED, most=5)


def test_one_rank_alone_has_one_plan():
    workload, _ = drawn(3, 3)
    alone = cluster(1, 1, "1gbit")
    assert optimum(workload, EAGER, alone, Mode.BALANCED).step_us == pytest.approx(workload.free_us)


def test_a_step_without_gradients_is_its_own_optimum():
    workload = Workload((), 1000.0)
    assert optimum(workload, EAGER, cluster(2, 1, "1gbit"), Mode.BALANCED).step_us == workload.backward_us
    assert bound_us(workload, EAGER, cluster(2, 1, "1gbit"), Mode.BALANCED) == workload.backward_us
