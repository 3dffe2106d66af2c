"""Keep some tensors of a plan dense, and write the changed setting as Python.

given                      written
within="balanced"          the same, and pins={"lm_head.weight": "dense"} after the user's pins
plan="int8", saved         plan="mended.json"
plan="int8"                pins={"*": "int8", "lm_head.weight": "dense"}, or plan="dense"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from fxcomp.plan.budget import ErrorBudget
from fxcomp.plan.compress import Compress, Warmup
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.given import is_path
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan


def compressed_names(plan: Plan) -> list[str]:
    """Return the parameters with a compressed part, in sending order."""
    names = (name for bucket in plan.buckets if not bucket.strategy.is_dense for name in bucket.names)
    return list(dict.fromkeys(names))


def partly_dense(plan: Plan, names: Collection[str]) -> Plan:
    """Return a plan in which these parameters are dense and precede the rest of their buckets.

    The rest is compressed as before, because a compressor treats each tensor separately.
    """
    return Plan(tuple(part for bucket in plan.buckets for part in _split(bucket, names)))


def _split(bucket: Bucket, names: Collection[str]) -> Iterator[Bucket]:
    if bucket.strategy.is_dense and bucket.at is ExchangePoint.GRADIENT:
        yield bucket
        return
    dense = [k for k, name in enumerate(bucket.names) if name in names]
    rest = [k for k, name in enumerate(bucket.names) if name not in names]
    if dense:
        yield replace(_some(bucket, dense), strategy=bucket.strategy.uncompressed, at=ExchangePoint.GRADIENT)
    if rest:
        yield _some(bucket, rest)


def _some(bucket: Bucket, which: Sequence[int]) -> Bucket:
    columns = ([values[k] for k in which] for values in (bucket.names, bucket.sizes, bucket.starts))
    names, sizes, starts = (tuple(column) for column in columns)
    return replace(bucket, names=names, sizes=sizes, starts=starts)


def mended(compress: Compress, names: Sequence[str], plan: Plan, saved: str | None) -> Compress | None:
    """Return the setting that gives `plan`, in which `names` are dense; None if only a saved plan can express it."""
    if compress.plan is None:
        return replace(compress, pins=_after(compress.pins, names, plan.sizes))
    if saved is not None:
        return replace(compress, plan=saved)
    if plan.is_dense:
        return replace(compress, plan="dense")
    pins = _pins_of(plan, compress.plan)
    return None if pins is None else replace(compress, plan=None, pins=pins)


def _after(pins: Mapping[str, Any], names: Sequence[str], trained: Collection[str]) -> dict[str, str]:
    """Append dense pins for `names`, so that they take precedence, and drop pins without effect."""
    merged = {pattern: str(value) for pattern, value in pins.items() if pattern not in names}
    merged |= dict.fromkeys(names, "dense")
    deciding = Pins.read(merged).decided(trained)
    return {rule.pattern: merged[rule.pattern] for rule in deciding}


def _pins_of(plan: Plan, given: Any) -> dict[str, str] | None:
    """Return a pin per parameter; None if a parameter has several strategies."""
    uniform = given if isinstance(given, str) and not is_path(given) else None
    ways: dict[str, str] = {}
    for bucket in plan.buckets:
        way = "dense" if bucket.strategy.is_dense else uniform or str(bucket.strategy)
        for name in bucket.names:
            if ways.setdefault(name, way) != way:
                return None
    usual = Counter(ways.values()).most_common(1)[0][0]
    return {"*": usual} | {name: way for name, way in ways.items() if way != usual}


def written(value: Any) -> str:
    """Return a setting or value as Python source; options at their default are left out."""
    match value:
        case Compress() | ErrorFeedback() | Warmup():
            default = type(value)()
            given = {field.name: getattr(value, field.name) for field in fields(value)}
            changed = [f"{name}={written(of)}" for name, of in given.items() if of != getattr(default, name)]
            return f"fxcomp.{type(value).__name__}({', '.join(changed)})"
        case ErrorBudget():
            return f"fxcomp.like({value.text!r})" if value.is_uniform else repr(value.text)
        case Mapping():
            pins = cast("Mapping[str, Any]", value)
            return repr({pattern: str(way) for pattern, way in pins.items()})
        case Path():
            return repr(str(value))
        case _:
            return repr(value)
