"""Attribute a plan's error to layers: one row each, with its strategy, size, error and saving on the wire.

    spent = squares * error                     of a gradient or a part of one; a share of the whole gradient's squares
    saved = wire time dense - wire time         of a bucket, shared out by elements

A *layer* here is all gradients with like names (`blocks.*.up.weight`) and one strategy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from fxcomp.plan.plan import Bucket
from fxcomp.plan.strategy import Strategy
from fxcomp.report.explanation import Explanation
from fxcomp.report.wire_arithmetic import sent_by
from fxcomp.search.losses import Losses


@dataclass(frozen=True, slots=True)
class Row:
    """Sums over gradients or parts of gradients."""

    name: str
    names: tuple[str, ...]
    buckets: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    """A layer has one."""
    is_pinned: bool
    dense_bytes: int
    sent_bytes: float
    """The share of the bytes that a rank sends of the buckets."""
    squares: float
    """The share of the whole gradient's squares."""
    spent: float
    saved_us: float

    @property
    def title(self) -> str:
        return self.name if len(self.names) == 1 else f"{self.name} ({len(self.names)})"

    @property
    def error(self) -> float | None:
        """The relative squared error of its own; None where it has no squares."""
        return self.spent / self.squares if self.squares > 0 else None


def layers_of(explanation: Explanation) -> list[Row]:
    """Return the layers, sorted by their share of the error, largest first."""
    rows = _grouped(_parts(explanation), lambda part: (alike(part.name), part.strategies, part.is_pinned))
    layers = [replace(row, name=alike(row.name)) if len(row.names) > 1 else row for row in rows]
    return sorted(layers, key=lambda row: (-row.spent, -row.saved_us, -row.dense_bytes))


def gradients_of(explanation: Explanation) -> list[Row]:
    """List the gradients in the plan's order."""
    return _grouped(_parts(explanation), lambda part: part.name)


def alike(name: str) -> str:
    """Leave numbers out of a name: `blocks.*.up.weight`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def summed(name: str, rows: Sequence[Row]) -> Row:
    """Add rows up."""
    return Row(
        name,
        tuple(dict.fromkeys(each for row in rows for each in row.names)),
        tuple(dict.fromkeys(each for row in rows for each in row.buckets)),
        tuple(dict.fromkeys(each for row in rows for each in row.strategies)),
        all(row.is_pinned for row in rows),
        sum(row.dense_bytes for row in rows),
        sum(row.sent_bytes for row in rows),
        sum(row.squares for row in rows),
        sum(row.spent for row in rows),
        sum(row.saved_us for row in rows),
    )


def _grouped(parts: Sequence[Row], key: Callable[[Row], Hashable]) -> list[Row]:
    groups: dict[Hashable, list[Row]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return [summed(group[0].name, group) for group in groups.values()]


def _parts(explanation: Explanation) -> list[Row]:
    """List the elements of each gradient in each bucket."""
    workload, plan, sizes = explanation.workload, explanation.plan, explanation.plan.sizes
    losses = Losses(workload.gradients, explanation.cluster, explanation.errors)
    places = {gradient.name: place for place, gradient in enumerate(workload.gradients)}
    parts: list[Row] = []
    for k, bucket in enumerate(plan.buckets):
        errors, strategies = losses.errors(bucket.strategy), (bucket.strategy,)
        dense = replace(bucket, strategy=bucket.strategy.uncompressed)
        saved_us = _wire_us(dense, explanation) - _wire_us(bucket, explanation)
        sent_bytes = explanation.sent_bytes(bucket)
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            place, share = places[name], size / max(1, bucket.elements)
            squares = float(losses.weights[place]) * size / max(1, sizes[name]) / max(1, losses.elements)
            pinned, dense_bytes = explanation.pins.rule_for(name) is not None, bucket.element_type.itemsize * size
            whole = (dense_bytes, sent_bytes * share, squares, squares * float(errors[place]), saved_us * share)
            parts.append(Row(name, (name,), (k,), strategies, pinned, *whole))
    return parts


def _wire_us(bucket: Bucket, explanation: Explanation) -> float:
    costs, cluster = explanation.costs, explanation.cluster
    sent = sent_by(bucket, cluster, explanation.workload.shapes)
    return sum(costs.collective(part.send.kind, part.send.level, part.size, cluster).us for part in sent)
