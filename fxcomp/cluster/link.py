"""Describe a link: its latency and bandwidth, read from text like `25gbit@8us`."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace

from fxcomp.cluster.limits import MOST, MOST_RANKS, parse_digits, shortened
from fxcomp.cluster.link_presets import LINK_PRESETS
from fxcomp.errors import BadCluster


@dataclass(frozen=True, slots=True)
class Link:
    """A latency per step in µs, and a bandwidth in GB/s (10⁹ bytes a second).

    Inside a host every rank has its own link; between hosts the ranks of a host share the host's; and so on above.
    """

    alpha_us: float
    gb_per_s: float
    """Outgoing bandwidth; incoming too, unless `in_gb_per_s` is given."""
    in_gb_per_s: float | None = None
    count: int = 1
    """Parallel links of a unit. A rank drives one of them at a time."""
    message_us: float = 0.0
    """Processor time per message, besides the latency."""
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
            raise BadCluster(f"a link's count must be 1 to {MOST_RANKS:,}, not {shortened(self.count)}")

    @property
    def one_way_gb_per_s(self) -> float:
        """Bandwidth from one to another when nothing comes back: the slower end's."""
        return min(self.gb_per_s, self.in_gb_per_s or self.gb_per_s)

    @property
    def both_ways_gb_per_s(self) -> float:
        """Bandwidth each way while as much comes back."""
        if not self.is_half_duplex:
            return self.one_way_gb_per_s
        return 1 / (1 / self.gb_per_s + 1 / (self.in_gb_per_s or self.gb_per_s))

    def at_gb_per_s(self, gb_per_s: float) -> Link:
        """Change the bandwidth; incoming keeps its ratio to outgoing."""
        into = None if self.in_gb_per_s is None else self.in_gb_per_s * gb_per_s / self.gb_per_s
        return replace(self, gb_per_s=gb_per_s, in_gb_per_s=into)

    @classmethod
    def parse(cls, text: str, *, alpha_us: float = 25.0) -> Link:
        """Read `25gbit`, `300mbit` or `12GB/s`, with a latency after `@` if given: `25gbit@8us`.

        The latency is `alpha_us` otherwise (default 25 µs: TCP over Ethernet, assumed). More can be said: `nvlink4` (a
        name of link_presets.py), `8x25gbit` (eight of them), `100mbit:20mbit` (out and in), `25gbit@8us+2us` (and 2 µs
        per message), and at the end `half-duplex` and `shared`.
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
            count=parse_digits(count[1]) if count else 1,
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
        raise BadCluster(f"cannot read the bandwidth {shortened(text)!r}: write it like 300mbit, 25gbit or 12GB/s")
    return value * unit


def format_gbit(gb_per_s: float) -> str:
    """Write GB/s the way networks are sold: `25gbit`, `300mbit`."""
    gbit = gb_per_s * 8
    return f"{gbit:.4g}gbit" if gbit >= 1 else f"{gbit * 1e3:.4g}mbit"


def _preset(name: str) -> str:
    if name.lower() in LINK_PRESETS:
        return LINK_PRESETS[name.lower()].link
    close = difflib.get_close_matches(name.lower(), LINK_PRESETS, n=1)
    hint = f": did you mean {close[0]!r}?" if close else "."
    raise BadCluster(
        f"cannot read the bandwidth {name!r}: write it like 300mbit, 25gbit or 12GB/s, or name a link{hint}\n"
        f"  The links are {', '.join(LINK_PRESETS)}."
    )


def _latency_us(text: str, whole: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*(us|µs|ms)\s*", text)
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        raise BadCluster(f"cannot read the latency in {shortened(whole)!r}: write it like 25gbit@8us")
    return float(match[1]) * (1e3 if match[2] == "ms" else 1.0)
