"""Lay out what a rank keeps from step to step, by plan and cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxcomp.cluster.cluster import Cluster
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Device
from fxcomp.runtime.arena import BucketLayout
from fxcomp.runtime.compressor_states import StateLayout


def residual_layout(
    plan: Plan, cluster: Cluster, rank: int, feedback: ErrorFeedback = CLASSIC
) -> dict[int, BucketLayout]:
    """Lay out residuals, for each bucket that is fed back: the rest needs none."""
    found: dict[int, BucketLayout] = {}
    for number, bucket in enumerate(plan.buckets):
        bound = bucket.strategy.bound([(size,) for size in bucket.sizes], cluster)
        if bound is not None and feedback.surrounds(bound):
            found[number] = _bucket_layout(bucket, cluster, rank)
    return found


def velocity_layout(plan: Plan, cluster: Cluster, rank: int) -> dict[int, BucketLayout]:
    """Lay out velocities: every bucket has some."""
    return {number: _bucket_layout(bucket, cluster, rank) for number, bucket in enumerate(plan.buckets)}


def state_layout(
    plan: Plan, shapes: Mapping[str, Sequence[int]], cluster: Cluster, rank: int
) -> dict[int, StateLayout]:
    """Lay out what compressors remember, for each bucket whose compressor remembers something."""
    layout: dict[int, StateLayout] = {}
    for number, bucket in enumerate(plan.buckets):
        compressor = bucket.strategy.compressor
        if compressor is None or not compressor.has_state:
            continue
        shards, shard = shard_of(bucket, cluster, rank)
        segments = bucket.segments(shards, shard)
        level, whole = bucket.strategy.level, [shapes[name] for name in bucket.names]
        if bucket.strategy.is_hierarchical:
            whole = [(size,) for _, size in segments]
        bound = compressor.bound_to(whole, cluster.ranks_at(level))
        place = cluster.group(level, rank).index(rank)
        layout[number] = StateLayout(bound, segments, place, shard, bucket.strategy.device is Device.CPU)
    return layout


def shard_of(bucket: Bucket, cluster: Cluster, rank: int) -> tuple[int, int]:
    """Count the shards that a bucket is cut into, and say which is this rank's."""
    return (cluster.ranks_per_host, cluster.local_rank(rank)) if bucket.strategy.is_hierarchical else (1, 0)


def _bucket_layout(bucket: Bucket, cluster: Cluster, rank: int) -> BucketLayout:
    """Take all of a bucket, or this rank's shard where a host's ranks share the work."""
    shards, shard = shard_of(bucket, cluster, rank)
    compressor = bucket.strategy.compressor
    is_summed = compressor is None or compressor.is_linear
    return BucketLayout(
        bucket.names,
        bucket.sizes,
        shards,
        shard,
        on_host=bucket.strategy.device is Device.CPU,
        divisor=cluster.ranks_at(bucket.strategy.level) if is_summed else 1,
    )
