"""Clusters and links: text and JSON there and back, who meets whom, and the errors."""

import pytest

from fxcomp.cluster import Cluster, Level, Link, format_gbit, parse_gb_per_s
from fxcomp.errors import BadCluster

INTRA, INTER = Link(1.0, 100.0), Link(10.0, 1.0)


def test_bandwidths_are_read_in_the_units_in_which_they_are_sold():
    assert parse_gb_per_s("25gbit") == pytest.approx(3.125)
    assert parse_gb_per_s("300 Mbit") == pytest.approx(0.0375)
    assert parse_gb_per_s("12GB/s") == 12.0
    assert parse_gb_per_s("500mb/s") == pytest.approx(0.5)
    assert [format_gbit(parse_gb_per_s(text)) for text in ("25gbit", "300mbit")] == ["25gbit", "300mbit"]


def test_a_link_parses_back_from_its_text():
    link = Link.parse("25gbit@8us")
    assert (link.alpha_us, link.gb_per_s) == (8.0, 3.125)
    assert Link.parse(str(link)) == link
    assert Link.parse("1gbit").alpha_us == 25.0
    assert Link.parse("1gbit@2ms").alpha_us == 2000.0
    assert link.bytes_per_us == 3125.0


@pytest.mark.parametrize("text", ["", "fast", "25", "0gbit", "-1gbit", "1.2.3gbit", "25parsecs"])
def test_a_bandwidth_that_is_none_is_refused(text: str):
    with pytest.raises(BadCluster, match=r"cannot read the bandwidth .*: write it like 300mbit, 25gbit or 12GB/s"):
        Link.parse(text)


def test_a_latency_that_is_none_is_refused():
    with pytest.raises(BadCluster, match="cannot read the latency in '25gbit@soon': write it like 25gbit@8us"):
        Link.parse("25gbit@soon")


def test_links_that_cannot_be_are_refused():
    with pytest.raises(BadCluster, match="alpha_us must be 0 or more, not -1"):
        Link(-1, 1)
    with pytest.raises(BadCluster, match="gb_per_s must be above 0, not 0"):
        Link(1, 0)


def test_hosts_are_filled_one_after_the_other():
    cluster = Cluster.parse("2x3", intra=INTRA, inter=INTER)
    assert cluster.placement == (0, 0, 0, 1, 1, 1)
    assert cluster.world_size == 6
    assert [cluster.ranks_at(level) for level in Level] == [3, 2, 6]


@pytest.mark.parametrize("placement", [(), (0, 1, 0, 1), (1, 1, 0, 0), (0, 1, 1, 0)])
def test_the_groups_of_each_level_hold_every_rank_once(placement: tuple[int, ...]):
    cluster = Cluster(2, 2, INTRA, INTER, placement)
    for level in Level:
        groups = {cluster.group(level, rank) for rank in range(4)}
        assert sorted(rank for group in groups for rank in group) == [0, 1, 2, 3]
        assert all(len(group) == cluster.ranks_at(level) for group in groups)
        assert all(rank in cluster.group(level, rank) for rank in range(4))


def test_a_flat_collective_is_limited_by_the_links_between_hosts():
    assert Cluster(2, 2, INTRA, INTER).link_at(Level.WORLD) == INTER
    assert Cluster(1, 4, INTRA, INTER).link_at(Level.WORLD) == INTRA
    assert Cluster(2, 2, INTRA, INTER).link_at(Level.INTRA) == INTRA


def test_a_cluster_goes_to_json_and_back():
    cluster = Cluster(2, 2, INTRA, INTER, (0, 1, 1, 0))
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert str(cluster) == "2x2, inter 8gbit@10us, intra 800gbit@1us"


def test_clusters_that_cannot_be_are_refused():
    with pytest.raises(BadCluster, match="cannot read the cluster '8': write hosts x ranks per host, like 8x4"):
        Cluster.parse("8", intra=INTRA, inter=INTER)
    with pytest.raises(BadCluster, match="needs at least 1 host and 1 rank a host, not 0x4"):
        Cluster.parse("0x4", intra=INTRA, inter=INTER)
    with pytest.raises(BadCluster, match=r"does not put 2 ranks on each of 2 hosts"):
        Cluster(2, 2, INTRA, INTER, (0, 0, 0, 1))
