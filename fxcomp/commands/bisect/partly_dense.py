"""Put some tensors of a plan dense; all others travel as before."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from fxcomp.plan.plan import Bucket, ExchangePoint, Plan


def compressed_names(plan: Plan) -> list[str]:
    """Name the parameters of which some part is compressed, in the order in which they leave."""
    names = (name for bucket in plan.buckets if not bucket.strategy.is_dense for name in bucket.names)
    return list(dict.fromkeys(names))


def partly_dense(plan: Plan, names: Collection[str]) -> Plan:
    """Split each bucket that holds some of these parameters: they go dense, over the same levels, ahead of the rest.

    A compressor sees each tensor of a bucket by itself, so the rest is compressed as before.
    """
    return Plan(tuple(part for bucket in plan.buckets for part in _split(bucket, names)))


def _split(bucket: Bucket, names: Collection[str]) -> Iterator[Bucket]:
    if bucket.strategy.is_dense and bucket.at is ExchangePoint.GRADIENT:
        yield bucket
        return
    dense = [k for k, name in enumerate(bucket.names) if name in names]
    if dense:
        yield replace(_some(bucket, dense), strategy=bucket.strategy.uncompressed, at=ExchangePoint.GRADIENT)
    if len(dense) < len(bucket.names):
        yield _some(bucket, [k for k in range(len(bucket.names)) if k not in dense])


def _some(bucket: Bucket, which: Sequence[int]) -> Bucket:
    columns = ([values[k] for k in which] for values in (bucket.names, bucket.sizes, bucket.starts))
    names, sizes, starts = (tuple(column) for column in columns)
    return replace(bucket, names=names, sizes=sizes, starts=starts)
