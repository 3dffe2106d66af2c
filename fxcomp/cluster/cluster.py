"""Description of the machines: rank placement, links, and processors.

    rank ─ intra ─┐
    rank ─ intra ─┴ host ─ inter ─┐
    rank ─ intra ── host ─ inter ─┴ rack ─ uplink ─ ...

The ranks of a unit (host, rack, ...) share its uplink.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fxcomp.cluster.link import MOST, MOST_RANKS, Link, check_ranks, shortened
from fxcomp.cluster.seating import Level, Seating, Tier, join_units, parse_clauses, parse_shape
from fxcomp.cluster.topology import GroupTopology, Tree
from fxcomp.errors import BadOption


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors of one rank, shared by compute, the compressor pool and the network's software."""

    count: float = math.inf
    """Number of processors, 1 for a GPU; infinite if concurrent work does not slow compute."""
    compute: float = 1.0
    """Number of processors that compute occupies."""

    @property
    def has_spare(self) -> bool:
        """True if a processor is free while compute runs."""
        return self.count >= self.compute + 1


UNSHARED = Processors()


@dataclass(frozen=True, slots=True)
class Cluster(Seating):
    """Hosts of ranks, and the links between them.

    `inter` links the `hosts`, `intra` the ranks of one host. `placement[rank]` is the host of a rank; by default ranks
    fill hosts in order. With a placement, hosts may have fewer than `ranks_per_host` ranks. `above` lists racks and
    higher tiers, from the hosts up.
    """

    hosts: int
    ranks_per_host: int
    intra: Link
    inter: Link
    placement: tuple[int, ...] = ()
    above: tuple[Tier, ...] = ()
    _known: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise BadOption(
                f"a cluster needs at least 1 host and 1 rank a host, not {self.hosts}x{self.ranks_per_host}"
            )
        check_ranks(len(self.placement) or self.hosts * self.ranks_per_host)
        if not self.placement:
            filled = tuple(rank // self.ranks_per_host for rank in range(self.hosts * self.ranks_per_host))
            object.__setattr__(self, "placement", filled)
        counts = Counter(self.placement)
        if sorted(counts) != list(range(self.hosts)) or max(counts.values()) != self.ranks_per_host:
            raise BadOption(
                f"the placement {shortened(self.placement)} does not put {self.ranks_per_host} ranks on each of"
                f" {self.hosts} hosts (the fullest, if they differ)"
            )
        below = self.hosts
        for tier in self.above:
            count = len(set(tier.units))
            if len(tier.units) != below or set(tier.units) != set(range(count)):
                raise BadOption(
                    f"the {tier.name}s {shortened(tier.units)} must give the {tier.name} of each of the {below} units"
                    " below, counted from 0 without gaps"
                )
            below = count

    @classmethod
    def placed(cls, placement: Iterable[int], *, intra: Link, inter: Link, above: tuple[Tier, ...] = ()) -> Cluster:
        """Make a cluster from each rank's host (`placement`), links `intra` and `inter`, and tiers `above` hosts."""
        hosts = tuple(placement)
        if not hosts:
            raise BadOption("a cluster needs at least 1 rank")
        fullest = max(Counter(hosts).values())
        return cls(len(set(hosts)), fullest, intra=intra, inter=inter, placement=hosts, above=above)

    # Links

    def link_at(self, level: Level) -> Link:
        """Return the link of a level; for WORLD, `inter` if there are several hosts."""
        if level is Level.INTRA or (level is Level.WORLD and self.hosts == 1):
            return self.intra
        return self.above[0].link if level is Level.RACKS and self.above else self.inter

    def with_inter(self, gb_per_s: float) -> Cluster:
        """Change the bandwidth between hosts to `gb_per_s`, and scale higher tiers by the same factor."""
        factor = gb_per_s / self.inter.gb_per_s
        above = tuple(replace(tier, link=tier.link.at_gb_per_s(tier.link.gb_per_s * factor)) for tier in self.above)
        changed = replace(self, inter=self.inter.at_gb_per_s(gb_per_s), above=above)
        # Keep cached groups, and topologies inside hosts.
        kept = {key: known for key, known in self._known.items() if not _depends_on_inter(key)}
        changed._known.update(kept)
        return changed

    def with_racks(self, hosts_per_rack: int, *, oversubscription: float = 1.0, link: Link | None = None) -> Cluster:
        """Put the hosts into racks of `hosts_per_rack`, in order.

        `link` is a rack's uplink, by default with the latency of `inter` and the total bandwidth of the rack's hosts
        divided by `oversubscription`.
        """
        if hosts_per_rack < 1:
            raise BadOption(f"a rack needs at least 1 host, not {hosts_per_rack}")
        if hosts_per_rack > MOST_RANKS:
            raise BadOption(f"a rack may have {MOST_RANKS:,} hosts, not {shortened(hosts_per_rack)}")
        if not 1 / MOST <= oversubscription <= MOST:
            raise BadOption(f"an oversubscription is above 0, like 4 for 4:1, not {shortened(oversubscription)}")
        units = tuple(host // hosts_per_rack for host in range(self.hosts))
        share = hosts_per_rack * self.inter.count / oversubscription
        uplink = link or replace(self.inter.at_gb_per_s(self.inter.gb_per_s * share), count=1, is_shared=False)
        return replace(self, above=(Tier("rack", uplink, units),))

    def topology_of(self, ranks: Sequence[int], beside: Iterable[Sequence[int]] = ()) -> GroupTopology:
        """Return the topology of `ranks`, in ring order, while the groups in `beside` communicate too."""
        members = tuple(ranks)
        bad = [rank for rank in members if not 0 <= rank < self.world_size]
        if bad or not members or len(set(members)) != len(members):
            raise BadOption(
                f"a group has ranks of 0 to {self.world_size - 1}, each once, in a cluster of {self.world_size}; it is"
                f" {shortened(members)}"
            )
        groups = (members, *map(tuple, beside))
        key = ("topology", groups)
        if key not in self._known:
            tree = self._tree()
            crossings, together = tree.traffic(groups)
            self._known[key] = tree.group_topology(self._shape(members), len(members), crossings[0], together)
        return self._known[key]

    def topology_at(self, level: Level) -> GroupTopology:
        """Return the topology of a level's slowest group while all its groups communicate."""
        key = ("topology", level)
        if key not in self._known:
            tree, groups = self._tree(), self.groups(level)
            if ("traffic", level) not in self._known:
                self._known["traffic", level] = tree.traffic(groups)
            crossings, together = self._known["traffic", level]
            found = [
                tree.group_topology(self._shape(group), len(group), crossed, together)
                for group, crossed in zip(groups, crossings, strict=True)
            ]
            self._known[key] = max(found, key=lambda topology: topology.slowness)
        return self._known[key]

    def _tree(self) -> Tree:
        if "units" not in self._known:
            units: list[Sequence[int]] = [range(self.world_size), self.placement]
            for tier in self.above:
                units.append(tuple(tier.units[below] for below in units[-1]))
            self._known["units"] = (*units, (0,) * self.world_size)
        return Tree((self.intra, self.inter, *(tier.link for tier in self.above)), self._known["units"])

    # Text

    @classmethod
    def parse(cls, text: str, *, intra: Link | None = None, inter: Link | None = None) -> Cluster:
        """Read `8x4` as 8 hosts of 4 ranks, `4+4+2` or `2x4+2` as different hosts, and `2x8x4` as 2 racks of `8x4`.

        `text` may continue with links, in the format of `str(cluster)`: `8x4, inter 25gbit@8us, intra 100gbit`. The
        arguments `intra` and `inter` replace omitted links. `rack 50gbit` sets the racks' uplinks, and `placed 0 1 1 0`
        the host of each rank.
        """
        shape, links, placement = parse_clauses(text)
        intra, inter = links.get("intra", intra), links.get("inter", inter)
        if intra is None or inter is None:
            missing = "inter" if inter is None else "intra"
            raise BadOption(f"the cluster {text!r} has no {missing} link: add like: , {missing} 25gbit")
        racks, sizes = parse_shape(shape)
        filled = placement or tuple(host for host, size in enumerate(sizes) for _ in range(size))
        cluster = cls.placed(filled, intra=intra, inter=inter)
        if cluster.shape != join_units(map(str, sizes)):
            raise BadOption(f"the cluster {text!r} places its ranks as {cluster.shape}")
        if racks > 1:
            return cluster.with_racks(len(sizes) // racks, link=links.get("rack"))
        if "rack" in links:
            raise BadOption(f"the cluster {text!r} has a rack link and one rack: write it like 2x8x4, racks first")
        return cluster

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as plain data."""
        return {
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
            "intra": asdict(self.intra),
            "inter": asdict(self.inter),
            "placement": list(self.placement),
            "above": [{"name": t.name, "link": asdict(t.link), "units": list(t.units)} for t in self.above],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cluster:
        """Build a cluster from `data` of `to_json`. Raises BadOption."""
        try:
            return cls(
                hosts=data["hosts"],
                ranks_per_host=data["ranks_per_host"],
                intra=Link(**data["intra"]),
                inter=Link(**data["inter"]),
                placement=tuple(data["placement"]),
                above=tuple(Tier(t["name"], Link(**t["link"]), tuple(t["units"])) for t in data.get("above", ())),
            )
        except BadOption:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadOption(f"this is not a cluster: {type(error).__name__}: {error}") from None

    def __str__(self) -> str:
        """Format for `parse`. A cluster with uneven racks or several tiers above the hosts cannot be parsed back."""
        above = "".join(f", {tier.name} {tier.link}" for tier in self.above)
        is_filled = self.placement == tuple(sorted(self.placement))
        placed = "" if is_filled else f", placed {' '.join(map(str, self.placement))}"
        return f"{self.shape}{above}, inter {self.inter}, intra {self.intra}{placed}"


def _depends_on_inter(key: Any) -> bool:
    return isinstance(key, tuple) and key[:1] == ("topology",) and key != ("topology", Level.INTRA)


def check_is_cluster(given: object) -> None:
    if not isinstance(given, Cluster | None):
        raise BadOption(
            f"cluster= takes a fxcomp.Cluster; it is a {type(given).__name__}.\n"
            "  Leave it out: hosts are then identified by name, and links measured."
        )
