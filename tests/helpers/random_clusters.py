"""Random trees of random links, and groups of ranks on them."""

from __future__ import annotations

import random

from fxcomp.cluster.cluster import Cluster, Tier
from fxcomp.cluster.link import Link

Group = tuple[int, ...]


def random_link(chance: random.Random) -> Link:
    return Link(
        alpha_us=10 ** chance.uniform(-1, 3),
        gb_per_s=10 ** chance.uniform(-2, 2),
        in_gb_per_s=chance.choice([None, 10 ** chance.uniform(-2, 2)]),
        message_us=chance.choice([0.0, 10 ** chance.uniform(-1, 1)]),
        is_half_duplex=chance.random() < 0.3,
        is_shared=chance.random() < 0.3,
    )


def random_cluster(chance: random.Random) -> Cluster:
    """Up to three tiers, ranks anywhere."""
    hosts = chance.randint(1, 6)
    placement = [*range(hosts), *(chance.randrange(hosts) for _ in range(chance.randint(0, 8)))]
    chance.shuffle(placement)
    above: list[Tier] = []
    below = hosts
    for name in ("rack", "room")[: chance.randint(0, 2)]:
        units = [min(k, chance.randint(0, 2)) for k in range(below)]
        numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        above.append(Tier(name, random_link(chance), tuple(numbers[unit] for unit in units)))
        below = len(numbers)
    links = {"intra": random_link(chance), "inter": random_link(chance)}
    return Cluster.placed(placement, **links, above=tuple(above))


def random_groups(chance: random.Random, cluster: Cluster) -> tuple[Group, list[Group]]:
    """A group in any order, and others beside it."""
    ranks = chance.sample(range(cluster.world_size), cluster.world_size)
    cut = chance.randint(1, len(ranks))
    rest = ranks[cut:]
    middle = chance.randint(0, len(rest))
    return tuple(ranks[:cut]), [tuple(part) for part in (rest[:middle], rest[middle:]) if part]
