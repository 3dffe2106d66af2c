"""Draw what ranks hold after each step of a strategy, and count what travels.

                          a         b         c         d           rank  uplink
gradients                 a  ████   b  ████   c  ████   d  ████
reduce_scatter@intra      ab ██··   ab ··██   cd ██··   cd ··██     0.50    0.00
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from string import ascii_lowercase

import torch
from helpers.strategy_meaning import Holding, Slot, holdings_of, meaning

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cost.collectives import CANDIDATES, Library, steps
from fxcomp.plan.budget import strategy_error
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.legs import Send
from fxcomp.plan.lines import lines_of, sent
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Collective, Strategy

SHAPE = (1024, 1024)
ELEMENTS = math.prod(SHAPE)
DENSE_BYTES = 4 * ELEMENTS

MOST_COLUMNS = 4
"""Of more ranks the first few are drawn."""

Traffic = tuple[float, float]
"""The traffic of the busiest rank and the busiest uplink in a step, in shares of the dense bytes."""


def cluster_of(shape: str) -> Cluster:
    """Make a cluster of this shape; its links do not matter here."""
    return Cluster.parse(f"{shape}, inter 1gbit, intra 10gbit")


def names_of(ranks: Iterable[int]) -> str:
    """Call ranks a, b, c, ..."""
    return "".join(ascii_lowercase[rank] for rank in ranks)


def picture(strategy: Strategy, cluster: Cluster) -> str:
    """Draw one strategy on one cluster, with what travels, how long, and what is lost."""
    lines = [str(strategy), "", *_table(strategy, cluster), "", *_summary(strategy, cluster)]
    return "\n".join(line.rstrip() for line in lines)


def _table(strategy: Strategy, cluster: Cluster) -> list[str]:
    ranks = range(min(cluster.world_size, MOST_COLUMNS))
    held = holdings_of(strategy, [(1,)] * cluster.world_size, cluster)  # a shard is a parameter
    name_width = max(len(_name(holdings[rank])) for holdings in held for rank in ranks)
    drawn = [
        [f"{_name(holdings[rank]):<{name_width}} {_bar(holdings[rank], cluster.world_size)}" for rank in ranks]
        for holdings in held
    ]
    labels = ["gradients", *map(str, strategy.steps)]
    width = name_width + 1 + cluster.world_size
    first = max(map(len, labels))
    hosts = [f"host {cluster.placement[rank]}" if cluster.local_rank(rank) == 0 else "" for rank in ranks]
    lines = [
        _line("", hosts, first, width, ("", "")),
        _line("", [names_of([rank]) for rank in ranks], first, width, ("rank", "uplink")),
    ]
    traffic = iter(traffic_of(strategy, cluster))
    for number, (label, cells) in enumerate(zip(labels, drawn, strict=True)):
        sends = number > 0 and isinstance(strategy.steps[number - 1], Collective)
        numbers = tuple(f"{share:.2f}" for share in next(traffic)) if sends else ("", "")
        lines.append(_line(label, cells, first, width, numbers))
    return lines


def _line(label: str, cells: Sequence[str], first: int, width: int, numbers: Sequence[str]) -> str:
    return "  ".join([f"{label:<{first}}", *(f"{cell:<{width}}" for cell in cells), *(f"{n:>6}" for n in numbers)])


def _name(holding: Holding) -> str:
    """Name whose gradients are in the values, or in each of the payloads of one piece."""
    if holding.values is not None:
        return names_of(holding.inside)
    piece = holding.payloads[0].piece if holding.payloads else None
    return ",".join(names_of(payload.inside) for payload in holding.payloads if payload.piece == piece)


def _bar(holding: Holding, size: int) -> str:
    full = "█" if holding.values is not None else "▒"
    return "".join(full if place in holding.extent else "·" for place in range(size))


def traffic_of(strategy: Strategy, cluster: Cluster) -> list[Traffic]:
    """Count what each collective sends: directly from rank to rank, an all_reduce in a ring."""
    lines = [sent(lines_of(route_of(strategy, [SHAPE], cluster, rank))) for rank in range(cluster.world_size)]
    return [
        _traffic([line.send for line in of_ranks], [line.size for line in of_ranks], cluster)
        for of_ranks in zip(*lines, strict=True)
    ]


def _traffic(sends: Sequence[Send], held: Sequence[int], cluster: Cluster) -> Traffic:
    by_rank: Counter[int] = Counter()
    by_host: Counter[int] = Counter()
    hosts = cluster.placement
    for rank, (leg, size) in enumerate(zip(sends, held, strict=True)):
        group = cluster.group(leg.level, rank)
        for other, bytes_sent in zip(group, _sent_to(leg, len(group), size), strict=True):
            by_rank[rank] += bytes_sent
            by_host[hosts[rank]] += bytes_sent if hosts[other] != hosts[rank] else 0
    return max(by_rank.values()) / DENSE_BYTES, max(by_host.values()) / DENSE_BYTES


def _sent_to(leg: Send, ranks: int, held: int) -> list[int]:
    """Count the bytes that this rank sends to each rank of its group."""
    place, everybody = leg.place, range(ranks)
    match leg.kind:
        case CollectiveKind.ALL_REDUCE:
            following = (place + 1) % ranks
            return [2 * (ranks - 1) * held // ranks if other == following else 0 for other in everybody]
        case kind if kind.splits and not kind.is_rooted:
            return [part * leg.itemsize if other != place else 0 for other, part in enumerate(leg.parts)]
        case kind if kind.splits:
            return [held if other == 0 != place else 0 for other in everybody]
        case _:
            sends = place == 0 or leg.kind is not CollectiveKind.BROADCAST
            return [held if sends and other != place else 0 for other in everybody]


def _summary(strategy: Strategy, cluster: Cluster) -> list[str]:
    traffic = traffic_of(strategy, cluster)
    rank, uplink = (sum(column) for column in zip(*traffic, strict=True))
    inside = sum(_latencies(step, cluster) for step in strategy.collectives if step.level is Level.INTRA)
    between = sum(_latencies(step, cluster) for step in strategy.collectives if step.level is not Level.INTRA)
    error = strategy_error(strategy, cluster)
    latencies = f"{inside} inside hosts, {between} between"
    lines = [f"in all: rank {rank:.2f}, uplink {uplink:.2f}; latencies: {latencies}; error {error:.2g}"]
    size = cluster.world_size
    slots = meaning(strategy, [(1,)] * size, cluster, [torch.zeros(size)] * size).slots
    lines += [
        f"slot {number}, {compressor}: {_kept(slot, size)}"
        for number, (slot, compressor) in enumerate(zip(slots, strategy.compressors, strict=True))
    ]
    return lines


def _latencies(step: Collective, cluster: Cluster) -> int:
    ranks = cluster.ranks_at(step.level)
    return round(steps(step.kind, ranks, CANDIDATES[Library.GLOO][step.kind][0])) if ranks > 1 else 0


def _kept(slot: Slot, size: int) -> str:
    """Say what the first rank keeps, as all do that compress."""
    inside, share = slot.insides[0], Fraction(len(slot.extents[0]), size)
    unit = sum(inside.values())
    if len(inside) == 1:
        what = "its own gradient"
    else:
        what = "the mean" if len(inside) == size else f"the mean of {len(inside)} gradients"
    parts = f"{share} of " if share != 1 else ""
    scaled = f", times {unit}" if unit != 1 else ""
    holders = sum(1 for extent in slot.extents if extent)
    where = (
        "every rank keeps" if holders == size else f"{holders} ranks keep" if holders > 1 else "the first rank keeps"
    )
    return f"{where} the residual of {parts}{what}{scaled}; weight {slot.weights[0]}"
