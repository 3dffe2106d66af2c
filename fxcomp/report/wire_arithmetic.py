"""Compute what a plan sends: the size of each collective, its price as a formula, and the break-even bandwidth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import format_gbit
from fxcomp.compressors import parse_compressor
from fxcomp.cost.break_even import Compression, pays_at_gb_per_s
from fxcomp.cost.collectives import chosen_algorithm, pattern_of
from fxcomp.cost.table import CostTable
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Collective, Compress, Device, Propose, Strategy

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective of a bucket, with its size in bytes: one rank's part for a gather, else the whole."""

    step: Collective
    size: int


def sent_by(bucket: Bucket, cluster: Cluster, shapes: Shapes) -> list[Sent]:
    """List the collectives of a bucket, in order."""
    compressor = bucket.strategy.bound([shapes[name] for name in bucket.names], cluster)
    segments, payload = bucket.sizes, None
    found: list[Sent] = []
    for step in bucket.strategy.steps:
        if isinstance(step, Propose) and compressor is not None:
            payload = compressor.proposal_bytes(segments)
        elif isinstance(step, Compress) and compressor is not None:
            payload = compressor.payload_bytes(segments)
        elif isinstance(step, Collective):
            size = 4 * sum(segments) if payload is None else payload
            payload = None  # what follows a collective makes its own, or the tensor is dense again
            if step.kind is CollectiveKind.REDUCE_SCATTER:
                ranks = cluster.ranks_at(step.level)
                segments = tuple(-(-n // ranks) for n in segments)
                size = 4 * ranks * sum(segments)
            found.append(Sent(step, size))
    return found


def formula_lines(plan: Plan, costs: CostTable, cluster: Cluster, shapes: Shapes) -> list[tuple[str, str]]:
    """For each collective of a plan, give its name and the price of its largest use, as formula and numbers."""
    largest: dict[Collective, tuple[int, int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for sent in sent_by(bucket, cluster, shapes):
            if sent.size > largest.get(sent.step, (0, 0))[0]:
                largest[sent.step] = (sent.size, number)
    lines: list[tuple[str, str]] = []
    for step, (size, number) in largest.items():
        formula = costs.collective_formula(step.kind, step.level, size, cluster)
        algorithm, _, price = formula.removeprefix(f"{step.kind.value} ").partition(": ")
        lines.append((str(step), f"{algorithm} on {cluster.topology_at(step.level)}, bucket {number}: {price}"))
    return lines


def break_even_lines(plan: Plan, costs: CostTable, cluster: Cluster, shapes: Shapes) -> list[str]:
    """Say at which bandwidths compressing the largest bucket pays if compute hides nothing of it.

    The plan's own strategies are compared with dense; int8 if the plan compresses nothing.
    """
    if not plan.buckets or cluster.world_size == 1 or costs.collectives:
        return []
    bucket = max(plan.buckets, key=lambda bucket: bucket.elements)
    int8 = parse_compressor("int8")
    default = Strategy.hierarchical(int8) if cluster.has_levels else Strategy.flat(int8)
    used = [bucket.strategy for bucket in plan.buckets if not bucket.strategy.is_dense] or [default]
    # An agreement takes another collective, which the formula does not have.
    lines = [
        _break_even(bucket, strategy, costs, cluster, shapes)
        for strategy in dict.fromkeys(used)
        if strategy.compressor is not None and strategy.compressor.facts.agreement is None
    ]
    return list(dict.fromkeys(lines))


def _break_even(bucket: Bucket, strategy: Strategy, costs: CostTable, cluster: Cluster, shapes: Shapes) -> str:
    topology = cluster.topology_at(strategy.level)
    size = sent_by(Bucket(bucket.names, bucket.sizes, _dense(strategy)), cluster, shapes)[strategy.is_hierarchical].size
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
    low, high = (rate * _link_per_rank(cluster, strategy.level) for rate in found)
    if (low, high) == (0.0, math.inf):
        return f"{what} pays at every bandwidth {between}."
    return f"{what} pays {f'below {format_gbit(high)}' if low == 0.0 else f'above {format_gbit(low)}'} {between}."


def compression_of(
    bucket: Bucket, strategy: Strategy, costs: CostTable, cluster: Cluster, shapes: Shapes
) -> Compression:
    """Express in the break-even formula's terms what a strategy does to a bucket, or to a rank's shard of it."""
    compressor = strategy.bound([shapes[name] for name in bucket.names], cluster)
    assert compressor is not None, "a dense strategy compresses nothing"
    device = strategy.device or Device.GPU
    shards = cluster.ranks_per_host if strategy.is_hierarchical else 1
    segments = tuple(-(-size // shards) for size in bucket.sizes)
    elements = sum(segments)
    decoded = 1 if compressor.is_linear else cluster.ranks_at(strategy.level)
    us = costs.encode_us(compressor, elements, device) + costs.decode_us(compressor, elements, decoded, device)
    return Compression(
        rate=4 * elements / compressor.payload_bytes(segments),
        us_per_byte=us / (4 * elements),
        kind=CollectiveKind.ALL_REDUCE if compressor.is_linear else CollectiveKind.ALL_GATHER,
    )


def _dense(strategy: Strategy) -> Strategy:
    """The dense strategy at the same levels."""
    return Strategy.hierarchical(None) if strategy.is_hierarchical else Strategy.flat(None)


def _link_per_rank(cluster: Cluster, level: Level) -> float:
    """GB/s of the link between hosts per GB/s that one rank of a ring gets, where that link is the slowest."""
    way = pattern_of(CollectiveKind.ALL_REDUCE)
    if cluster.hosts == 1:
        return cluster.intra.gb_per_s / cluster.topology_at(level).gb_per_s(way)
    slow = cluster.intra.both_ways_gb_per_s * 1e-6
    return slow / cluster.with_inter(slow).topology_at(level).gb_per_s(way)
