"""The formulas of collectives against numbers worked out by hand, and what is solved from them."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import Link
from fxcomp.cost import collectives as formulas
from fxcomp.cost.collectives import CANDIDATES, FORMULAS, Algorithm, Library
from fxcomp.cost.table import CostTable, collective_formula
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.report.wire_arithmetic import Compression, pays_at_gb_per_s

K, A = CollectiveKind, Algorithm
PAIRS = [(kind, algorithm) for kind, algorithms in FORMULAS.items() for algorithm in algorithms]

# α = 10 µs, o = 1 µs, B = 1 GB/s = 1000 bytes a µs, p = 4, n = 8000 bytes
BY_HAND = {
    (K.ALL_REDUCE, A.RING): 60.0 + 6.0 + 12.0,
    (K.ALL_REDUCE, A.TREE): 40.0 + 4.0 + 16.0 / 0.9,
    (K.ALL_REDUCE, A.HALVING_DOUBLING): 40.0 + 4.0 + 12.0,
    (K.REDUCE_SCATTER, A.RING): 30.0 + 3.0 + 6.0,
    (K.REDUCE_SCATTER, A.HALVING_DOUBLING): 20.0 + 2.0 + 6.0,
    (K.REDUCE_SCATTER, A.DIRECT): 10.0 + 3.0 + 6.0,
    (K.ALL_GATHER, A.RING): 30.0 + 3.0 + 24.0,
    (K.ALL_GATHER, A.HALVING_DOUBLING): 20.0 + 2.0 + 24.0,
    (K.ALL_GATHER, A.DIRECT): 10.0 + 3.0 + 24.0,
    (K.ALL_TO_ALL, A.DIRECT): 10.0 + 3.0 + 6.0,
    (K.BROADCAST, A.RING): 30.0 + 1.0 + 8.0,
    (K.BROADCAST, A.DIRECT): 10.0 + 3.0 + 24.0,
    (K.REDUCE, A.RING): 30.0 + 1.0 + 8.0,
    (K.REDUCE, A.DIRECT): 10.0 + 3.0 + 24.0,
    (K.GATHER, A.DIRECT): 10.0 + 3.0 + 24.0,
    (K.POINT_TO_POINT, A.DIRECT): 10.0 + 1.0 + 8.0,
}


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_four_ranks_take_what_is_worked_out_by_hand(kind: K, algorithm: A):
    us = formulas.time_us(kind, 4, 8000, alpha_us=10.0, gb_per_s=1.0, message_us=1.0, algorithm=algorithm)
    assert us == pytest.approx(BY_HAND[kind, algorithm])


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_one_rank_takes_no_time_and_sends_nothing(kind: K, algorithm: A):
    assert formulas.time_us(kind, 1, 8000, 10.0, 1.0, 1.0, algorithm) == 0.0
    assert formulas.wire_bytes(kind, 1, 8000, algorithm) == 0.0
    assert formulas.counts(kind, 1, algorithm) == (0.0, 0.0, 0.0)


def test_every_collective_has_a_price():
    assert set(FORMULAS) == set(K)
    for library in Library:
        assert {kind: set(CANDIDATES[library][kind]) - set(FORMULAS[kind]) for kind in K} == {kind: set() for kind in K}
    assert {kind: formulas.default_algorithm(kind) for kind in (K.ALL_REDUCE, K.ALL_GATHER, K.REDUCE_SCATTER)} == {
        K.ALL_REDUCE: A.RING,
        K.ALL_GATHER: A.RING,
        K.REDUCE_SCATTER: A.RING,
    }


def test_a_reduce_scatter_and_an_all_gather_of_shards_make_an_all_reduce():
    for algorithm in (A.RING, A.HALVING_DOUBLING):
        scatter = formulas.time_us(K.REDUCE_SCATTER, 8, 8000, 10.0, 1.0, algorithm=algorithm)
        gather = formulas.time_us(K.ALL_GATHER, 8, 1000, 10.0, 1.0, algorithm=algorithm)
        whole = formulas.time_us(K.ALL_REDUCE, 8, 8000, 10.0, 1.0, algorithm=algorithm)
        assert scatter + gather == pytest.approx(whole)


def test_a_tree_takes_two_rounds_for_each_doubling():
    rounds = [formulas.steps(K.ALL_REDUCE, ranks, A.TREE) for ranks in (2, 3, 4, 5, 2**29)]
    assert rounds == [2, 4, 4, 6, 58]


def test_gloo_sends_straight_to_each_rank_unless_ranks_share_a_link():
    flat, full = (Cluster.parse(shape, intra=Link(1, 100), inter=Link(10, 1)) for shape in ("8x1", "4x2"))
    ways = {
        (cluster.shape, kind): formulas.chosen_algorithm(kind, 1e3, cluster.topology_at(Level.WORLD), Library.GLOO)
        for cluster in (flat, full)
        for kind in (K.ALL_REDUCE, K.ALL_GATHER, K.REDUCE_SCATTER, K.ALL_TO_ALL)
    }
    assert ways == {
        ("8x1", K.ALL_REDUCE): A.RING,
        ("8x1", K.ALL_GATHER): A.DIRECT,
        ("8x1", K.REDUCE_SCATTER): A.DIRECT,
        ("8x1", K.ALL_TO_ALL): A.DIRECT,
        ("4x2", K.ALL_REDUCE): A.RING,
        ("4x2", K.ALL_GATHER): A.RING,
        ("4x2", K.REDUCE_SCATTER): A.DIRECT,
        ("4x2", K.ALL_TO_ALL): A.DIRECT,
    }
    for level in (Level.INTRA, Level.INTER):  # each rank has a link, or all groups share one alike
        assert formulas.chosen_algorithm(K.ALL_GATHER, 1e3, full.topology_at(level), Library.GLOO) is A.DIRECT


# What crosses a host's uplink, counted message by message


def sent_by_a_host(cluster: Cluster, messages: Sequence[tuple[int, int, float]]) -> float:
    """Return the bytes that leave the busiest host, or come in to it: (from, to, bytes)."""
    hosts = cluster.placement
    out, into = Counter[int](), Counter[int]()
    for source, target, size in messages:
        if hosts[source] != hosts[target]:
            out[hosts[source]] += size
            into[hosts[target]] += size
    return max(*out.values(), *into.values())


def by_pairs(ranks: int, part: float) -> list[tuple[int, int, float]]:
    return [(a, b, part) for a in range(ranks) for b in range(ranks) if a != b]


@pytest.mark.parametrize("shape", ["8x8", "2x8", "8x1", "3+2"])
def test_a_flat_exchange_puts_every_ranks_messages_on_its_hosts_uplink(shape: str):
    """Two shots flat send k times the bytes over the uplink of a host of k ranks."""
    cluster, n = Cluster.parse(shape, intra=Link(0, 1e9), inter=Link(0, 1)), 1e6
    group, p = cluster.topology_at(Level.WORLD), cluster.world_size
    exchange = sent_by_a_host(cluster, by_pairs(p, n / p))
    for kind, size in ((K.ALL_TO_ALL, n), (K.REDUCE_SCATTER, n), (K.ALL_GATHER, n / p)):
        us = formulas.collective_us(kind, size, group, A.DIRECT)
        assert us == pytest.approx(exchange / 1e3)
    if shape == "8x8":
        assert exchange == pytest.approx(8 * 7 / 8 * n)


@pytest.mark.parametrize("shape", ["8x8", "8x1", "3+2", "2+3"])
def test_a_rooted_collective_waits_for_the_link_of_its_root(shape: str):
    cluster, n = Cluster.parse(shape, intra=Link(0, 1e9), inter=Link(0, 1)), 1e6
    group, p = cluster.topology_at(Level.WORLD), cluster.world_size
    gathered = sent_by_a_host(cluster, [(rank, 0, n) for rank in range(1, p)])
    for kind in (K.GATHER, K.REDUCE, K.BROADCAST):
        assert formulas.collective_us(kind, n, group, A.DIRECT) == pytest.approx(gathered / 1e3)


@pytest.mark.parametrize(("shape", "times"), [("2x1", 1), ("2x4", 1), ("4x1", 2), ("4x4", 2), ("2x4x1", 2)])
def test_a_tree_sends_once_each_way_between_two_hosts_and_twice_between_more(shape: str, times: int):
    """Each of two hosts has one edge of the tree; one of more passes on what comes up, and what comes down."""
    cluster, n = Cluster.parse(shape, intra=Link(0, 1e9), inter=Link(0, 1)), 1e6
    us = formulas.collective_us(K.ALL_REDUCE, n, cluster.topology_at(Level.WORLD), A.TREE)
    assert us == pytest.approx(times * n / 0.9 / 1e3)


def test_a_tree_on_a_shared_medium_sends_both_ways_through_it():
    us = [
        formulas.collective_us(K.ALL_REDUCE, 1e6, cluster.topology_at(Level.WORLD), A.TREE)
        for cluster in (
            Cluster(2, 1, Link(0, 1e9), Link(0, 1, is_shared=True)),
            Cluster(1, 2, Link(0, 1), Link(0, 1)),
        )
    ]
    assert us == pytest.approx([2e3 / 0.9, 1e3 / 0.9])


def test_ranks_of_a_host_share_its_link_between_hosts_but_a_flat_ring_does_not():
    cluster = Cluster(2, 4, intra=Link(1, 100), inter=Link(10, 8))
    ring = formulas.pattern_of(K.ALL_REDUCE)
    levels = (Level.INTRA, Level.INTER, Level.WORLD)
    assert [cluster.topology_at(level).gb_per_s(ring) for level in levels] == [100.0, 2.0, 8.0]


def test_groups_are_priced_by_the_links_that_they_cross():
    cluster = Cluster.parse("4x4", intra=Link(1, 100), inter=Link(10, 1, message_us=2))
    across, inside = cluster.topology_of((0, 4, 8, 12)), cluster.topology_of((0, 1, 2, 3))
    assert formulas.collective_us(K.ALL_REDUCE, 8e6, across) == pytest.approx(6 * (10 + 2) + 1.5 * 8e6 / 1e3)
    assert formulas.collective_us(K.ALL_REDUCE, 8e6, inside) == pytest.approx(6 * 1 + 1.5 * 8e6 / 100e3)
    assert CostTable().collective(K.ALL_REDUCE, Level.INTRA, 8e6, cluster).us == pytest.approx(6 + 120)
    # Between hosts, four such groups share each host's link.
    assert CostTable().collective(K.ALL_REDUCE, Level.INTER, 8e6, cluster).us == pytest.approx(72 + 4 * 12e3)


def test_an_all_reduce_is_a_tree_where_latencies_count_and_a_ring_where_bytes_do():
    reach = Cluster.parse("128x8", intra=Link(1, 100), inter=Link(10, 1)).topology_at(Level.WORLD)
    names = [formulas.chosen_algorithm(K.ALL_REDUCE, size, reach) for size in (1e3, 1e7, 1e9)]
    assert names == [A.TREE, A.TREE, A.RING]
    for size in (1e3, 1e9):
        prices = [formulas.collective_us(K.ALL_REDUCE, size, reach, algorithm) for algorithm in (A.RING, A.TREE)]
        assert formulas.collective_us(K.ALL_REDUCE, size, reach) == min(prices)
        assert formulas.format_collective_us(K.ALL_REDUCE, size, reach).endswith(f" = {min(prices) / 1e3:.4g} ms")
    assert formulas.chosen_algorithm(K.ALL_GATHER, 1, reach) is A.RING


# Break-even


def saved_us(c: Compression, ranks: int, size: float, alpha_us: float, gb_per_s: float) -> float:
    dense = formulas.time_us(K.ALL_REDUCE, ranks, size, alpha_us, gb_per_s, algorithm=c.all_reduce)
    compressed = formulas.time_us(c.kind, ranks, size / c.rate, alpha_us, gb_per_s, algorithm=c.algorithm)
    return dense - compressed - c.us_per_byte * size


def _kind_of(found: tuple[float, float] | None) -> str:
    if found is None:
        return "none"
    return "all" if found == (0.0, math.inf) else "below" if found[0] == 0.0 else "above"


def test_where_compressing_pays_agrees_with_a_scan():
    chance = random.Random(3)
    met = {"none": 0, "all": 0, "below": 0, "above": 0}
    for _ in range(200):
        kind = chance.choice([K.ALL_GATHER, K.ALL_REDUCE])
        c = Compression(
            chance.choice([2.0, 4.0, 32.0, 100.0]),
            10 ** chance.uniform(-5, -2),
            kind,
            chance.choice([A.RING, A.TREE]),
            chance.choice([A.RING, A.TREE if kind is K.ALL_REDUCE else A.DIRECT]),
        )
        ranks, alpha, size = chance.choice([2, 3, 8, 40]), 10 ** chance.uniform(0, 2), 10 ** chance.uniform(3, 9)
        found = pays_at_gb_per_s(c, ranks, size, alpha)
        for k in range(121):
            x = 1e-6 * 1e12 ** (k / 120)
            assert (found is not None and found[0] < x < found[1]) == (saved_us(c, ranks, size, alpha, x) > 0)
        met[_kind_of(found)] += 1
    assert all(met.values()), met


def test_int8_pays_below_a_bandwidth_worked_out_by_hand():
    # p = 2: dense sends n, int8 n/4 and saves α; 1 ms for 10 MB: 7.5 MB / B = 1000 - 25 us
    c = Compression(rate=4.0, us_per_byte=1e-4)
    low, high = pays_at_gb_per_s(c, 2, 10e6, 25.0) or (0.0, 0.0)
    assert low == 0.0
    assert high == pytest.approx(7.5e6 / 975 / 1e3)


# Text


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [
        (K.ALL_REDUCE, 1e9, "all_reduce ring: 2(p-1)α + 2(p-1)/p·n/B ="),
        (K.ALL_REDUCE, 1e3, "all_reduce tree: 2⌈log₂ p⌉α + 20/9·n/B ="),
        (K.ALL_GATHER, 1e3, "all_gather ring: (p-1)α + (p-1)n/B ="),
        (K.BROADCAST, 1e3, "broadcast ring: (p-1)α + n/B ="),
        (K.GATHER, 1e3, "gather direct: α + (p-1)n/B ="),
    ],
)
def test_formulas_print_as_they_are_written_by_hand(kind: K, size: float, says: str):
    group = Cluster.parse("8x1", intra=Link(1, 100), inter=Link(10, 1)).topology_at(Level.WORLD)
    assert formulas.format_collective_us(kind, size, group).startswith(says)


def test_a_price_prints_with_its_numbers():
    text = formulas.format_price(K.ALL_REDUCE, 4, 8e6, 25.0, 1.25)
    assert text == "all_reduce ring: 2(p-1)α + 2(p-1)/p·n/B = 6·25 us + 1.5·8 MB/10gbit = 9.75 ms"
    text = formulas.format_price(K.GATHER, 4, 8e6, 25.0, 1.25, 2.0)
    assert text == "gather direct: α + (p-1)o + (p-1)n/B = 1·25 us + 3·2 us + 3·8 MB/10gbit = 19.23 ms"
    assert formulas.format_price(K.GATHER, 1, 8e6, 25.0, 1.25) == "gather: one rank, nothing to do"


@pytest.mark.parametrize("level", [Level.INTRA, Level.INTER, Level.WORLD])
def test_what_is_printed_is_what_is_computed(level: Level):
    cluster, costs = Cluster.parse("2x4", intra=Link(1, 100), inter=Link(10, 1, message_us=2)), CostTable()
    us = costs.collective(K.ALL_REDUCE, level, 8e6, cluster).us
    assert collective_formula(costs, K.ALL_REDUCE, level, 8e6, cluster).endswith(f" = {us / 1e3:.4g} ms")
