"""Report which links of a cluster were measured.

    links as measured                                                 all were measured, in the running job
    10gbit between hosts (assumed), 14.51gbit inside (measured)       costs are of one host, the cluster has eight
    10gbit between hosts, 100gbit inside                              nothing was measured

A link counts as measured if a collective over it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import Link, format_gbit
from fxcomp.cost.table import CostTable, collective_source, link_of
from fxcomp.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    """`inter`, `intra`, or a higher tier's name."""
    place: str
    link: Link
    levels: tuple[Level, ...]
    """Levels at which this link is the slowest."""


def links_in_words(cluster: Cluster, costs: CostTable) -> list[str]:
    """Return each link's bandwidth and place, marked as measured or assumed."""
    links, measured = _links(cluster), measured_links(cluster, costs)
    if measured and len(measured) == len(links):
        return ["links as measured"]
    texts = [(each.name, f"{format_gbit(each.link.gb_per_s)} {each.place}") for each in links]
    if not costs.collectives:
        return [text for _, text in texts]
    return [f"{text} ({'measured' if name in measured else 'assumed'})" for name, text in texts]


def measured_links(cluster: Cluster, costs: CostTable) -> list[str]:
    """Return the names of measured links: `inter`, `intra`, `rack`."""
    return [each.name for each in _links(cluster) if _is_measured(each, cluster, costs)]


def links_in_sources(plan: Plan, cluster: Cluster, costs: CostTable) -> list[tuple[str, str]]:
    """Return collectives of the plan that were not measured themselves, with the source of each price."""
    measured = measured_links(cluster, costs)
    by_level = {level: each.name for each in _links(cluster) for level in each.levels}
    rows: list[tuple[str, str]] = []
    for step in dict.fromkeys(step for bucket in plan.buckets for step in bucket.strategy.collectives):
        if costs.measured(step.kind, step.level, cluster) is not None:
            continue
        source = collective_source(costs, step.kind, step.level, cluster)
        if costs.collectives:
            source += ", measured among other ranks" if by_level.get(step.level) in measured else ", assumed"
        rows.append((str(step), source))
    return rows


def _links(cluster: Cluster) -> list[_Named]:
    flat = () if cluster.has_levels else (Level.WORLD,)
    found: list[_Named] = []
    if cluster.hosts > 1:
        found.append(_Named("inter", "between hosts", cluster.inter, (Level.INTER, Level.RACK, Level.WORLD)))
    found += [_Named(tier.name, f"between {tier.name}s", tier.link, (Level.RACKS, *flat)) for tier in cluster.above]
    if cluster.ranks_per_host > 1:
        found.append(_Named("intra", "inside", cluster.intra, (Level.INTRA, *flat)))
    return found


def _is_measured(link: _Named, cluster: Cluster, costs: CostTable) -> bool:
    texts = {cluster.topology_at(level).text for level in link.levels if cluster.ranks_at(level) > 1}
    if any(text in texts for _, text in costs.collectives):
        return True
    elsewhere = {"inter": True, "intra": False}
    if link.name not in elsewhere:
        return False
    return link_of(costs, between_hosts=elsewhere[link.name]) == link.link
