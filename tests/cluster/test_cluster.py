"""Clusters and links: text and JSON there and back, who meets whom, what groups get of the links, and the errors."""

import json
from dataclasses import replace

import pytest

from fxcomp.cluster.cluster import Cluster, Level, Tier
from fxcomp.cluster.link import MOST_RANKS, Link, format_gbit, parse_gb_per_s
from fxcomp.cluster.topology import TrafficPattern
from fxcomp.cost.collectives import collective_us
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind

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


@pytest.mark.parametrize("text", ["", "fast", "25", "0gbit", "-1gbit", "1.2.3gbit", "25parsecs"])
def test_a_bandwidth_that_is_none_is_refused(text: str):
    with pytest.raises(BadOption, match=r"cannot read the bandwidth .*: write it like 300mbit, 25gbit or 12GB/s"):
        Link.parse(text)


def test_a_latency_that_is_none_is_refused():
    with pytest.raises(BadOption, match="cannot read the latency in '25gbit@soon': write it like 25gbit@8us"):
        Link.parse("25gbit@soon")
    with pytest.raises(BadOption, match=r"cannot read the latency in '25gbit@1\.2\.3us'"):
        Link.parse("25gbit@1.2.3us")


def test_links_that_cannot_be_are_refused():
    with pytest.raises(BadOption, match=r"alpha_us must be 0 to 1e\+18, not -1"):
        Link(-1, 1)
    with pytest.raises(BadOption, match=r"gb_per_s must be 1e-18 to 1e\+18, not 0"):
        Link(1, 0)
    with pytest.raises(BadOption, match=r"in_gb_per_s must be 1e-18 to 1e\+18, not -1"):
        Link(1, 1, in_gb_per_s=-1)
    with pytest.raises(BadOption, match=r"message_us must be 0 to 1e\+18, not nan"):
        Link(1, 1, message_us=float("nan"))
    with pytest.raises(BadOption, match="count must be 1 to 1,048,576, not 0"):
        Link(1, 1, count=0)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("4x25gbit", Link(25.0, 3.125, count=4)),
        ("100mbit:20mbit@1ms", Link(1000.0, 0.0125, in_gb_per_s=0.0025)),
        ("25gbit@8us+2us", Link(8.0, 3.125, message_us=2.0)),
        ("8gbit@5us half-duplex shared", Link(5.0, 1.0, is_half_duplex=True, is_shared=True)),
        ("12GB/s shared", Link(25.0, 12.0, is_shared=True)),
    ],
)
def test_a_link_says_more_if_there_is_more_to_say(text: str, link: Link):
    assert Link.parse(text) == link
    assert Link.parse(str(link)) == link


def test_hosts_are_filled_one_after_the_other():
    cluster = Cluster.parse("2x3", intra=INTRA, inter=INTER)
    assert cluster.placement == (0, 0, 0, 1, 1, 1)
    assert cluster.world_size == 6
    assert [cluster.ranks_at(level) for level in Level] == [3, 2, 6, 2, 1]  # all hosts are in one rack


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


MANY = [
    Cluster(2, 2, INTRA, INTER, (0, 1, 1, 0)),
    Cluster.parse("3+2", intra=INTRA, inter=INTER),
    Cluster.parse("2x4+2x3+1", intra=INTRA, inter=Link(10.0, 1.0, in_gb_per_s=0.5, count=2, message_us=2.0)),
    Cluster.parse("2x4x8", intra=Link(5.0, 12.0, is_shared=True), inter=Link(10.0, 1.0, is_half_duplex=True)),
    Cluster.parse("8x4", intra=INTRA, inter=INTER).with_racks(4, oversubscription=4),
    Cluster.parse("1x1", intra=INTRA, inter=INTER),
]


@pytest.mark.parametrize("cluster", MANY, ids=lambda cluster: cluster.shape)
def test_a_cluster_goes_to_text_and_json_and_back(cluster: Cluster):
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    assert Cluster.parse(str(cluster)) == cluster


def test_a_cluster_reads_as_a_sentence():
    assert str(Cluster(2, 2, INTRA, INTER)) == "2x2, inter 8gbit@10us, intra 800gbit@1us"
    assert str(MANY[0]) == "2x2, inter 8gbit@10us, intra 800gbit@1us, placed 0 1 1 0"
    assert str(MANY[2]) == "2x4+2x3+1, inter 2x8gbit:4gbit@10us+2us, intra 800gbit@1us"
    assert str(MANY[4]) == "2x4x4, rack 8gbit@10us, inter 8gbit@10us, intra 800gbit@1us"


def test_uneven_hosts_have_groups_of_their_own_sizes():
    cluster = Cluster.parse("3+1", intra=INTRA, inter=INTER)
    assert (cluster.hosts, cluster.ranks_per_host, cluster.world_size, cluster.shape) == (2, 3, 4, "3+1")
    assert (cluster.is_even, cluster.has_levels) == (False, False)
    assert cluster.groups(Level.INTRA) == ((0, 1, 2), (3,))
    assert cluster.groups(Level.INTER) == ((0, 3), (1,), (2,))
    assert [cluster.local_rank(rank) for rank in range(4)] == [0, 1, 2, 0]
    assert [cluster.ranks_at(level) for level in Level] == [3, 2, 4, 2, 1]


def test_thousands_of_ranks_are_grouped_without_looking_at_each_pair():
    cluster = Cluster.parse("2048x8", intra=INTRA, inter=INTER)
    assert sum(cluster.local_rank(rank) for rank in range(cluster.world_size)) == 2048 * 28
    assert len({cluster.group(Level.INTER, rank) for rank in range(cluster.world_size)}) == 8


# What a group gets of the links


def ring(cluster: Cluster, ranks: tuple[int, ...], *beside: tuple[int, ...]) -> float:
    return cluster.topology_of(ranks, beside).gb_per_s(TrafficPattern.CHAIN)


def test_four_ranks_on_four_hosts_and_four_in_a_host_reach_each_other_by_other_links():
    cluster = Cluster.parse("4x4", intra=INTRA, inter=INTER)
    across, inside = cluster.topology_of((0, 4, 8, 12)), cluster.topology_of((0, 1, 2, 3))
    assert (str(across), across.alpha_us, across.gb_per_s(TrafficPattern.CHAIN)) == ("4x1", 10.0, 1.0)
    assert (str(inside), inside.alpha_us, inside.gb_per_s(TrafficPattern.CHAIN)) == ("1x4", 1.0, 100.0)


def test_groups_are_named_after_how_they_sit():
    cluster = Cluster.parse("4x4", intra=INTRA, inter=INTER)
    names = {(0, 1, 4): "2+1", (0, 1, 4, 5): "2x2", (5,): "1x1", (0, 4, 1, 5): "2x2~2", (0, 1, 2, 4, 8): "3+2x1"}
    assert {ranks: str(cluster.topology_of(ranks)) for ranks in names} == names
    assert str(cluster.topology_of((0, 4), [(1, 5), (8, 12)])) == "2x1*2"
    assert [str(cluster.topology_at(level)) for level in Level] == ["1x4", "4x1*4", "4x4", "4x1*4", "1x1"]
    racks = cluster.with_racks(2)
    names = {(0, 4): "2x1", (0, 8): "2x1x1", (0, 1, 4, 5, 8): "(2x2)+(1x1)", (0, 1): "1x2"}
    assert {ranks: str(racks.topology_of(ranks)) for ranks in names} == names


def test_ranks_of_a_host_share_its_uplink():
    cluster = Cluster.parse("2x4", intra=INTRA, inter=INTER)
    assert cluster.topology_at(Level.INTER).siblings == 4
    assert cluster.topology_at(Level.INTER).gb_per_s(TrafficPattern.CHAIN) == 0.25
    assert cluster.topology_at(Level.WORLD).gb_per_s(TrafficPattern.CHAIN) == 1.0
    assert ring(cluster, (0, 4)) == 1.0
    assert ring(cluster, (0, 4), (1, 5)) == 0.5
    assert cluster.topology_of(tuple(range(8))).gb_per_s(TrafficPattern.PAIRS) == pytest.approx(
        7 / 16
    )  # 4 ranks send to 4 of 7 others
    assert cluster.topology_of(tuple(range(8))).gb_per_s(TrafficPattern.DOUBLING) == 0.25
    assert cluster.topology_of(tuple(range(8))).gb_per_s(TrafficPattern.ROOT) == pytest.approx(
        7 / 4
    )  # 4 of the 7 come from outside


def test_a_ring_that_changes_hosts_at_each_rank_shares_every_uplink():
    cluster = Cluster(2, 2, INTRA, INTER, (0, 1, 0, 1))
    assert str(cluster.topology_at(Level.WORLD)) == "2x2~2"
    assert cluster.topology_at(Level.WORLD).gb_per_s(TrafficPattern.CHAIN) == 0.5


def test_more_ranks_of_a_host_drive_more_of_its_uplinks():
    cluster = Cluster.parse("2x4", intra=INTRA, inter=Link(10.0, 1.0, count=2))
    assert ring(cluster, (0, 4)) == 1.0
    assert ring(cluster, (0, 1, 4, 5)) == 2.0
    assert cluster.topology_at(Level.INTER).gb_per_s(TrafficPattern.CHAIN) == 0.5


def test_a_shared_bus_is_one_for_all_ranks_of_its_host():
    bus = Cluster.parse("2x4", intra=Link(1.0, 12.0, is_shared=True), inter=Link(10.0, 100.0))
    assert ring(bus, (0, 1)) == 6.0
    assert ring(bus, (0, 1, 2, 3)) == 3.0
    assert ring(bus, (0, 1), (2, 3)) == 3.0
    assert ring(bus, (0, 1), (4, 5)) == 6.0  # another host's bus
    air = Cluster.parse("4x1", intra=INTRA, inter=Link(10.0, 1.0, is_shared=True))
    assert ring(air, (0, 1, 2, 3)) == 0.25
    assert air.topology_of((0, 1, 2, 3)).gb_per_s(TrafficPattern.ROOT) == 1.0  # what the root receives passes once


def test_half_duplex_and_uneven_directions_slow_what_goes_both_ways():
    half = Cluster.parse("2x1", intra=INTRA, inter=Link(10.0, 1.0, is_half_duplex=True))
    assert ring(half, (0, 1)) == 0.5
    assert (
        half.topology_of((0, 1)).gb_per_s(TrafficPattern.ROOT)
        == half.topology_of((0, 1)).gb_per_s(TrafficPattern.ONE)
        == 1.0
    )
    line = Cluster.parse("2x1", intra=INTRA, inter=Link(10.0, 1.0, in_gb_per_s=0.2))
    assert ring(line, (0, 1)) == 0.2


def test_an_oversubscribed_rack_is_slow_only_between_racks():
    cluster = Cluster.parse("8x4", intra=INTRA, inter=INTER).with_racks(4, oversubscription=4)
    assert cluster.above[0].link.gb_per_s == 1.0
    assert ring(cluster, (0, 4), (8, 12)) == 1.0
    assert ring(cluster, (0, 16), (4, 20)) == 0.5
    assert (
        cluster.topology_at(Level.INTER).gb_per_s(TrafficPattern.CHAIN) == 0.25
    )  # 4 rings of 8 hosts cross each uplink once
    assert cluster.topology_of(tuple(range(32))).gb_per_s(TrafficPattern.PAIRS) == pytest.approx(
        31 / 256
    )  # 16 to 16 of 31
    full = cluster.with_racks(4)
    assert full.topology_of(tuple(range(32))).gb_per_s(TrafficPattern.PAIRS) == pytest.approx(
        31 / 112
    )  # 4 to 28 of 31: the hosts' own


def test_racks_may_lie_in_racks():
    cluster = replace(
        Cluster.parse("4x1", intra=INTRA, inter=INTER),
        above=(Tier("rack", Link(20.0, 0.5), (0, 0, 1, 2)), Tier("room", Link(50.0, 0.1), (0, 0, 1))),
    )
    assert [cluster.topology_of(group).alpha_us for group in ((0, 1), (0, 2), (0, 3))] == [10.0, 20.0, 50.0]
    assert [ring(cluster, group) for group in ((0, 1), (0, 2), (0, 3))] == [1.0, 0.5, 0.1]
    assert cluster.shape == "(1x1x1)+((2x1)+(1x1))"
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_another_bandwidth_between_hosts_keeps_what_lies_above_in_proportion():
    cluster = Cluster.parse("8x4", intra=INTRA, inter=INTER).with_racks(4, oversubscription=2).with_inter(3.0)
    assert cluster.inter == Link(10.0, 3.0)
    assert cluster.above[0].link.gb_per_s == pytest.approx(6.0)


# What cannot be


def test_clusters_that_cannot_be_are_refused():
    with pytest.raises(BadOption, match="cannot read the cluster '8': write hosts x ranks per host, like 8x4"):
        Cluster.parse("8", intra=INTRA, inter=INTER)
    with pytest.raises(BadOption, match="needs at least 1 host and 1 rank a host, not 0x4"):
        Cluster.parse("0x4", intra=INTRA, inter=INTER)
    with pytest.raises(BadOption, match=r"does not put 2 ranks on each of 2 hosts"):
        Cluster(2, 2, INTRA, INTER, (0, 0, 0, 1))
    with pytest.raises(BadOption, match=r"does not put 2 ranks on each of 3 hosts"):
        Cluster(3, 2, INTRA, INTER, (0, 0, 2, 2))
    with pytest.raises(BadOption, match="needs at least 1 rank"):
        Cluster.placed((), intra=INTRA, inter=INTER)
    with pytest.raises(BadOption, match="cannot read the cluster '3\\+x'"):
        Cluster.parse("3+x", intra=INTRA, inter=INTER)
    with pytest.raises(BadOption, match=r"the racks .* must give the rack of each of the 2 units below"):
        Cluster(2, 2, INTRA, INTER, above=(Tier("rack", INTER, (0, 2)),))
    with pytest.raises(BadOption, match="a rack needs at least 1 host, not 0"):
        Cluster(2, 2, INTRA, INTER).with_racks(0)
    with pytest.raises(BadOption, match="an oversubscription is above 0, like 4 for 4:1, not 0"):
        Cluster(2, 2, INTRA, INTER).with_racks(1, oversubscription=0)
    with pytest.raises(BadOption, match=r"cannot read 'between 25gbit' in the cluster .*: after the hosts write inter"):
        Cluster.parse("2x2, between 25gbit", intra=INTRA, inter=INTER)
    with pytest.raises(BadOption, match="has no inter link: add like: , inter 25gbit"):
        Cluster.parse("2x2, intra 25gbit")
    with pytest.raises(BadOption, match="places its ranks as 3\\+1"):
        Cluster.parse("2x2, placed 0 0 0 1", intra=INTRA, inter=INTER)
    with pytest.raises(BadOption, match="has a rack link and one rack: write it like 2x8x4, racks first"):
        Cluster.parse("2x2, rack 10gbit", intra=INTRA, inter=INTER)
    with pytest.raises(BadOption, match="this is not a cluster: KeyError: 'hosts'"):
        Cluster.from_json({})


def test_the_largest_cluster_is_described_and_a_larger_one_refused_before_lists_of_it_are_made():
    assert Cluster.parse(f"{MOST_RANKS // 8}x8", intra=INTRA, inter=INTER).world_size == MOST_RANKS
    for make in (
        lambda: Cluster(MOST_RANKS + 1, 1, INTRA, INTER),
        lambda: Cluster(10**12, 10**12, INTRA, INTER),
        lambda: Cluster.parse("1000000000x1000000000x1000000000", intra=INTRA, inter=INTER),
        lambda: Cluster.parse("4+1000000000000x4", intra=INTRA, inter=INTER),
    ):
        with pytest.raises(BadOption, match="a cluster may have 1,048,576 ranks; this one would have "):
            make()


def test_an_error_about_many_ranks_stays_short():
    with pytest.raises(BadOption, match=r"the placement .* does not put 1000 ranks on each of 2 hosts") as told:
        Cluster(2, 1000, INTRA, INTER, tuple(range(1000)))
    assert len(str(told.value)) < 300


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 4), (-1, 0)])
def test_a_group_of_ranks_that_are_not_there_is_refused(ranks: tuple[int, ...]):
    with pytest.raises(BadOption, match=r"a group has ranks of 0 to 3, each once, in a cluster of 4; it is"):
        Cluster(2, 2, INTRA, INTER).topology_of(ranks)


def test_another_bandwidth_between_hosts_keeps_nothing_that_depends_on_it():
    for text in ("2x4", "4+4+2", "2x3x4"):
        cluster = Cluster.parse(text, intra=Link(2.0, 12.0), inter=Link(10.0, 3.0))
        for level in Level:
            cluster.topology_at(level)
        cluster.topology_of((0, cluster.world_size - 1))
        changed = cluster.with_inter(0.5)
        fresh = replace(changed)
        assert changed == fresh
        assert [changed.topology_at(level) for level in Level] == [fresh.topology_at(level) for level in Level]
        ends = (0, cluster.world_size - 1)
        assert changed.topology_of(ends) == fresh.topology_of(ends) != cluster.topology_of(ends)


def test_a_racks_uplink_carries_what_all_links_of_its_hosts_send():
    cluster = Cluster(8, 1, INTRA, Link(10.0, 1.0, count=2)).with_racks(4, oversubscription=2)
    assert (cluster.above[0].link.gb_per_s, cluster.above[0].link.count) == (4.0, 1)


def test_a_shared_medium_is_counted_once_even_where_it_takes_turns():
    """The medium's load already counts both directions."""
    ways = [
        Cluster(4, 1, INTRA, Link(10.0, 1.0, is_shared=True, is_half_duplex=turns)).topology_at(Level.WORLD).speeds
        for turns in (False, True)
    ]
    assert ways[0] == ways[1]


def test_a_gather_waits_for_its_roots_link():
    """One way only: as fast where sends and receives take turns, unlike an all_gather."""
    full, half = (
        Cluster(4, 1, INTRA, Link(10.0, 1.0, is_half_duplex=turns)).topology_at(Level.WORLD) for turns in (False, True)
    )
    for kind, is_slower in ((CollectiveKind.GATHER, False), (CollectiveKind.ALL_GATHER, True)):
        assert (collective_us(kind, 1e6, half) > collective_us(kind, 1e6, full)) == is_slower
