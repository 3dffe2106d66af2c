"""Link latency and bandwidth, parsed from text like `25gbit@8us` or a product name.

Preset bandwidths are nominal, for one direction. Latencies of NVLink, PCIe and InfiniBand are
NCCL's for one ring step (hwLat in tuning.cc, Ring and Simple). Ethernet latencies assume TCP.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from fxcomp.errors import BadOption


class LinkPreset(NamedTuple):
    link: str
    source: str


LINK_PRESETS: dict[str, LinkPreset] = {
    "nvlink3": LinkPreset("300GB/s@3.4us", "NVIDIA A100: 600 GB/s, both directions together"),
    "nvlink4": LinkPreset("450GB/s@3.4us", "NVIDIA H100 and H200: 900 GB/s, both directions together"),
    "nvlink5": LinkPreset("900GB/s@3.4us", "NVIDIA B200: 1.8 TB/s, both directions together"),
    "pcie3": LinkPreset("15.75GB/s@5.7us", "PCI Express 3.0 x16: 16 lanes of 8 GT/s in 128b/130b"),
    "pcie4": LinkPreset("31.51GB/s@5.7us", "PCI Express 4.0 x16: 16 lanes of 16 GT/s in 128b/130b"),
    "pcie5": LinkPreset("63.02GB/s@5.7us", "PCI Express 5.0 x16: 16 lanes of 32 GT/s in 128b/130b"),
    "ethernet1": LinkPreset("1gbit@25us", "IEEE 802.3ab; latency assumed: TCP"),
    "ethernet10": LinkPreset("10gbit@25us", "IEEE 802.3ae; latency assumed: TCP"),
    "ethernet25": LinkPreset("25gbit@25us", "IEEE 802.3by; latency assumed: TCP"),
    "ethernet100": LinkPreset("100gbit@25us", "IEEE 802.3ba; latency assumed: TCP"),
    "infiniband-edr": LinkPreset("100gbit@9.6us", "InfiniBand EDR 4x: 4 lanes of 25 Gbit/s"),
    "infiniband-hdr": LinkPreset("200gbit@9.6us", "InfiniBand HDR 4x: 4 lanes of 50 Gbit/s"),
    "infiniband-ndr": LinkPreset("400gbit@9.6us", "InfiniBand NDR 4x: 4 lanes of 100 Gbit/s"),
    "wan": LinkPreset("1gbit@20ms", "assumed: sites of one continent"),
}

MOST = 1e18
"""Upper bound on latencies in µs and bandwidths in GB/s (assumed). Bandwidths are at least 1 / MOST."""

MOST_RANKS = 1 << 20
"""Maximum number of ranks; lists of this length fit into memory (assumed)."""

_DIGITS = 30


def check_ranks(count: int) -> None:
    if count > MOST_RANKS:
        raise BadOption(f"a cluster may have {MOST_RANKS:,} ranks; this one would have {shortened(count)}")


def parse_digits(digits: str) -> int:
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


def shortened(value: object) -> str:
    """Format a value for an error, in about 80 characters at most."""
    if isinstance(value, int) and abs(value) >= 10**_DIGITS:
        return f"10^{_DIGITS} or more"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True, slots=True)
class Link:
    """Network link: latency per step of a collective, `alpha_us` in µs, and bandwidth, `gb_per_s` in 10⁹ bytes/s.

    Inside a host every rank has its own link. The ranks of a host, rack or higher unit share the uplink of the unit.
    """

    alpha_us: float
    gb_per_s: float
    """Outgoing bandwidth; incoming too, unless `in_gb_per_s` is given."""
    in_gb_per_s: float | None = None
    """Incoming bandwidth, if different."""
    count: int = 1
    """Number of parallel links of a host or rack. A rank uses one link at a time."""
    message_us: float = 0.0
    """Processor time per message in µs, in addition to the latency."""
    is_half_duplex: bool = False
    """True if sends and receives alternate."""
    is_shared: bool = False
    """True for one shared medium, like a bus. Otherwise each unit has its own link to a non-blocking switch."""

    def __post_init__(self) -> None:
        for name, value in (("alpha_us", self.alpha_us), ("message_us", self.message_us)):
            if not 0 <= value <= MOST:
                raise BadOption(f"a link's {name} must be 0 to {MOST:g}, not {value}")
        for name, value in (("gb_per_s", self.gb_per_s), ("in_gb_per_s", self.in_gb_per_s)):
            if value is not None and not 1 / MOST <= value <= MOST:
                raise BadOption(f"a link's {name} must be {1 / MOST:g} to {MOST:g}, not {value}")
        if not 1 <= self.count <= MOST_RANKS:
            raise BadOption(f"a link's count must be 1 to {MOST_RANKS:,}, not {shortened(self.count)}")

    @property
    def one_way_gb_per_s(self) -> float:
        """Bandwidth in one direction without return traffic."""
        return min(self.gb_per_s, self.in_gb_per_s or self.gb_per_s)

    @property
    def both_ways_gb_per_s(self) -> float:
        """Bandwidth in each direction with equal traffic both ways."""
        if not self.is_half_duplex:
            return self.one_way_gb_per_s
        return 1 / (1 / self.gb_per_s + 1 / (self.in_gb_per_s or self.gb_per_s))

    def at_gb_per_s(self, gb_per_s: float) -> Link:
        """Change the bandwidth to `gb_per_s`; incoming keeps its ratio to outgoing."""
        into = None if self.in_gb_per_s is None else self.in_gb_per_s * gb_per_s / self.gb_per_s
        return replace(self, gb_per_s=gb_per_s, in_gb_per_s=into)

    @classmethod
    def parse(cls, text: str, *, alpha_us: float = 25.0) -> Link:
        """Read a `text` like `25gbit`, `300mbit` or `12GB/s`, with an optional latency after `@`: `25gbit@8us`.

        The default latency is `alpha_us` (25 µs: TCP over Ethernet, assumed). Also accepted: `nvlink4` (a preset of
        link.py), `8x25gbit` (eight links), `100mbit:20mbit` (out and in), `25gbit@8us+2us` (2 µs per message), and
        `half-duplex` and `shared` at the end.
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
    """Parse a bandwidth (`300mbit`, `25gbit`, `12GB/s`) as GB/s."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-zA-Z/]+)\s*", text)
    unit = _GB_PER_S.get(match[2].lower()) if match else None
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if unit is None or not 0 < value < math.inf:
        raise BadOption(f"cannot read the bandwidth {shortened(text)!r}: write it like 300mbit, 25gbit or 12GB/s")
    return value * unit


def format_gbit(gb_per_s: float) -> str:
    """Format GB/s in network units: `25gbit`, `300mbit`."""
    gbit = gb_per_s * 8
    return f"{gbit:.4g}gbit" if gbit >= 1 else f"{gbit * 1e3:.4g}mbit"


def _preset(name: str) -> str:
    if name.lower() in LINK_PRESETS:
        return LINK_PRESETS[name.lower()].link
    close = difflib.get_close_matches(name.lower(), LINK_PRESETS, n=1)
    hint = f": did you mean {close[0]!r}?" if close else "."
    raise BadOption(
        f"cannot read the bandwidth {name!r}: write it like 300mbit, 25gbit or 12GB/s, or name a link{hint}\n"
        f"  The links are {', '.join(LINK_PRESETS)}."
    )


def _latency_us(text: str, whole: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*(us|µs|ms)\s*", text)
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        raise BadOption(f"cannot read the latency in {shortened(whole)!r}: write it like 25gbit@8us")
    return float(match[1]) * (1e3 if match[2] == "ms" else 1.0)
