"""Say which rank sits where, and whom it meets at each level of the network."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fxcomp.cluster.link import Link
from fxcomp.cluster.shape import shape_text


class Axis(Enum):
    """A direction in which ranks lie beside each other. Where there are no racks, all hosts are in one."""

    HOST = "the ranks of a host"
    RACK = "the hosts of a rack"
    RACKS = "the racks"

    __hash__ = object.__hash__  # Enum's own runs in Python, for every price that the search asks for


class Level(Enum):
    """Name the ranks that take part in a collective."""

    INTRA = "intra"  # the ranks of one host
    INTER = "inter"  # the ranks with the same place in their hosts, one a host
    WORLD = "world"  # all ranks
    RACK = "rack"  # of these, the ones in the hosts of one rack
    RACKS = "racks"  # of these, the ones with the same place in their racks, one a rack

    __hash__ = object.__hash__

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes that the ranks of one collective span."""
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
    """Units above the hosts, like racks: which one each unit below belongs to, and the uplink that each has."""

    name: str
    link: Link
    units: tuple[int, ...]


class Seating:
    """The ranks of a cluster: their hosts, their racks, and the groups that they make."""

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
        """All hosts have as many ranks."""
        return self.world_size == self.hosts * self.ranks_per_host

    @property
    def has_levels(self) -> bool:
        """A host's ranks can share the work between hosts: there are several of both, and as many on each host."""
        return self.is_even and self.hosts > 1 and self.ranks_per_host > 1

    @property
    def shape(self) -> str:
        """The ranks of each host: `8x4`, or `3+2` if hosts differ, with racks in front: `2x4x8`."""
        if "shape" not in self._known:
            self._known["shape"] = self._shape(range(self.world_size))
        return self._known["shape"]

    def ranks_at(self, level: Level) -> int:
        """Count the ranks that one collective at this level joins; the largest, if they differ."""
        match level:
            case Level.INTRA:
                return self.ranks_per_host
            case Level.INTER:
                return self.hosts
            case Level.WORLD:
                return self.world_size
            case _:
                return max(map(len, self.groups(level)))

    @property
    def has_racks(self) -> bool:
        """Ranks can share the work between racks: there are several, with as many hosts each."""
        counts = Counter(self._racks())
        return len(counts) > 1 and len(set(counts.values())) == 1

    def length_of(self, axis: Axis) -> int:
        """Count the ranks that lie along an axis; the most, if they differ."""
        return {Axis.HOST: self.ranks_per_host, Axis.RACK: self.ranks_at(Level.RACK), Axis.RACKS: self.racks}[axis]

    @property
    def racks(self) -> int:
        """The number of racks."""
        return len(set(self._racks()))

    def place_along(self, axes: Collection[Axis], rank: int) -> int:
        """Number a rank among those that lie beside it along some axes."""
        rack, host = self._racks()[self.placement[rank]], self.group(Level.RACK, rank).index(rank)
        place = 0
        for axis, at in ((Axis.RACKS, rack), (Axis.RACK, host), (Axis.HOST, self.local_rank(rank))):
            if axis in axes:
                place = place * self.length_of(axis) + at
        return place

    def local_rank(self, rank: int) -> int:
        """Return the place of a rank inside its host."""
        return self._places()[rank]

    def group(self, level: Level, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank meets at a level, in the order of their payloads."""
        if level is Level.WORLD:
            return self.groups(level)[0]
        if level in (Level.RACK, Level.RACKS):
            return next(ranks for ranks in self.groups(level) if rank in ranks)
        return self.groups(level)[self.placement[rank] if level is Level.INTRA else self.local_rank(rank)]

    def groups(self, level: Level) -> tuple[tuple[int, ...], ...]:
        """Return all groups of a level: by host, by place inside the host, or the one of all ranks."""
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
        """Say for each rank what those that it meets at a level have in common."""
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
                inside = self._hosts_in_racks()
                return [(inside[host], place) for host, place in zip(self.placement, places, strict=True)]

    def _racks(self) -> Sequence[int]:
        """Say for each host in which rack it is."""
        return self.above[0].units if self.above else (0,) * self.hosts

    def _hosts_in_racks(self) -> list[int]:
        """Say for each host which place in its rack it has."""
        seen: Counter[int] = Counter()
        found: list[int] = []
        for rack in self._racks():
            found.append(seen[rack])
            seen[rack] += 1
        return found

    def _places(self) -> tuple[int, ...]:
        if "places" not in self._known:
            seen: Counter[int] = Counter()
            places: list[int] = []
            for host in self.placement:
                places.append(seen[host])
                seen[host] += 1
            self._known["places"] = tuple(places)
        return self._known["places"]

    def _shape(self, ranks: Iterable[int]) -> str:
        return shape_text((self.placement[rank] for rank in ranks), [tier.units for tier in self.above])
