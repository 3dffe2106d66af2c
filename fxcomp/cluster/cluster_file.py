"""Read a cluster from a TOML file.

    cluster = "8x4"                  # hosts x ranks per host, or "4+4+2"; or: placement = [0, 0, 1, 1, 1]
    intra = "nvlink4"                # a preset, or a bandwidth and latency
    inter = "2x25gbit@8us"

    [rack]                           # omit for a single switch
    hosts = 4                        # per rack, in order
    oversubscription = "4:1"         # or: link = "100gbit@10us"

For more tiers, write a `[[tier]]` for each instead of `[rack]`, from the hosts up, with `name`, `link` and `units`.
`units[i]` is the index of the unit that contains unit i of the tier below.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fxcomp.cluster.cluster import Cluster, Tier
from fxcomp.cluster.link import Link
from fxcomp.errors import BadOption

INTRA_ALPHA_US = 5.0  # assumed: ranks inside a host

_KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "a table"}

T = TypeVar("T")


def load_cluster(path: str | Path, *, intra: Link | None = None, inter: Link | None = None) -> Cluster:
    """Read the cluster file `path`; `intra` and `inter` override its links. Raises BadOption with file and key."""
    try:
        data = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise BadOption(f"cannot read the cluster {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not text, or not TOML
        raise BadOption(f"cannot read the cluster {path}: it is not TOML: {error}") from None
    return _File(str(path)).cluster(data, intra, inter)


def parse_ratio(text: str) -> float:
    """Read an oversubscription: `4:1`, `3:2` or `4`. Raises BadOption."""
    over, _, under = text.partition(":")
    try:
        ratio = float(over) / float(under or 1)
    except (ValueError, ZeroDivisionError):
        ratio = 0.0
    if not 0 < ratio < float("inf"):
        raise BadOption(f"cannot read the oversubscription {text!r}: write it like 4:1")
    return ratio


class _File:
    def __init__(self, path: str) -> None:
        self.path = path

    def cluster(self, data: Mapping[str, object], intra: Link | None, inter: Link | None) -> Cluster:
        self._check_keys("", data, ("cluster", "placement", "intra", "inter", "rack", "tier"))
        inside = intra or self._link(data, "intra", INTRA_ALPHA_US)
        between = inter or self._link(data, "inter", 25.0)
        if ("cluster" in data) == ("placement" in data):
            raise BadOption(
                f'{self.path}: write either cluster = "8x4", hosts x ranks per host, or placement = [0, 0, 1, 1], the'
                " host of each rank"
            )
        if "cluster" in data:
            text = self._of(str, "cluster", data["cluster"])
            if "," in text:
                raise BadOption(
                    f"{self.path}: cluster = {text!r} has more than hosts and ranks: write links as intra and inter,"
                    " which --intra and --inter override"
                )
            made = self._read("cluster", lambda: Cluster.parse(text, intra=inside, inter=between))
        else:
            hosts = self._numbers("placement", data["placement"])
            made = self._read("placement", lambda: Cluster.placed(hosts, intra=inside, inter=between))
        if "rack" in data and "tier" in data:
            raise BadOption(f"{self.path}: [rack] and [[tier]] describe the same racks: keep one")
        if made.above and ("rack" in data or "tier" in data):
            raise BadOption(f"{self.path}: cluster has racks already: leave [rack] or [[tier]] out")
        if "rack" in data:
            return self._in_racks(made, self._of(dict, "rack", data["rack"]))
        tiers = self._of(list, "tier", data.get("tier", []))
        if not tiers:
            return made
        above = tuple(self._tier(number, tier) for number, tier in enumerate(tiers))
        return self._read("tier", lambda: replace(made, above=above))

    def _in_racks(self, cluster: Cluster, rack: Mapping[str, object]) -> Cluster:
        self._check_keys("rack.", rack, ("hosts", "oversubscription", "link"))
        if "hosts" not in rack:
            raise BadOption(f"{self.path}: rack.hosts is missing: how many hosts a rack has, like hosts = 4")
        if "link" in rack and "oversubscription" in rack:
            raise BadOption(f"{self.path}: rack.link and rack.oversubscription both set the rack links: keep one")
        hosts = self._of(int, "rack.hosts", rack["hosts"])
        ratio = rack.get("oversubscription", "1:1")
        if not isinstance(ratio, int | float) or isinstance(ratio, bool):
            text = self._of(str, "rack.oversubscription", ratio)
            ratio = self._read("rack.oversubscription", lambda: parse_ratio(text))
        link = self._link(rack, "link", cluster.inter.alpha_us, "rack.") if "link" in rack else None
        return self._read("rack", lambda: cluster.with_racks(hosts, oversubscription=ratio, link=link))

    def _tier(self, number: int, tier: object) -> Tier:
        place = f"tier[{number}]."
        table = self._of(dict, place.rstrip("."), tier)
        self._check_keys(place, table, ("name", "link", "units"))
        for key in ("name", "units"):
            if key not in table:
                raise BadOption(f"{self.path}: {place}{key} is missing: a tier has name, link and units")
        name = self._of(str, f"{place}name", table["name"])
        return Tier(name, self._link(table, "link", 25.0, place), self._numbers(f"{place}units", table["units"]))

    def _link(self, table: Mapping[str, object], key: str, alpha_us: float, place: str = "") -> Link:
        if key not in table:
            raise BadOption(f'{self.path}: {place}{key} is missing: add a link, like {key} = "25gbit@8us"')
        text = self._of(str, f"{place}{key}", table[key])
        return self._read(f"{place}{key}", lambda: Link.parse(text, alpha_us=alpha_us))

    def _numbers(self, place: str, value: object) -> tuple[int, ...]:
        return tuple(self._of(int, f"{place}[{k}]", number) for k, number in enumerate(self._of(list, place, value)))

    def _of(self, kind: type, place: str, value: object) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadOption(f"{self.path}: {place} must be {_KINDS[kind]}, not {value!r}")
        return value

    def _read(self, place: str, make: Callable[[], T]) -> T:
        try:
            return make()
        except BadOption as error:
            raise BadOption(f"{self.path}: {place}: {error}") from None

    def _check_keys(self, place: str, table: Mapping[str, object], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise BadOption(f"{self.path}: there is no {place}{key}; {hint}It may have {', '.join(known)}.")
