"""Bandwidth of a group of ranks in a tree of links shared with sibling groups.

    bandwidth of a pattern = min over links of (link bandwidth / load)    load: bytes on a link per byte a rank sends

Tier 0 is the ranks' own links, tier 1 the hosts' uplinks, and so on.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from fxcomp.cluster.link import Link


class TrafficPattern(Enum):
    """Senders and receivers at one time."""

    CHAIN = "chain"  # each rank to the next: rings
    TREE = "tree"  # to a parent and back: pipelined trees, with units joined as a chain
    DOUBLING = "doubling"  # to partners at distances 1, 2, 4, ...
    PAIRS = "pairs"  # all ranks to all ranks
    ROOT = "root"  # all ranks to the first rank, or the reverse
    ONE = "one"  # one rank to another

    __hash__ = object.__hash__  # Enum's own hash is slow


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """Shape of a group in the tree, and its bandwidth.

    `text` is the key of measured collectives: `4x1` is one rank on each of 4 hosts, `1x4` 4 ranks of one host, `3+2` 3
    ranks of one host and 2 of another, `2x4x1` 2 racks of 4 hosts. `*2` means 2 groups that share links, `~2` a ring
    that leaves a host twice.
    """

    text: str
    ranks: int
    siblings: int
    """Number of groups that share the busiest link, including this group."""
    alpha_us: float
    message_us: float
    speeds: tuple[tuple[TrafficPattern, float], ...]
    """GB/s that one rank sends, by pattern. Infinite for a single rank."""

    def gb_per_s(self, pattern: TrafficPattern) -> float:
        for known, speed in self.speeds:
            if known is pattern:
                return speed
        raise AssertionError(f"no speed for {pattern}")

    @property
    def slowness(self) -> tuple[float, int, float, str]:
        """Sort key that puts a level's slowest group last. It starts with the relative time of an all_reduce."""
        us = (self.ranks - 1) / self.ranks / self.gb_per_s(TrafficPattern.CHAIN)
        return (us, self.ranks, self.alpha_us, self.text)

    def __str__(self) -> str:
        return self.text


TOPOLOGY_TEXT = r"[1-9(][\dx+()]*(~[1-9]\d{0,6})?(\*[1-9]\d{0,6})?"

Place = tuple[int, int]
"""Key of a link: tier, and index of the unit whose uplink it is."""


class Crossing(NamedTuple):
    """Traffic of one group on one link: bytes per byte that a rank sends, by `TrafficPattern`."""

    loads: tuple[float, ...]
    inside: int  # members below the link
    turns: int  # times that the ring enters the unit

    @classmethod
    def of(cls, inside: int, ranks: int, turns: int, *, units: int, has_root: bool) -> Crossing:
        """Return the traffic on a unit's uplink.

        The group has `ranks` ranks in `units` units, and `inside` ranks in this unit. The ring enters it `turns` times.
        """
        outside, others = ranks - inside, ranks - 1
        pairs = inside * outside / others  # each rank sends every other rank its part
        rooted = (outside if has_root else inside) / others
        # Two units share one tree edge: upward traffic leaves one unit, downward traffic the other.
        tree = turns / 2 if units == 2 else float(turns)
        loads = (float(turns), tree, float(min(inside, outside)), pairs, rooted, 1.0)
        return cls(loads, inside, turns)

    def plus(self, other: Crossing) -> Crossing:
        """Add another unit's traffic on a shared medium. For ROOT and ONE, the largest load includes the others."""
        sums = tuple(a + b for a, b in zip(self.loads, other.loads, strict=True))
        loads = (*sums[:_EVERYONE], *map(max, self.loads[_EVERYONE:], other.loads[_EVERYONE:]))
        return Crossing(loads, self.inside + other.inside, self.turns + other.turns)


class Crowd(NamedTuple):
    groups: int
    loads: tuple[float, ...]


_EVERYONE = 4
"""Number of patterns, first in TrafficPattern, in which every rank sends and receives."""

_OWN_LINK = Crossing((1.0,) * len(TrafficPattern), 1, 1)
_OF_TWO = Crossing((1.0, 0.5, *_OWN_LINK.loads[2:]), 1, 1)  # two ranks share one tree edge


@dataclass(frozen=True, slots=True)
class Tree:
    """Links of every tier, and `units[tier][rank]`, the unit of a rank. The last entry is one unit of all ranks."""

    links: tuple[Link, ...]
    units: tuple[Sequence[int], ...]

    def traffic(self, groups: Sequence[tuple[int, ...]]) -> tuple[list[dict[Place, Crossing]], dict[Place, Crowd]]:
        """Count the traffic of groups on their links, per group and in total."""
        crossings = [self._crossings(group) for group in groups]
        everyone: defaultdict[Place, list[Crossing]] = defaultdict(list)
        for crossed in crossings:
            for place, crossing in crossed.items():
                everyone[place].append(crossing)
        crowds = {
            place: Crowd(len(there), tuple(map(sum, zip(*(crossing.loads for crossing in there), strict=True))))
            for place, there in everyone.items()
        }
        return crossings, crowds

    def _crossings(self, group: tuple[int, ...]) -> dict[Place, Crossing]:
        """Count the traffic of a group on each of its links.

        A host's uplink is used if there are members elsewhere, a rank's own link if its host has another member. A
        shared medium is one link, which carries all traffic among the members inside a unit, and into the unit.
        """
        found: dict[Place, Crossing] = {}
        for tier, link in enumerate(self.links):
            crossed = self._own_links(group) if tier == 0 else self._uplinks(group, tier)
            if not link.is_shared:
                found |= {(tier, unit): crossing for unit, crossing in crossed.items()}
                continue
            medium_of = dict(zip(self.units[tier], self.units[tier + 1], strict=True))
            entering = self._uplinks(group, tier + 1)
            for unit, crossing in crossed.items():
                place = (tier, medium_of[unit])
                known = found.get(place) or entering.get(medium_of[unit])
                found[place] = known.plus(crossing) if known else crossing
        return found

    def _own_links(self, group: tuple[int, ...]) -> dict[int, Crossing]:
        hosts = self.units[1]
        inside = Counter(hosts[rank] for rank in group)
        own = _OF_TWO if len(group) == 2 else _OWN_LINK
        return {rank: own for rank in group if inside[hosts[rank]] > 1}

    def _uplinks(self, group: tuple[int, ...], tier: int) -> dict[int, Crossing]:
        units = [self.units[tier][rank] for rank in group]
        inside, turns = Counter(units), Counter[int]()
        for k, unit in enumerate(units):
            turns[unit] += units[k - 1] != unit
        ranks = len(group)
        return {
            unit: Crossing.of(m, ranks, turns[unit], units=len(inside), has_root=unit == units[0])
            for unit, m in inside.items()
            if m < ranks
        }

    def group_topology(
        self, shape: str, ranks: int, crossed: Mapping[Place, Crossing], crowds: Mapping[Place, Crowd]
    ) -> GroupTopology:
        """Return a group's topology, with the bandwidth of its slowest link for each pattern."""
        links = [self.links[tier] for tier in sorted({tier for tier, _ in crossed})]
        siblings = max((crowds[place].groups for place in crossed), default=1)
        turns = max((own.turns for (tier, _), own in crossed.items() if tier == 1), default=1)
        slowest = [0.0] * len(TrafficPattern)
        # Most links of a tier have equal traffic: compute each case once.
        for tier, crowd, own in dict.fromkeys((place[0], crowds[place], own) for place, own in crossed.items()):
            link = self.links[tier]
            for number, pattern in enumerate(TrafficPattern):
                is_one_way = pattern in (TrafficPattern.ROOT, TrafficPattern.ONE) or link.is_shared
                together = crowd.loads[number] / link.count
                alone = own.loads[number] / min(link.count, own.inside)
                speed = link.one_way_gb_per_s if is_one_way else link.both_ways_gb_per_s
                slowest[number] = max(slowest[number], max(together, alone) / speed)
        return GroupTopology(
            text=f"{shape}{f'~{turns}' if turns > 1 else ''}{f'*{siblings}' if siblings > 1 else ''}",
            ranks=ranks,
            siblings=siblings,
            alpha_us=max((link.alpha_us for link in links), default=0.0),
            message_us=max((link.message_us for link in links), default=0.0),
            speeds=tuple(
                (pattern, 1 / us if us else math.inf) for pattern, us in zip(TrafficPattern, slowest, strict=True)
            ),
        )
