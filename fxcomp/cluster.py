"""Describe the machines: which rank sits on which host, and what a link costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fxcomp.errors import BadCluster


class Level(Enum):
    """Which ranks take part in a collective."""

    INTRA = "intra"  # the ranks of one host
    INTER = "inter"  # the ranks with the same place in their hosts, one a host
    WORLD = "world"  # all ranks


@dataclass(frozen=True, slots=True)
class Link:
    """What joins ranks: a latency per step in µs, and a bandwidth in GB/s (10⁹ bytes a second).

    Inside a host the bandwidth is a rank's own; between hosts it is the host's, which all its ranks share.
    """

    alpha_us: float
    gb_per_s: float

    def __post_init__(self) -> None:
        if not self.alpha_us >= 0:
            raise BadCluster(f"a link's alpha_us must be 0 or more, not {self.alpha_us}")
        if not self.gb_per_s > 0:
            raise BadCluster(f"a link's gb_per_s must be above 0, not {self.gb_per_s}")

    @property
    def bytes_per_us(self) -> float:
        return self.gb_per_s * 1e3

    @classmethod
    def parse(cls, text: str, *, alpha_us: float = 25.0) -> Link:
        """Read `25gbit`, `300mbit` or `12GB/s`, with a latency behind `@` if given: `25gbit@8us`.

        The latency is `alpha_us` otherwise (default 25 µs: TCP over Ethernet, assumed).
        """
        rate, _, latency = text.strip().partition("@")
        return cls(alpha_us=_latency_us(latency, text) if latency else alpha_us, gb_per_s=parse_gb_per_s(rate))

    def __str__(self) -> str:
        return f"{format_gbit(self.gb_per_s)}@{self.alpha_us:g}us"


_GB_PER_S = {"kbit": 1 / 8e6, "mbit": 1 / 8e3, "gbit": 1 / 8, "tbit": 1e3 / 8, "mb/s": 1e-3, "gb/s": 1.0}


def parse_gb_per_s(text: str) -> float:
    """Read a bandwidth (`300mbit`, `25gbit`, `12GB/s`) as GB/s."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-zA-Z/]+)\s*", text)
    unit = _GB_PER_S.get(match[2].lower()) if match else None
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if unit is None or value <= 0:
        raise BadCluster(f"cannot read the bandwidth {text!r}: write it like 300mbit, 25gbit or 12GB/s")
    return value * unit


def format_gbit(gb_per_s: float) -> str:
    """Write GB/s the way networks are sold: `25gbit`, `300mbit`."""
    gbit = gb_per_s * 8
    return f"{gbit:.4g}gbit" if gbit >= 1 else f"{gbit * 1e3:.4g}mbit"


def _latency_us(text: str, whole: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*(us|µs|ms)\s*", text)
    if match is None:
        raise BadCluster(f"cannot read the latency in {whole!r}: write it like 25gbit@8us")
    return float(match[1]) * (1e3 if match[2] == "ms" else 1.0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts with the same number of ranks each, and the links that join them.

    `placement[rank]` is the host of a rank; by default hosts are filled one after the other.
    """

    hosts: int
    ranks_per_host: int
    intra: Link
    inter: Link
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise BadCluster(
                f"a cluster needs at least 1 host and 1 rank a host, not {self.hosts}x{self.ranks_per_host}"
            )
        if not self.placement:
            filled = tuple(rank // self.ranks_per_host for rank in range(self.world_size))
            object.__setattr__(self, "placement", filled)
        counts = [self.placement.count(host) for host in range(self.hosts)]
        if len(self.placement) != self.world_size or set(counts) != {self.ranks_per_host}:
            raise BadCluster(
                f"the placement {self.placement} does not put {self.ranks_per_host} ranks on each of {self.hosts} hosts"
            )

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    def ranks_at(self, level: Level) -> int:
        """How many ranks one collective at this level joins."""
        return {
            Level.INTRA: self.ranks_per_host,
            Level.INTER: self.hosts,
            Level.WORLD: self.world_size,
        }[level]

    def link_at(self, level: Level) -> Link:
        """The link that limits a collective at this level: a flat one is as slow as its slowest link."""
        if level is Level.INTRA or (level is Level.WORLD and self.hosts == 1):
            return self.intra
        return self.inter

    def local_rank(self, rank: int) -> int:
        """The place of a rank inside its host."""
        return self.placement[:rank].count(self.placement[rank])

    def group(self, level: Level, rank: int) -> tuple[int, ...]:
        """The ranks that a rank meets at a level, in the order of their payloads."""
        ranks = range(self.world_size)
        if level is Level.WORLD:
            return tuple(ranks)
        if level is Level.INTRA:
            return tuple(r for r in ranks if self.placement[r] == self.placement[rank])
        members = [r for r in ranks if self.local_rank(r) == self.local_rank(rank)]
        return tuple(sorted(members, key=lambda r: self.placement[r]))

    @classmethod
    def parse(cls, text: str, *, intra: Link, inter: Link) -> Cluster:
        """Read `8x4` as 8 hosts of 4 ranks."""
        match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text)
        if match is None:
            raise BadCluster(f"cannot read the cluster {text!r}: write hosts x ranks per host, like 8x4")
        return cls(hosts=int(match[1]), ranks_per_host=int(match[2]), intra=intra, inter=inter)

    def to_json(self) -> dict[str, Any]:
        return {
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
            "intra": {"alpha_us": self.intra.alpha_us, "gb_per_s": self.intra.gb_per_s},
            "inter": {"alpha_us": self.inter.alpha_us, "gb_per_s": self.inter.gb_per_s},
            "placement": list(self.placement),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cluster:
        return cls(
            hosts=data["hosts"],
            ranks_per_host=data["ranks_per_host"],
            intra=Link(**data["intra"]),
            inter=Link(**data["inter"]),
            placement=tuple(data["placement"]),
        )

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks_per_host}, inter {self.inter}, intra {self.intra}"
