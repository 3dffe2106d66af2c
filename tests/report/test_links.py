"""Each link is said to be measured or assumed, by what the table of costs holds."""

from dataclasses import replace

import pytest

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.measured import MeasuredCollective
from fxcomp.cost.table import CostTable, link_of
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.report.links import links_in_sources, links_in_words, measured_links

ALL_REDUCE = CollectiveKind.ALL_REDUCE


def measured_on(*topologies: str) -> CostTable:
    return CostTable(
        collectives={(ALL_REDUCE, text): MeasuredCollective.line(ALL_REDUCE, 2, 30.0, 1.0) for text in topologies}
    )


def cluster(costs: CostTable, hosts: int, ranks_per_host: int) -> Cluster:
    """The cluster that `fxcomp explain --costs` makes: measured links, and defaults for the others."""
    intra = link_of(costs, between_hosts=False) or Link(5.0, 12.5)
    inter = link_of(costs, between_hosts=True) or Link(25.0, 1.25)
    return Cluster(hosts, ranks_per_host, intra=intra, inter=inter)


@pytest.mark.parametrize(
    ("topologies", "shape", "words", "measured"),
    [
        ((), (8, 4), ["10gbit between hosts", "100gbit inside"], []),
        (("1x2",), (8, 4), ["10gbit between hosts (assumed)", "8gbit inside (measured)"], ["intra"]),
        (("2x1",), (8, 4), ["8gbit between hosts (measured)", "100gbit inside (assumed)"], ["inter"]),
        (("1x2", "2x1"), (8, 4), ["links as measured"], ["inter", "intra"]),
        (("1x4", "8x1*4", "8x4"), (8, 4), ["links as measured"], ["inter", "intra"]),
        (("2x1",), (2, 1), ["links as measured"], ["inter"]),
        (("1x2",), (2, 1), ["10gbit between hosts (assumed)"], []),
        (("1x2",), (1, 1), [], []),
    ],
)
def test_a_link_is_measured_where_a_collective_over_it_was(
    topologies: tuple[str, ...], shape: tuple[int, int], words: list[str], measured: list[str]
):
    costs = measured_on(*topologies)
    where = cluster(costs, *shape)
    assert links_in_words(where, costs) == words
    assert measured_links(where, costs) == measured


def test_the_uplinks_of_racks_are_assumed_beside_measured_links():
    costs = measured_on("1x4", "8x1*4")
    where = cluster(costs, 8, 4).with_racks(4)
    costs = replace(costs, collectives={(ALL_REDUCE, "1x4"): costs.collectives[ALL_REDUCE, "1x4"]})
    assert [text.partition(" (")[2] for text in links_in_words(where, costs)] == ["assumed)", "assumed)", "measured)"]


def test_what_is_priced_by_a_link_is_named_with_its_source():
    costs = measured_on("1x2")
    where = cluster(costs, 8, 4)
    plan = Plan((Bucket(("w",), (8000,), Strategy.hierarchical(None)),))
    rows = dict(links_in_sources(plan, where, costs))
    assert rows["all_reduce@inter"] == "the cluster's link, 10gbit@25us, assumed"
    assert rows["all_gather@intra"] == "the cluster's link, 8gbit@30us, measured among other ranks"
    told = dict(links_in_sources(plan, where, CostTable()))
    assert told["all_reduce@inter"] == "the cluster's link, 10gbit@25us"
