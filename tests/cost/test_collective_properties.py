"""These laws hold for every collective and algorithm, wherever its ranks sit: on random trees of random links."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.random_clusters import Group, random_cluster, random_groups

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.collectives import FORMULAS, Algorithm, collective_us
from fxcomp.plan.kinds import CollectiveKind

PAIRS = [(kind, algorithm) for kind, algorithms in FORMULAS.items() for algorithm in (*algorithms, None)]
SEEDS = range(60)
NEARLY = 1 - 1e-9
ROOTED = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE, CollectiveKind.GATHER)


def with_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    above = tuple(replace(tier, link=change(tier.link)) for tier in cluster.above)
    return replace(cluster, intra=change(cluster.intra), inter=change(cluster.inter), above=above)


def slower(chance: random.Random) -> Callable[[Link], Link]:
    def change(link: Link) -> Link:
        into = link.in_gb_per_s or link.gb_per_s
        return replace(link, gb_per_s=link.gb_per_s * chance.uniform(0.2, 1), in_gb_per_s=into * chance.uniform(0.2, 1))

    return change


def later(chance: random.Random) -> Callable[[Link], Link]:
    return lambda link: replace(
        link,
        alpha_us=link.alpha_us + chance.choice([0, 10 ** chance.uniform(-1, 3)]),
        message_us=link.message_us + chance.choice([0, 10 ** chance.uniform(-1, 1)]),
    )


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_flat_prices_never_fall_with_bytes_ranks_neighbours_latency_or_less_bandwidth(
    kind: CollectiveKind, algorithm: Algorithm | None
):
    for seed in SEEDS:
        chance = random.Random(seed)
        cluster = random_cluster(chance)
        group, beside = random_groups(chance, cluster)
        size = 10 ** chance.uniform(0, 9)

        def us(where: Cluster, ranks: Group, others: list[Group], size: float = size) -> float:
            return collective_us(kind, size, where.topology_of(ranks, others), algorithm)

        here = us(cluster, group, [])
        assert us(cluster, group[:1], beside) == 0.0
        if len(group) == 1:
            assert here == 0.0
        else:
            assert here > 0.0
        assert us(cluster, group, [], size * chance.uniform(1, 3)) >= here
        assert us(cluster, group, beside) >= here * NEARLY
        assert us(with_links(cluster, slower(chance)), group, []) >= here * NEARLY
        assert us(with_links(cluster, later(chance)), group, []) >= here * NEARLY
        # Without its first rank, a rooted collective has another root, whose link may be slower.
        for place in range(1 if kind in ROOTED else 0, len(group)):
            fewer = (*group[:place], *group[place + 1 :])
            if fewer:
                assert us(cluster, fewer, []) <= here / NEARLY
