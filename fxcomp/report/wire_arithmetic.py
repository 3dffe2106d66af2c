"""Compute the sizes of a plan's collectives, their prices as formulas, and the break-even bandwidth.

Below that bandwidth B, compressing an exposed bucket is faster than sending it dense:

    saved(B) = dense(n) - compressed(n / r) - c n         µs for n bytes; collectives' formulas give the first two terms

r is dense bytes per byte sent, c the compressor's µs per dense byte. saved is linear in 1/B: it has at most one root.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import format_gbit
from fxcomp.compressors import parse_compressor
from fxcomp.cost.collectives import Algorithm, chosen_algorithm, counts, pattern_of
from fxcomp.cost.table import CostTable, collective_formula
from fxcomp.plan.interpret import Standing
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.legs import Decode, Encode
from fxcomp.plan.lines import BucketLine, lines_of, sent
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Collective, Decompress, Step, Strategy

Between = tuple[float, float]
"""Bounds of an open interval."""


@dataclass(frozen=True, slots=True)
class Compression:
    """Formula parameters: `rate` in dense bytes per byte sent, `us_per_byte` in compressor µs per dense byte."""

    rate: float
    us_per_byte: float
    kind: CollectiveKind = CollectiveKind.ALL_GATHER
    """Collective of the payloads."""
    all_reduce: Algorithm = Algorithm.RING
    algorithm: Algorithm = Algorithm.RING


def pays_at_gb_per_s(
    compression: Compression, ranks: int, size: float, alpha_us: float, message_us: float = 0.0
) -> Between | None:
    """Return the range of bandwidths per rank, in GB/s, in which compressing `size` dense bytes is faster, or None."""
    dense = counts(CollectiveKind.ALL_REDUCE, ranks, compression.all_reduce)
    sent = counts(compression.kind, ranks, compression.algorithm)
    fewer_bytes = size * (dense[2] - sent[2] / compression.rate)
    us = (dense[0] - sent[0]) * alpha_us + (dense[1] - sent[1]) * message_us - compression.us_per_byte * size
    root = -fewer_bytes / us / 1e3 if us else math.nan  # where fewer_bytes / B + us = 0
    if not 0 < root < math.inf:
        return (0.0, math.inf) if fewer_bytes + us > 0 else None
    return (0.0, root) if fewer_bytes > 0 else (root, math.inf)


Shapes = Mapping[str, Sequence[int]]


def sent_by(bucket: Bucket, cluster: Cluster, shapes: Shapes, rank: int = 0) -> list[BucketLine]:
    """Return a bucket's collectives on one rank, in order."""
    return sent(lines_of(route_of(bucket.strategy, bucket.shapes(shapes), cluster, rank, bucket.element_type)))


def formula_lines(plan: Plan, costs: CostTable, cluster: Cluster, shapes: Shapes) -> list[tuple[str, str]]:
    """Return each collective's name, and its largest transfer's price as a formula with numbers."""
    largest: dict[Collective, tuple[int, int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for line in sent_by(bucket, cluster, shapes):
            step = Collective(line.send.kind, line.send.level)
            if line.size > largest.get(step, (0, 0))[0]:
                largest[step] = (line.size, number)
    lines: list[tuple[str, str]] = []
    for step, (size, number) in largest.items():
        formula = collective_formula(costs, step.kind, step.level, size, cluster)
        algorithm, _, price = formula.removeprefix(f"{step.kind.value} ").partition(": ")
        lines.append((str(step), f"{algorithm} on {cluster.topology_at(step.level)}, bucket {number}: {price}"))
    return lines


def break_even_lines(plan: Plan, costs: CostTable, cluster: Cluster, shapes: Shapes) -> list[str]:
    """Describe the bandwidths at which each strategy pays on the largest bucket, if the bucket is exposed.

    For a dense plan, the strategy is int8.
    """
    if not plan.buckets or cluster.world_size == 1 or costs.collectives:
        return []
    bucket = max(plan.buckets, key=lambda bucket: bucket.elements)
    int8 = parse_compressor("int8")
    default = Strategy.hierarchical(int8) if cluster.has_levels else Strategy.flat(int8)
    used = [bucket.strategy for bucket in plan.buckets if not bucket.strategy.is_dense] or [default]
    # The formula lacks the extra collective of compressors with an agreement.
    lines = [
        _break_even(bucket, strategy, costs, cluster, shapes)
        for strategy in dict.fromkeys(used)
        if _is_one_shot(strategy)
    ]
    return list(dict.fromkeys(lines))


def _is_one_shot(strategy: Strategy) -> bool:
    """Return True if a strategy compresses once, for one collective."""
    if len(strategy.compressors) != 1 or strategy.compressors[0].facts.agreement is not None:
        return False
    return sum(held.compressor is not None and not isinstance(step, Decompress) for held, step in _walk(strategy)) == 1


def _walk(strategy: Strategy) -> list[tuple[Standing, Step]]:
    return list(zip(strategy.held, strategy.steps, strict=False))


def _level(strategy: Strategy) -> Level:
    return next(step.level for held, step in _walk(strategy) if held.compressor and isinstance(step, Collective))


def _break_even(bucket: Bucket, strategy: Strategy, costs: CostTable, cluster: Cluster, shapes: Shapes) -> str:
    topology = cluster.topology_at(_level(strategy))
    dense = sent_by(replace(bucket, strategy=strategy.uncompressed), cluster, shapes)
    size = next(line.size for line in dense if line.send.kind is CollectiveKind.ALL_REDUCE)
    ways = {
        kind: chosen_algorithm(kind, size, topology, costs.library)
        for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
    }
    compression = compression_of(bucket, strategy, costs, cluster, shapes)
    compression = replace(compression, all_reduce=ways[CollectiveKind.ALL_REDUCE], algorithm=ways[compression.kind])
    found = pays_at_gb_per_s(compression, topology.ranks, size, topology.alpha_us, topology.message_us)
    by_level = " by level" if strategy.is_hierarchical else ""
    what = f"{strategy.compressor}{by_level} on an exposed bucket of {bucket.dense_bytes / 1e6:.3g} MB"
    between = "between hosts" if cluster.hosts > 1 else "inside the host"
    if found is None:
        return f"{what} pays at no bandwidth {between}."
    low, high = (rate * _link_per_rank(cluster, _level(strategy)) for rate in found)
    if (low, high) == (0.0, math.inf):
        return f"{what} pays at every bandwidth {between}."
    return f"{what} pays {f'below {format_gbit(high)}' if low == 0.0 else f'above {format_gbit(low)}'} {between}."


def compression_of(
    bucket: Bucket, strategy: Strategy, costs: CostTable, cluster: Cluster, shapes: Shapes
) -> Compression:
    """Return the formula's parameters for the part of a bucket that one rank compresses."""
    legs = route_of(strategy, bucket.shapes(shapes), cluster, element_type=bucket.element_type).legs
    encode = next(leg for leg in legs if isinstance(leg, Encode))
    decode = next(leg for leg in legs if isinstance(leg, Decode))
    compressor, elements = encode.compressor, encode.elements
    dense_bytes = bucket.element_type.itemsize * elements
    us = costs.encode_us(compressor, elements, encode.device)
    us += costs.decode_us(compressor, elements, decode.payloads, decode.device)
    return Compression(
        rate=dense_bytes / (encode.payload_elements * compressor.payload_dtype.itemsize),
        us_per_byte=us / dense_bytes,
        kind=CollectiveKind.ALL_REDUCE if compressor.is_linear else CollectiveKind.ALL_GATHER,
    )


def _link_per_rank(cluster: Cluster, level: Level) -> float:
    """Return bandwidth of a ring's limiting link / bandwidth per rank.

    With several hosts, this link is between hosts.
    """
    way = pattern_of(CollectiveKind.ALL_REDUCE)
    if cluster.hosts == 1:
        return cluster.intra.gb_per_s / cluster.topology_at(level).gb_per_s(way)
    slow = cluster.intra.both_ways_gb_per_s * 1e-6
    return slow / cluster.with_inter(slow).topology_at(level).gb_per_s(way)
