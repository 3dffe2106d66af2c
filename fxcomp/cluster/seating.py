"""Placement of ranks, and their groups at each level of the network.

As text: `8x4`, `3+2` if hosts differ, `2x4x8` with racks first. A unit is a host, rack, or larger group of hosts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fxcomp.cluster.link import Link, check_ranks, parse_digits, shortened
from fxcomp.errors import BadOption


def shape_text(hosts_of_ranks: Iterable[int], units_above: Sequence[Sequence[int]]) -> str:
    """Format the shape of ranks on these hosts; `units_above[tier][i]` is the unit around unit i of the tier below."""
    counts = Counter(hosts_of_ranks)
    texts = {host: str(counts[host]) for host in sorted(counts)}
    for units in units_above:
        inside: defaultdict[int, list[str]] = defaultdict(list)
        for unit, text in texts.items():
            inside[units[unit]].append(text)
        if len(inside) == 1:
            break
        texts = {unit: join_units(parts) for unit, parts in sorted(inside.items())}
    return join_units(texts.values())


def join_units(texts: Iterable[str]) -> str:
    """Join the shapes of units: `4x1` for 4 equal units, else `3+2`, largest first."""
    counts = Counter(texts)
    ordered = sorted(counts, key=lambda text: (int(text) if text.isdigit() else 0, text), reverse=True)
    if len(ordered) == 1:
        (text,) = ordered
        return f"{counts[text]}x{f'({text})' if '+' in text else text}"
    parts = {text: text if text.isdigit() else f"({text})" for text in ordered}
    return "+".join(f"{counts[text]}x{part}" if counts[text] > 1 else part for text, part in parts.items())


def parse_shape(text: str) -> tuple[int, list[int]]:
    """Return the number of racks, and the ranks of each host. Raises BadOption."""
    even = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*(\d+)", text)
    if even is not None:
        racks, hosts, ranks = parse_digits(even[1] or "1"), parse_digits(even[2]), parse_digits(even[3])
        if racks < 1 or hosts < 1 or ranks < 1:
            raise BadOption(f"a cluster needs at least 1 host and 1 rank a host, not {text}")
        check_ranks(racks * hosts * ranks)
        return racks, [ranks] * (racks * hosts)
    sizes: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", part)
        if match is None or "+" not in text or parse_digits(match[2]) < 1:
            raise BadOption(
                f"cannot read the cluster {shortened(text)!r}: write hosts x ranks per host, like 8x4, or 4+4+2 if"
                " hosts differ"
            )
        count, size = parse_digits(match[1] or "1"), parse_digits(match[2])
        check_ranks(sum(sizes) + count * size)
        sizes += [size] * count
    return 1, sizes


def parse_clauses(text: str) -> tuple[str, dict[str, Link], tuple[int, ...]]:
    """Parse a cluster's text: shape, links by name, and the host of each rank if given. Raises BadOption."""
    shape, *clauses = (part.strip() for part in text.split(","))
    links: dict[str, Link] = {}
    placement: tuple[int, ...] = ()
    for clause in clauses:
        name, _, rest = clause.partition(" ")
        if name in ("inter", "intra", "rack"):
            links[name] = Link.parse(rest)
        elif name == "placed" and re.fullmatch(r"[\d ]+", rest):
            placement = tuple(map(parse_digits, rest.split()))
        else:
            raise BadOption(
                f"cannot read {clause!r} in the cluster {text!r}: after the hosts write inter, intra or rack with"
                " a link, or placed with the host of each rank, like: 2x2, inter 25gbit, placed 0 1 1 0"
            )
    return shape, links, placement


class Axis(Enum):
    """Dimension of the grid of ranks: racks x hosts x ranks. Without racks, all hosts are in one rack."""

    HOST = "the ranks of a host"
    RACK = "the hosts of a rack"
    RACKS = "the racks"

    __hash__ = object.__hash__  # Enum's own hash is slow


class Level(Enum):
    """The ranks that take part in a collective."""

    INTRA = "intra"  # one host
    INTER = "inter"  # the ranks with the same index in their hosts
    WORLD = "world"  # all ranks
    RACK = "rack"  # subset of INTER: one rack
    RACKS = "racks"  # subset of INTER: hosts with the same index in their racks

    __hash__ = object.__hash__

    @property
    def axes(self) -> frozenset[Axis]:
        return _AXES[self]


_AXES = {
    Level.INTRA: frozenset({Axis.HOST}),
    Level.INTER: frozenset({Axis.RACK, Axis.RACKS}),
    Level.WORLD: frozenset(Axis),
    Level.RACK: frozenset({Axis.RACK}),
    Level.RACKS: frozenset({Axis.RACKS}),
}


@dataclass(frozen=True, slots=True)
class Tier:
    """Units above the hosts, such as racks. `units[i]` contains unit i of the tier below; `link` is a unit's uplink."""

    name: str
    link: Link
    units: tuple[int, ...]


class Seating:
    __slots__ = ()

    hosts: int
    ranks_per_host: int
    placement: tuple[int, ...]
    above: tuple[Tier, ...]
    _known: dict[Any, Any]

    @property
    def world_size(self) -> int:
        return len(self.placement)

    @property
    def is_even(self) -> bool:
        return self.world_size == self.hosts * self.ranks_per_host

    @property
    def has_levels(self) -> bool:
        """True if several hosts all have the same number of ranks, above 1, so that ranks can share inter-host work."""
        return self.is_even and self.hosts > 1 and self.ranks_per_host > 1

    @property
    def shape(self) -> str:
        """Shape as text, such as `8x4`."""
        if "shape" not in self._known:
            self._known["shape"] = self._shape(range(self.world_size))
        return self._known["shape"]

    def ranks_at(self, level: Level) -> int:
        """Return the size of a level's largest group."""
        return max(map(len, self.groups(level)))

    @property
    def has_racks(self) -> bool:
        """True if there are several racks, with equal numbers of hosts, so that ranks can share inter-rack work."""
        counts = Counter(self._racks())
        return len(counts) > 1 and len(set(counts.values())) == 1

    def length_of(self, axis: Axis) -> int:
        """Return the maximum number of ranks along an axis."""
        return {Axis.HOST: self.ranks_per_host, Axis.RACK: self.ranks_at(Level.RACK), Axis.RACKS: self.racks}[axis]

    @property
    def racks(self) -> int:
        return len(set(self._racks()))

    def place_along(self, axes: Collection[Axis], rank: int) -> int:
        """Return a rank's index in the grid of `axes`, with racks outermost."""
        rack, host = self._racks()[self.placement[rank]], self.group(Level.RACK, rank).index(rank)
        place = 0
        for axis, at in ((Axis.RACKS, rack), (Axis.RACK, host), (Axis.HOST, self.local_rank(rank))):
            if axis in axes:
                place = place * self.length_of(axis) + at
        return place

    def local_rank(self, rank: int) -> int:
        return self._places()[rank]

    def group(self, level: Level, rank: int) -> tuple[int, ...]:
        """Return the group of `rank` at a level, in the order of gathered payloads."""
        if level is Level.WORLD:
            return self.groups(level)[0]
        if level in (Level.RACK, Level.RACKS):
            return next(ranks for ranks in self.groups(level) if rank in ranks)
        return self.groups(level)[self.placement[rank] if level is Level.INTRA else self.local_rank(rank)]

    def groups(self, level: Level) -> tuple[tuple[int, ...], ...]:
        if level not in self._known:
            found: defaultdict[Any, list[int]] = defaultdict(list)
            for rank, key in enumerate(self._keys(level)):
                found[key].append(rank)
            if level is not Level.INTRA and level is not Level.WORLD:
                for ranks in found.values():
                    ranks.sort(key=self.placement.__getitem__)
            self._known[level] = tuple(tuple(found[key]) for key in sorted(found))
        return self._known[level]

    def _keys(self, level: Level) -> Sequence[Any]:
        places, racks = self._places(), self._racks()
        match level:
            case Level.INTRA:
                return self.placement
            case Level.INTER:
                return places
            case Level.WORLD:
                return (0,) * self.world_size
            case Level.RACK:
                return [(racks[host], place) for host, place in zip(self.placement, places, strict=True)]
            case Level.RACKS:
                inside = _places_in(racks)
                return [(inside[host], place) for host, place in zip(self.placement, places, strict=True)]

    def _racks(self) -> Sequence[int]:
        return self.above[0].units if self.above else (0,) * self.hosts

    def _places(self) -> Sequence[int]:
        if "places" not in self._known:
            self._known["places"] = _places_in(self.placement)
        return self._known["places"]

    def _shape(self, ranks: Iterable[int]) -> str:
        return shape_text((self.placement[rank] for rank in ranks), [tier.units for tier in self.above])


def _places_in(units: Sequence[int]) -> list[int]:
    """Return each element's index among the elements of its unit."""
    seen: Counter[int] = Counter()
    places: list[int] = []
    for unit in units:
        places.append(seen[unit])
        seen[unit] += 1
    return places
