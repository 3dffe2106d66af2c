"""The lower bound: below every plan that is tried, whatever the prices, and close where there is little to decide."""

import random
from dataclasses import replace

import pytest
from helpers.workloads import COSTS, DISTINCT_MODES, cluster, layers

from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cost.measured import MeasuredCollective
from fxcomp.cost.piecewise import Fit, Piece
from fxcomp.cost.table import CostTable
from fxcomp.plan.budget import plan_error, polluting_share
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.modes import Content, Mode, error_limit, strategies
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.search.bound import bound_us
from fxcomp.search.choose import choose, predict_us
from fxcomp.search.workload import Gradient, Workload

EAGER = replace(COSTS, error=0.0)


def switched() -> MeasuredCollective:
    """Times that jump, and rise less steeply after."""
    pieces = (Piece(0.0, 80.0, 2e-3), Piece(65_536.0, 300.0, 1.1e-3, is_switch=True))
    return MeasuredCollective(4, Fit(pieces, 1024.0, 4e6, 9))


TABLES: dict[str, CostTable] = {
    "assumed": EAGER,
    "no pool": replace(EAGER, processors=Processors(1.0, 1.0)),
    "a pool that slows itself": replace(EAGER, processors=Processors(2.0, 1.0)),
    "host and device": replace(EAGER, copy_gb_per_s=12.0),
    "nothing known of compressors": replace(EAGER, compressors={}),
    "measured": replace(
        EAGER,
        collectives={(kind, "4x1"): switched() for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)},
    ),
}


def drawn(chance: random.Random) -> tuple[Workload, Cluster]:
    scale, ready_us = 10 ** chance.uniform(3, 6.5), 0.0
    gradients: list[Gradient] = []
    for k in range(chance.randint(1, 12)):
        ready_us += chance.random() * 10 ** chance.uniform(0, 4)
        shape = (768,) if chance.random() < 0.3 else (64, int(1 + scale * chance.uniform(0.1, 5) / 64))
        gradients.append(Gradient(f"g{k}", shape, ready_us, chance.uniform(0, 50)))
    where = cluster(*chance.choice([(2, 1), (4, 1), (2, 2), (8, 8)]), f"{10 ** chance.uniform(-1, 2):.3g}gbit")
    options = {"commits": True} if chance.random() < 0.3 else {}
    return Workload(tuple(gradients), ready_us + chance.choice([0.0, 300.0]), **options), where


def any_plan(workload: Workload, costs: CostTable, where: Cluster, mode: Mode, chance: random.Random) -> Plan:
    """Neighbours in buckets, vectors apart or not, each with any strategy that it may have."""
    mixed = chance.random() < 0.5
    rows: dict[Content, list[Gradient]] = {}
    for gradient in workload.gradients:
        own = Content.VECTORS if gradient.is_vector else Content.MATRICES
        rows.setdefault(Content.MIXED if mixed else own, []).append(gradient)
    place = {gradient.name: k for k, gradient in enumerate(workload.gradients)}
    buckets: list[tuple[int, Bucket]] = []
    for content, row in rows.items():
        while row:
            size = chance.randint(1, len(row))
            group, row = row[:size], row[size:]
            strategy = chance.choice(strategies(mode, where, content, offload=costs.offloads))
            bucket = Bucket(tuple(g.name for g in group), tuple(g.elements for g in group), strategy)
            buckets.append((place[group[-1].name], bucket))
    return Plan(tuple(bucket for _, bucket in sorted(buckets, key=lambda each: each[0])))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_below_the_bound(table: str, seed: int):
    chance = random.Random(f"{table} {seed}")
    workload, where = drawn(chance)
    costs, mode, bursts = TABLES[table], chance.choice(DISTINCT_MODES), chance.choice([1.0, 0.15])
    bound = bound_us(workload, costs, where, mode, bursts=bursts)
    assert bound >= workload.free_us
    for _ in range(6):
        plan = any_plan(workload, costs, where, mode, chance)
        if plan_error(plan, where) <= error_limit(mode) and polluting_share(plan, where) <= bursts:
            assert bound <= predict_us(workload, plan, costs, where)


@pytest.mark.parametrize(("rate", "within"), [("100mbit", 0.03), ("100gbit", 0.03)])
def test_the_bound_is_close_where_one_stream_rules(rate: str, within: float):
    workload, where = layers(12), cluster(2, 1, rate)
    best_us = choose(workload, EAGER, where, Mode.BALANCED).step_us
    bound = bound_us(workload, EAGER, where, Mode.BALANCED)
    assert bound <= best_us <= bound * (1 + within)


@pytest.mark.parametrize("hosts", [(2, 4), (3, 2)])
def test_the_bound_of_a_few_elements_and_of_none_is_below_their_plan(hosts: tuple[int, int]):
    where = cluster(*hosts, "1gbit")
    for shapes in (((1,),), ((33,),), ((70,),), ((0, 5),), ((0,), (64, 32), (5, 0, 3))):
        workload = Workload(tuple(Gradient(f"g{k}", shape, 0.0, 1.0) for k, shape in enumerate(shapes)), 0.0)
        best_us = choose(workload, EAGER, where, Mode.LOSSLESS).fastest_us
        assert bound_us(workload, EAGER, where, Mode.LOSSLESS) <= best_us


def test_one_rank_alone_is_bound_by_its_own_work():
    assert bound_us(layers(3), EAGER, cluster(1, 1, "1gbit"), Mode.BALANCED) == layers(3).free_us
