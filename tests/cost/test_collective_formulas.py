"""The formulas of collectives against numbers worked out by hand."""

import pytest

from fxcomp.cluster import Cluster, Level, Link
from fxcomp.cost import collectives as formulas
from fxcomp.strategy import CollectiveKind

# α = 10 µs, B = 1 GB/s = 1000 bytes a µs, p = 4, n = 8000 bytes
BY_HAND = {
    CollectiveKind.ALL_REDUCE: 60.0 + 12.0,
    CollectiveKind.ALL_GATHER: 30.0 + 24.0,
    CollectiveKind.REDUCE_SCATTER: 30.0 + 6.0,
    CollectiveKind.BROADCAST: 20.0 + 8.0,
}


@pytest.mark.parametrize("kind", CollectiveKind)
def test_four_ranks_take_what_is_worked_out_by_hand(kind: CollectiveKind):
    assert formulas.time_us(kind, 4, 8000, alpha_us=10.0, gb_per_s=1.0) == pytest.approx(BY_HAND[kind])


@pytest.mark.parametrize("kind", CollectiveKind)
def test_one_rank_takes_no_time_and_sends_nothing(kind: CollectiveKind):
    assert formulas.time_us(kind, 1, 8000, alpha_us=10.0, gb_per_s=1.0) == 0.0
    assert formulas.wire_bytes(kind, 1, 8000) == 0.0


@pytest.mark.parametrize("kind", CollectiveKind)
def test_more_bytes_or_less_bandwidth_are_never_cheaper(kind: CollectiveKind):
    for ranks in (2, 3, 8, 100):
        times = [formulas.time_us(kind, ranks, n, 10.0, 1.0) for n in (0, 1, 1000, 10**9)]
        assert times == sorted(times)
        times = [formulas.time_us(kind, ranks, 10**6, 10.0, b) for b in (100.0, 10.0, 0.1)]
        assert times == sorted(times)


def test_a_reduce_scatter_and_an_all_gather_of_shards_make_an_all_reduce():
    scatter = formulas.time_us(CollectiveKind.REDUCE_SCATTER, 8, 8000, 10.0, 1.0)
    gather = formulas.time_us(CollectiveKind.ALL_GATHER, 8, 1000, 10.0, 1.0)
    assert scatter + gather == pytest.approx(formulas.time_us(CollectiveKind.ALL_REDUCE, 8, 8000, 10.0, 1.0))


def test_a_broadcast_takes_as_many_rounds_as_doublings():
    rounds = [formulas.steps(CollectiveKind.BROADCAST, ranks) for ranks in (2, 3, 4, 5, 2**29)]
    assert rounds == [1, 2, 2, 3, 29]


def test_ranks_of_a_host_share_its_link_between_hosts_but_a_flat_ring_does_not():
    cluster = Cluster(2, 4, intra=Link(1, 100), inter=Link(10, 8))
    ring = formulas.way_of(CollectiveKind.ALL_REDUCE)
    assert [cluster.reach_at(level).gb_per_s(ring) for level in Level] == [100.0, 2.0, 8.0]


def test_a_formula_prints_for_a_report():
    assert formulas.format_formula(CollectiveKind.ALL_GATHER) == "all_gather: α*(p - 1) + n*(p - 1)/B"
    assert "ceil_log2(p)" in formulas.format_formula(CollectiveKind.BROADCAST)
