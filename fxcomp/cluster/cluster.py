"""Describe the machines: which rank sits where, what a link costs, and what a group of ranks gets of the links.

    rank ─ intra ─┐
    rank ─ intra ─┴ host ─ inter ─┐
    rank ─ intra ── host ─ inter ─┴ rack ─ uplink ─ ...

A tree: ranks are its leaves, and every unit (host, rack, what lies above) shares its uplink among its ranks.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from fxcomp.cluster.link_presets import LINK_PRESETS
from fxcomp.errors import BadCluster


class Level(Enum):
    """Which ranks take part in a collective."""

    INTRA = "intra"  # the ranks of one host
    INTER = "inter"  # the ranks with the same place in their hosts, one a host
    WORLD = "world"  # all ranks

    __hash__ = object.__hash__  # Enum's own runs in Python, for every price that the search asks for


class Way(Enum):
    """Who sends to whom at the same time, which decides how many messages share a link."""

    CHAIN = "chain"  # each rank to the next: rings, and pipelined trees along the same order
    DOUBLING = "doubling"  # to partners at distances 1, 2, 4, ...
    PAIRS = "pairs"  # everyone to everyone
    ROOT = "root"  # everyone to one rank
    ONE = "one"  # one rank to another

    __hash__ = object.__hash__  # as above


# Links

MOST = 1e18
"""No latency in µs and no bandwidth in GB/s comes near it, nor a bandwidth its inverse (assumed)."""

MOST_RANKS = 1 << 20
"""Of a cluster: several times what has ever run one job, and lists of them still fit into memory (assumed)."""


@dataclass(frozen=True, slots=True)
class Link:
    """What joins ranks: a latency per step in µs, and a bandwidth in GB/s (10⁹ bytes a second).

    Inside a host the link is a rank's own; between hosts it is the host's, which all its ranks share; and so on above.
    """

    alpha_us: float
    gb_per_s: float
    """What goes out; in too, unless `in_gb_per_s` says otherwise."""
    in_gb_per_s: float | None = None
    count: int = 1
    """How many such links a unit has. A rank drives one of them at a time."""
    message_us: float = 0.0
    """What the processor spends on each message, besides the latency."""
    is_half_duplex: bool = False
    """Sends and receives take turns."""
    is_shared: bool = False
    """One medium for all that it joins, like a bus; else each has its own way to a switch that is never in the way."""

    def __post_init__(self) -> None:
        for name, value in (("alpha_us", self.alpha_us), ("message_us", self.message_us)):
            if not 0 <= value <= MOST:
                raise BadCluster(f"a link's {name} must be 0 to {MOST:g}, not {value}")
        for name, value in (("gb_per_s", self.gb_per_s), ("in_gb_per_s", self.in_gb_per_s)):
            if value is not None and not 1 / MOST <= value <= MOST:
                raise BadCluster(f"a link's {name} must be {1 / MOST:g} to {MOST:g}, not {value}")
        if not 1 <= self.count <= MOST_RANKS:
            raise BadCluster(f"a link's count must be 1 to {MOST_RANKS:,}, not {_shortened(self.count)}")

    @property
    def bytes_per_us(self) -> float:
        return self.gb_per_s * 1e3

    @property
    def one_way_gb_per_s(self) -> float:
        """What passes from one to another, when nothing comes back: the slower end decides."""
        return min(self.gb_per_s, self.in_gb_per_s or self.gb_per_s)

    @property
    def both_ways_gb_per_s(self) -> float:
        """What passes each way while as much comes back."""
        if not self.is_half_duplex:
            return self.one_way_gb_per_s
        return 1 / (1 / self.gb_per_s + 1 / (self.in_gb_per_s or self.gb_per_s))

    def at_gb_per_s(self, gb_per_s: float) -> Link:
        """The same link with another bandwidth; what comes in keeps its ratio to what goes out."""
        into = None if self.in_gb_per_s is None else self.in_gb_per_s * gb_per_s / self.gb_per_s
        return replace(self, gb_per_s=gb_per_s, in_gb_per_s=into)

    @classmethod
    def parse(cls, text: str, *, alpha_us: float = 25.0) -> Link:
        """Read `25gbit`, `300mbit` or `12GB/s`, with a latency behind `@` if given: `25gbit@8us`.

        The latency is `alpha_us` otherwise (default 25 µs: TCP over Ethernet, assumed). More can be said: `nvlink4` (a
        name of presets.py), `8x25gbit` (eight of them), `100mbit:20mbit` (out and in), `25gbit@8us+2us` (and 2 µs for
        each message), and behind it `half-duplex` and `shared`.
        """
        rest, flags = text.strip(), {"half-duplex": False, "shared": False}
        while (words := rest.rsplit(None, 1))[-1:] and words[-1].lower() in flags and len(words) == 2:
            flags[words[-1].lower()], rest = True, words[0]
        rates, _, latency = rest.partition("@")
        count = re.match(r"\s*(\d+)\s*x\s*", rates)
        outward, _, inward = rates[count.end() if count else 0 :].partition(":")
        alpha, _, message = latency.partition("+")
        if outward.strip()[:1].isalpha():
            outward, known_alpha = _preset(outward.strip()).split("@")
            alpha_us = _latency_us(known_alpha, text)
        return cls(
            alpha_us=_latency_us(alpha, text) if latency else alpha_us,
            gb_per_s=parse_gb_per_s(outward),
            in_gb_per_s=parse_gb_per_s(inward) if inward else None,
            count=_whole(count[1]) if count else 1,
            message_us=_latency_us(message, text) if message else 0.0,
            is_half_duplex=flags["half-duplex"],
            is_shared=flags["shared"],
        )

    def __str__(self) -> str:
        count = f"{self.count}x" if self.count > 1 else ""
        inward = f":{format_gbit(self.in_gb_per_s)}" if self.in_gb_per_s is not None else ""
        message = f"+{self.message_us:g}us" if self.message_us else ""
        flags = f"{' half-duplex' if self.is_half_duplex else ''}{' shared' if self.is_shared else ''}"
        return f"{count}{format_gbit(self.gb_per_s)}{inward}@{self.alpha_us:g}us{message}{flags}"


_GB_PER_S = {"kbit": 1 / 8e6, "mbit": 1 / 8e3, "gbit": 1 / 8, "tbit": 1e3 / 8, "mb/s": 1e-3, "gb/s": 1.0}


def parse_gb_per_s(text: str) -> float:
    """Read a bandwidth (`300mbit`, `25gbit`, `12GB/s`) as GB/s."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-zA-Z/]+)\s*", text)
    unit = _GB_PER_S.get(match[2].lower()) if match else None
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if unit is None or not 0 < value < math.inf:
        raise BadCluster(f"cannot read the bandwidth {_shortened(text)!r}: write it like 300mbit, 25gbit or 12GB/s")
    return value * unit


def _preset(name: str) -> str:
    if name.lower() in LINK_PRESETS:
        return LINK_PRESETS[name.lower()].link
    close = difflib.get_close_matches(name.lower(), LINK_PRESETS, n=1)
    hint = f": did you mean {close[0]!r}?" if close else "."
    raise BadCluster(
        f"cannot read the bandwidth {name!r}: write it like 300mbit, 25gbit or 12GB/s, or name a link{hint}\n"
        f"  The links are {', '.join(LINK_PRESETS)}."
    )


def format_gbit(gb_per_s: float) -> str:
    """Write GB/s the way networks are sold: `25gbit`, `300mbit`."""
    gbit = gb_per_s * 8
    return f"{gbit:.4g}gbit" if gbit >= 1 else f"{gbit * 1e3:.4g}mbit"


def _latency_us(text: str, whole: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*(us|µs|ms)\s*", text)
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        raise BadCluster(f"cannot read the latency in {_shortened(whole)!r}: write it like 25gbit@8us")
    return float(match[1]) * (1e3 if match[2] == "ms" else 1.0)


# Groups


_Place = tuple[int, int]
"""A link: the tier, and the unit whose uplink it is. 0 are the ranks, 1 the hosts, then what lies above."""


class _Crossing(NamedTuple):
    """What a group does on one link: bytes that cross it for each byte that one rank sends, in the order of `Way`."""

    loads: tuple[float, ...]
    inside: int  # members behind the link
    turns: int  # how often the ring comes in

    @classmethod
    def of(cls, inside: int, ranks: int, turns: int) -> _Crossing:
        outside, others = ranks - inside, ranks - 1
        pairs = inside * outside / others  # each sends every other one its part
        # Whether the root is inside or not: the worse.
        loads = (float(turns), float(min(inside, outside)), pairs, max(inside, outside) / others, 1.0)
        return cls(loads, inside, turns)

    def plus(self, other: _Crossing) -> _Crossing:
        """What one group does on a medium that two of its units share. What one rank receives passes it once."""
        sums = tuple(a + b for a, b in zip(self.loads, other.loads, strict=True))
        loads = (*sums[:3], *map(max, self.loads[3:], other.loads[3:]))
        return _Crossing(loads, self.inside + other.inside, self.turns + other.turns)


class _Crowd(NamedTuple):
    """What all groups together do on one link."""

    groups: int
    loads: tuple[float, ...]


_OWN_LINK = _Crossing((1.0, 1.0, 1.0, 1.0, 1.0), 1, 1)  # a rank's own carries what it sends


# Clusters


@dataclass(frozen=True, slots=True)
class Tier:
    """Units above the hosts, like racks: which one each unit below belongs to, and the uplink that each has."""

    name: str
    link: Link
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """How a group of ranks sits, and what the links leave it while its sibling groups run too.

    `text` is the key under which measured collectives are filed: `4x1` is a rank on each of 4 hosts, `1x4` 4 ranks of
    one host, `3+2` 3 of one and 2 of another, `2x4x1` 2 racks of 4 such hosts. `*2` says that 2 such groups share
    links, `~2` that the ranks' order leads the ring out of a host twice.
    """

    text: str
    ranks: int
    siblings: int
    """How many groups share the busiest link with each other, this one included."""
    alpha_us: float
    message_us: float
    speeds: tuple[tuple[Way, float], ...]
    """GB/s for what one rank sends, by the way of sending. Infinite for a rank alone."""

    def gb_per_s(self, way: Way) -> float:
        for known, speed in self.speeds:
            if known is way:
                return speed
        raise AssertionError(f"no speed for {way}")

    def __str__(self) -> str:
        return self.text


REACH = r"[1-9(][\dx+()]*(~[1-9]\d{0,6})?(\*[1-9]\d{0,6})?"
"""What `Reach.text` looks like."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts of ranks, and the links that join them.

    `placement[rank]` is the host of a rank; by default `ranks_per_host` ranks fill each host, one after the other. With
    a placement hosts may have fewer, and `ranks_per_host` is what the fullest one has. `above` holds racks and the
    like, from the hosts up.
    """

    hosts: int
    ranks_per_host: int
    intra: Link
    inter: Link
    placement: tuple[int, ...] = ()
    above: tuple[Tier, ...] = ()
    _known: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False, compare=False)
    """What follows from the fields, once it was asked for."""

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise BadCluster(
                f"a cluster needs at least 1 host and 1 rank a host, not {self.hosts}x{self.ranks_per_host}"
            )
        _check_ranks(len(self.placement) or self.hosts * self.ranks_per_host)
        if not self.placement:
            filled = tuple(rank // self.ranks_per_host for rank in range(self.hosts * self.ranks_per_host))
            object.__setattr__(self, "placement", filled)
        counts = Counter(self.placement)
        if sorted(counts) != list(range(self.hosts)) or max(counts.values()) != self.ranks_per_host:
            raise BadCluster(
                f"the placement {_shortened(self.placement)} does not put {self.ranks_per_host} ranks on each of"
                f" {self.hosts} hosts (the fullest, if they differ)"
            )
        below = self.hosts
        for tier in self.above:
            count = len(set(tier.units))
            if len(tier.units) != below or set(tier.units) != set(range(count)):
                raise BadCluster(
                    f"the {tier.name}s {_shortened(tier.units)} must say for each of the {below} units below which one"
                    " it is in, counted from 0 without gaps"
                )
            below = count

    @classmethod
    def placed(cls, placement: Iterable[int], *, intra: Link, inter: Link, above: tuple[Tier, ...] = ()) -> Cluster:
        """A cluster told by the host of each rank."""
        hosts = tuple(placement)
        if not hosts:
            raise BadCluster("a cluster needs at least 1 rank")
        fullest = max(Counter(hosts).values())
        return cls(len(set(hosts)), fullest, intra=intra, inter=inter, placement=hosts, above=above)

    # Ranks

    @property
    def world_size(self) -> int:
        return len(self.placement)

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """How many ranks each host has."""
        return tuple(len(ranks) for ranks in self.groups(Level.INTRA))

    @property
    def is_even(self) -> bool:
        """All hosts have as many ranks."""
        return self.world_size == self.hosts * self.ranks_per_host

    @property
    def has_levels(self) -> bool:
        """A host's ranks can share the work between hosts: there are several of both, and as many on each host."""
        return self.is_even and self.hosts > 1 and self.ranks_per_host > 1

    @property
    def shape(self) -> str:
        """How many ranks sit where: `8x4`, or `3+2` if hosts differ, with racks in front: `2x4x8`."""
        if "shape" not in self._known:
            self._known["shape"] = self._shape(range(self.world_size))
        return self._known["shape"]

    def ranks_at(self, level: Level) -> int:
        """How many ranks one collective at this level joins; the largest, if they differ."""
        return {
            Level.INTRA: self.ranks_per_host,
            Level.INTER: self.hosts,
            Level.WORLD: self.world_size,
        }[level]

    def local_rank(self, rank: int) -> int:
        """The place of a rank inside its host."""
        return self._places()[rank]

    def group(self, level: Level, rank: int) -> tuple[int, ...]:
        """The ranks that a rank meets at a level, in the order of their payloads."""
        if level is Level.WORLD:
            return self.groups(level)[0]
        return self.groups(level)[self.placement[rank] if level is Level.INTRA else self.local_rank(rank)]

    def groups(self, level: Level) -> tuple[tuple[int, ...], ...]:
        """All groups of a level: by host, by place inside the host, or the one of all ranks."""
        if level not in self._known:
            keys = {Level.INTRA: self.placement, Level.INTER: self._places(), Level.WORLD: (0,) * self.world_size}
            found: defaultdict[int, list[int]] = defaultdict(list)
            for rank, key in enumerate(keys[level]):
                found[key].append(rank)
            if level is Level.INTER:
                for ranks in found.values():
                    ranks.sort(key=self.placement.__getitem__)
            self._known[level] = tuple(tuple(found[key]) for key in sorted(found))
        return self._known[level]

    def _places(self) -> tuple[int, ...]:
        if "places" not in self._known:
            seen: Counter[int] = Counter()
            places: list[int] = []
            for host in self.placement:
                places.append(seen[host])
                seen[host] += 1
            self._known["places"] = tuple(places)
        return self._known["places"]

    # Links

    def link_at(self, level: Level) -> Link:
        """The link that a collective at this level is named after: a flat one between hosts crosses theirs."""
        if level is Level.INTRA or (level is Level.WORLD and self.hosts == 1):
            return self.intra
        return self.inter

    @property
    def links(self) -> tuple[Link, ...]:
        """From the ranks' own up: inside a host, the hosts' uplinks, the racks', ..."""
        return (self.intra, self.inter, *(tier.link for tier in self.above))

    def with_inter(self, gb_per_s: float) -> Cluster:
        """The same cluster with another bandwidth between hosts; what lies above keeps its ratio to it."""
        factor = gb_per_s / self.inter.gb_per_s
        above = tuple(replace(tier, link=tier.link.at_gb_per_s(tier.link.gb_per_s * factor)) for tier in self.above)
        changed = replace(self, inter=self.inter.at_gb_per_s(gb_per_s), above=above)
        # Who sits where stays known, and what the links inside hosts give.
        kept = {key: known for key, known in self._known.items() if not _is_between_hosts(key)}
        changed._known.update(kept)
        return changed

    def with_racks(self, hosts_per_rack: int, *, oversubscription: float = 1.0, link: Link | None = None) -> Cluster:
        """Put the hosts into racks, one after the other.

        A rack's uplink carries what its hosts send together, divided by `oversubscription`, unless `link` says what it
        is. Its latency is that between hosts.
        """
        if hosts_per_rack < 1:
            raise BadCluster(f"a rack needs at least 1 host, not {hosts_per_rack}")
        if hosts_per_rack > MOST_RANKS:
            raise BadCluster(f"a rack may have {MOST_RANKS:,} hosts, not {_shortened(hosts_per_rack)}")
        if not oversubscription > 0:
            raise BadCluster(f"an oversubscription is above 0, like 4 for 4:1, not {oversubscription:g}")
        units = tuple(host // hosts_per_rack for host in range(self.hosts))
        share = hosts_per_rack * self.inter.count / oversubscription
        uplink = link or replace(self.inter.at_gb_per_s(self.inter.gb_per_s * share), count=1, is_shared=False)
        return replace(self, above=(Tier("rack", uplink, units),))

    def reach(self, ranks: Sequence[int], beside: Iterable[Sequence[int]] = ()) -> Reach:
        """How a group of ranks sits and what it gets, while the groups in `beside` do the same. Ranks in ring order."""
        members = tuple(ranks)
        bad = [rank for rank in members if not 0 <= rank < self.world_size]
        if bad or not members or len(set(members)) != len(members):
            raise BadCluster(
                f"a group has ranks of 0 to {self.world_size - 1}, each once, in a cluster of {self.world_size}; it is"
                f" {_shortened(members)}"
            )
        others = tuple(tuple(other) for other in beside)
        key = ("reach", members, others)
        if key not in self._known:
            self._known[key] = self._reach_beside(members, others)
        return self._known[key]

    def reach_at(self, level: Level) -> Reach:
        """The reach of a level's groups while all of them run; the slowest one's, if they differ."""
        key = ("reach", level)
        if key not in self._known:
            groups = self.groups(level)
            if ("crossed", level) not in self._known:
                self._known["crossed", level] = self._crossed(groups)
            crossings, crowds = self._known["crossed", level]
            reaches = [self._one_reach(group, own, crowds) for group, own in zip(groups, crossings, strict=True)]
            self._known[key] = max(reaches, key=_slowness)
        return self._known[key]

    def _reach_beside(self, group: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> Reach:
        crossings, crowds = self._crossed((group, *others))
        return self._one_reach(group, crossings[0], crowds)

    def _crossed(self, groups: Sequence[tuple[int, ...]]) -> tuple[list[dict[_Place, _Crossing]], dict[_Place, _Crowd]]:
        """What each group does on the links that it uses, and all of them together, whatever the links' bandwidths."""
        crossings = [self._crossings(group) for group in groups]
        everyone: defaultdict[_Place, list[_Crossing]] = defaultdict(list)
        for crossed in crossings:
            for place, crossing in crossed.items():
                everyone[place].append(crossing)
        crowds = {
            place: _Crowd(len(there), tuple(map(sum, zip(*(crossing.loads for crossing in there), strict=True))))
            for place, there in everyone.items()
        }
        return crossings, crowds

    def _one_reach(
        self,
        group: tuple[int, ...],
        crossed: Mapping[_Place, _Crossing],
        crowds: Mapping[_Place, _Crowd],
    ) -> Reach:
        links = [self.links[tier] for tier in sorted({tier for tier, _ in crossed})]
        siblings = max((crowds[place].groups for place in crossed), default=1)
        turns = max((own.turns for (tier, _), own in crossed.items() if tier == 1), default=1)
        slowest = [0.0] * len(Way)
        # Most links of a tier carry the same: only what differs is asked about.
        for tier, crowd, own in dict.fromkeys((place[0], crowds[place], own) for place, own in crossed.items()):
            link = self.links[tier]
            for number, way in enumerate(Way):
                is_one_way = way in (Way.ROOT, Way.ONE) or link.is_shared
                together = crowd.loads[number] / link.count
                alone = own.loads[number] / min(link.count, own.inside)
                speed = link.one_way_gb_per_s if is_one_way else link.both_ways_gb_per_s
                slowest[number] = max(slowest[number], max(together, alone) / speed)
        shape = self._shape(group)
        return Reach(
            text=f"{shape}{f'~{turns}' if turns > 1 else ''}{f'*{siblings}' if siblings > 1 else ''}",
            ranks=len(group),
            siblings=siblings,
            alpha_us=max((link.alpha_us for link in links), default=0.0),
            message_us=max((link.message_us for link in links), default=0.0),
            speeds=tuple((way, 1 / us if us else math.inf) for way, us in zip(Way, slowest, strict=True)),
        )

    def _crossings(self, group: tuple[int, ...]) -> dict[_Place, _Crossing]:
        """What a group does on each link that it uses.

        A host's uplink is used if members sit elsewhere too, a rank's own link if another member sits in its host. A
        shared medium belongs to the unit in which it lies, and carries what its units send and what comes in.
        """
        found: dict[_Place, _Crossing] = {}
        for tier, link in enumerate(self.links):
            crossed = self._own_links(group) if tier == 0 else self._uplinks(group, tier)
            if not link.is_shared:
                found |= {(tier, unit): crossing for unit, crossing in crossed.items()}
                continue
            around = self._units(tier + 1)
            medium_of = {unit: around[rank] for rank, unit in enumerate(self._units(tier))}
            entering = self._uplinks(group, tier + 1)
            for unit, crossing in crossed.items():
                place = (tier, medium_of[unit])
                known = found.get(place) or entering.get(medium_of[unit])
                found[place] = known.plus(crossing) if known else crossing
        return found

    def _own_links(self, group: tuple[int, ...]) -> dict[int, _Crossing]:
        inside = Counter(self.placement[rank] for rank in group)
        return {rank: _OWN_LINK for rank in group if inside[self.placement[rank]] > 1}

    def _uplinks(self, group: tuple[int, ...], tier: int) -> dict[int, _Crossing]:
        units = [self._units(tier)[rank] for rank in group]
        inside, turns = Counter(units), Counter[int]()
        for k, unit in enumerate(units):
            turns[unit] += units[k - 1] != unit
        ranks = len(group)
        return {unit: _Crossing.of(m, ranks, turns[unit]) for unit, m in inside.items() if m < ranks}

    def _units(self, tier: int) -> Sequence[int]:
        """The unit of a tier that each rank is in; above the last tier there is one of all."""
        if tier == 0:
            return range(self.world_size)
        if tier == 1:
            return self.placement
        key = ("units", tier)
        if key not in self._known:
            if tier > len(self.above) + 1:
                units = (0,) * self.world_size
            else:
                units = tuple(self.above[tier - 2].units[below] for below in self._units(tier - 1))
            self._known[key] = units
        return self._known[key]

    def _shape(self, ranks: Iterable[int]) -> str:
        counts = Counter(self.placement[rank] for rank in ranks)
        texts = {host: str(counts[host]) for host in sorted(counts)}
        for tier in self.above:
            racks: defaultdict[int, list[str]] = defaultdict(list)
            for unit, text in texts.items():
                racks[tier.units[unit]].append(text)
            if len(racks) == 1:
                break
            texts = {rack: _joined(inside) for rack, inside in sorted(racks.items())}
        return _joined(texts.values())

    # Text and files

    @classmethod
    def parse(cls, text: str, *, intra: Link | None = None, inter: Link | None = None) -> Cluster:
        """Read `8x4` as 8 hosts of 4 ranks, `4+4+2` or `2x4+2` as hosts that differ, `2x8x4` as 2 racks of `8x4`.

        Links may follow, as `str(cluster)` writes them: `8x4, inter 25gbit@8us, intra 100gbit`. Then also
        `rack 50gbit` for the racks' uplinks, and `placed 0 1 1 0` for the host of each rank.
        """
        shape, *clauses = (part.strip() for part in text.split(","))
        links: dict[str, Link] = {}
        placement: tuple[int, ...] = ()
        for clause in clauses:
            name, _, rest = clause.partition(" ")
            if name in ("inter", "intra", "rack"):
                links[name] = Link.parse(rest)
            elif name == "placed" and re.fullmatch(r"[\d ]+", rest):
                placement = tuple(map(_whole, rest.split()))
            else:
                raise BadCluster(
                    f"cannot read {clause!r} in the cluster {text!r}: behind the hosts write inter, intra or rack with"
                    " a link, or placed with the host of each rank, like: 2x2, inter 25gbit, placed 0 1 1 0"
                )
        intra, inter = links.get("intra", intra), links.get("inter", inter)
        if intra is None or inter is None:
            missing = "inter" if inter is None else "intra"
            raise BadCluster(f"the cluster {text!r} does not say its {missing} link: add like: , {missing} 25gbit")
        racks, sizes = _parse_shape(shape)
        filled = placement or tuple(host for host, size in enumerate(sizes) for _ in range(size))
        cluster = cls.placed(filled, intra=intra, inter=inter)
        if cluster.shape != _joined(map(str, sizes)):
            raise BadCluster(f"the cluster {text!r} places its ranks as {cluster.shape}")
        if racks > 1:
            return cluster.with_racks(len(sizes) // racks, link=links.get("rack"))
        if "rack" in links:
            raise BadCluster(f"the cluster {text!r} has a rack link and one rack: write it like 2x8x4, racks first")
        return cluster

    def to_json(self) -> dict[str, Any]:
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
        """Build a cluster from `to_json`'s data. Raises BadCluster."""
        try:
            return cls(
                hosts=data["hosts"],
                ranks_per_host=data["ranks_per_host"],
                intra=Link(**data["intra"]),
                inter=Link(**data["inter"]),
                placement=tuple(data["placement"]),
                above=tuple(Tier(t["name"], Link(**t["link"]), tuple(t["units"])) for t in data.get("above", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCluster(f"this is not a cluster: {type(error).__name__}: {error}") from None

    def __str__(self) -> str:
        """What `parse` reads back, unless racks are uneven or several tiers lie above the hosts."""
        above = "".join(f", {tier.name} {tier.link}" for tier in self.above)
        is_filled = self.placement == tuple(sorted(self.placement))
        placed = "" if is_filled else f", placed {' '.join(map(str, self.placement))}"
        return f"{self.shape}{above}, inter {self.inter}, intra {self.intra}{placed}"


def _joined(texts: Iterable[str]) -> str:
    """Units side by side: `4x1` if they are alike, else `3+2`, largest first."""
    counts = Counter(texts)
    ordered = sorted(counts, key=lambda text: (int(text) if text.isdigit() else 0, text), reverse=True)
    if len(ordered) == 1:
        (text,) = ordered
        return f"{counts[text]}x{f'({text})' if '+' in text else text}"
    parts = {text: text if text.isdigit() else f"({text})" for text in ordered}
    return "+".join(f"{counts[text]}x{part}" if counts[text] > 1 else part for text, part in parts.items())


def _parse_shape(text: str) -> tuple[int, list[int]]:
    """How many racks, and how many ranks each host has."""
    even = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*(\d+)", text)
    if even is not None:
        racks, hosts, ranks = _whole(even[1] or "1"), _whole(even[2]), _whole(even[3])
        if racks < 1 or hosts < 1 or ranks < 1:
            raise BadCluster(f"a cluster needs at least 1 host and 1 rank a host, not {text}")
        _check_ranks(racks * hosts * ranks)
        return racks, [ranks] * (racks * hosts)
    sizes: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", part)
        if match is None or "+" not in text or _whole(match[2]) < 1:
            raise BadCluster(
                f"cannot read the cluster {_shortened(text)!r}: write hosts x ranks per host, like 8x4, or 4+4+2 if"
                " hosts differ"
            )
        count, size = _whole(match[1] or "1"), _whole(match[2])
        _check_ranks(sum(sizes) + count * size)
        sizes += [size] * count
    return 1, sizes


def _check_ranks(count: int) -> None:
    """Raise BadCluster before anything is made for so many ranks."""
    if count > MOST_RANKS:
        raise BadCluster(f"a cluster may have {MOST_RANKS:,} ranks; this one would have {_shortened(count)}")


def _whole(digits: str) -> int:
    """Digits as a number; so many that Python would rather not read them are more than may be anywhere."""
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


_DIGITS = 30


def _shortened(value: object) -> str:
    """A value in an error, however large it is."""
    if isinstance(value, int) and value >= 10**_DIGITS:
        return f"10^{_DIGITS} or more"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_between_hosts(key: Any) -> bool:
    """Whether what a cluster knows under this key is what groups get that may span hosts."""
    return isinstance(key, tuple) and key[:1] == ("reach",) and key != ("reach", Level.INTRA)


def _slowness(reach: Reach) -> tuple[float, int, float, str]:
    """Orders a level's groups by what an all_reduce takes on them."""
    us = (reach.ranks - 1) / reach.ranks / reach.gb_per_s(Way.CHAIN)
    return (us, reach.ranks, reach.alpha_us, reach.text)
