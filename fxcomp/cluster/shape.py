"""Write and read how many ranks sit where: `8x4`, `3+2` if hosts differ, `2x4x8` with racks in front."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fxcomp.cluster.limits import check_ranks, parse_digits, shortened
from fxcomp.cluster.link import Link
from fxcomp.errors import BadCluster


def shape_text(hosts_of_ranks: Iterable[int], units_above: Sequence[Sequence[int]]) -> str:
    """Write the shape of ranks on these hosts; `units_above` says for each tier where every unit below it is."""
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
    """Join units side by side: `4x1` if they are alike, else `3+2`, largest first."""
    counts = Counter(texts)
    ordered = sorted(counts, key=lambda text: (int(text) if text.isdigit() else 0, text), reverse=True)
    if len(ordered) == 1:
        (text,) = ordered
        return f"{counts[text]}x{f'({text})' if '+' in text else text}"
    parts = {text: text if text.isdigit() else f"({text})" for text in ordered}
    return "+".join(f"{counts[text]}x{part}" if counts[text] > 1 else part for text, part in parts.items())


def parse_shape(text: str) -> tuple[int, list[int]]:
    """Read the number of racks, and how many ranks each host has. Raises BadCluster."""
    even = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*(\d+)", text)
    if even is not None:
        racks, hosts, ranks = parse_digits(even[1] or "1"), parse_digits(even[2]), parse_digits(even[3])
        if racks < 1 or hosts < 1 or ranks < 1:
            raise BadCluster(f"a cluster needs at least 1 host and 1 rank a host, not {text}")
        check_ranks(racks * hosts * ranks)
        return racks, [ranks] * (racks * hosts)
    sizes: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", part)
        if match is None or "+" not in text or parse_digits(match[2]) < 1:
            raise BadCluster(
                f"cannot read the cluster {shortened(text)!r}: write hosts x ranks per host, like 8x4, or 4+4+2 if"
                " hosts differ"
            )
        count, size = parse_digits(match[1] or "1"), parse_digits(match[2])
        check_ranks(sum(sizes) + count * size)
        sizes += [size] * count
    return 1, sizes


def parse_clauses(text: str) -> tuple[str, dict[str, Link], tuple[int, ...]]:
    """Read a cluster's text as its shape, its links by name, and the host of each rank if given. Raises BadCluster."""
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
            raise BadCluster(
                f"cannot read {clause!r} in the cluster {text!r}: after the hosts write inter, intra or rack with"
                " a link, or placed with the host of each rank, like: 2x2, inter 25gbit, placed 0 1 1 0"
            )
    return shape, links, placement
