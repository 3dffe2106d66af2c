"""List strategy, bytes, error and saved wire time of a plan by layer.

    spent = squares * error                     of a gradient or part, as a fraction of all gradients' squares
    saved = dense wire time - wire time         of a bucket, distributed over its gradients by elements

A *layer* is a group of gradients whose names differ only in numbers (`blocks.*.up.weight`), with one strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from fxcomp.graph.info import alike
from fxcomp.plan.budget import Budget
from fxcomp.plan.plan import Bucket
from fxcomp.plan.strategy import Strategy
from fxcomp.report.document import Block, Section, Table, count, decimals, mb
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
    """A layer has one strategy, a gradient may have several."""
    is_pinned: bool
    dense_bytes: int
    sent_bytes: float
    """Bytes that a rank sends."""
    squares: float
    """Sum of squares, as a fraction of all gradients' sum."""
    spent: float
    saved_us: float

    @property
    def title(self) -> str:
        return self.name if len(self.names) == 1 else f"{self.name} ({len(self.names)})"

    @property
    def error(self) -> float | None:
        """Squared error relative to the row's squares; None if the squares are zero."""
        return self.spent / self.squares if self.squares > 0 else None


def layers_of(explanation: Explanation) -> list[Row]:
    """Return the layers, largest error first."""
    rows = _grouped(_parts(explanation), lambda part: (alike(part.name), part.strategies, part.is_pinned))
    layers = [replace(row, name=alike(row.name)) if len(row.names) > 1 else row for row in rows]
    return sorted(layers, key=lambda row: (-row.spent, -row.saved_us, -row.dense_bytes))


def gradients_of(explanation: Explanation) -> list[Row]:
    """Return the gradients, in the plan's order."""
    return _grouped(_parts(explanation), lambda part: part.name)


def summed(name: str, rows: Sequence[Row]) -> Row:
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


_FEW, _MOST_LAYERS = 8, 24
_SMALL = 0.01  # fraction of squares and of saved time below which a layer without error has no row
_SPENT = 0.0005  # fraction of the budget up to which an error counts as none
_SHARES = "Shares of the gradient's squares and of the budget, and ms on the wire saved over dense."


def error_sections(explanation: Explanation, budget: Budget) -> list[Section]:
    """Compare the plan's error with the budget, and list error and saved time by layer."""
    blocks: list[Block] = [_spent(explanation, budget), _source(explanation)]
    shown, rest = _split(layers_of(explanation), explanation)
    return [
        Section("Error", blocks),
        Section("By layer", [_SHARES, _by_layer(shown, rest, explanation)]),
    ]


def _spent(explanation: Explanation, budget: Budget) -> str:
    allowed, spent, asked = explanation.allowed or 0.0, explanation.spent, budget.asked
    what = f"as {asked.text} everywhere" if asked.is_uniform else f"as asked by {asked}"
    share = f", {spent / allowed:.1%} of it" if allowed else ""
    return f"A plan may lose {allowed:.3g} of the gradient's square, {what}; this one loses {spent:.3g}{share}."


def _source(explanation: Explanation) -> str:
    errors = explanation.errors
    if not errors.is_measured:
        return "Errors are assumed as for Gaussian values: nothing is measured."
    names = explanation.workload.sizes
    assumed = [name for name in names if name not in errors.rows or not errors.rows[name].samples]
    known = f"{len(names) - len(assumed)} of {count(len(names), 'gradient')}" if assumed else "every gradient"
    some = ", ".join(assumed[:_FEW]) + (", ..." if len(assumed) > _FEW else "")
    rest = f"; for the others, Gaussian values are assumed ({some})" if assumed else ""
    return f"Errors of {known} were measured in training, in {count(errors.looks, 'look')}{rest}."


def _split(layers: Sequence[Row], explanation: Explanation) -> tuple[list[Row], list[Row]]:
    budget = explanation.allowed or 0.0
    saved_us = sum(layer.saved_us for layer in layers)

    def counts(layer: Row) -> bool:
        is_small = layer.squares < _SMALL and layer.saved_us <= _SMALL * saved_us
        return layer.spent > _SPENT * budget or not is_small

    few = len(layers) <= _FEW
    shown = [layer for layer in layers if few or counts(layer)][:_MOST_LAYERS]
    return shown, [layer for layer in layers if layer not in shown]


def _by_layer(layers: Sequence[Row], rest: Sequence[Row], explanation: Explanation) -> Table:
    digits, allowed = decimals(explanation.step_us), explanation.allowed or 0.0
    others = [summed(count(len(rest), "other layer"), rest)] if rest else []
    rows = [
        (
            layer.title,
            mb(layer.dense_bytes),
            f"{layer.squares:.1%}",
            explanation.short(layer.strategies[0]) if len(layer.strategies) == 1 else "",
            "" if layer.error is None else f"{layer.error:.3g}",
            f"{layer.spent / allowed:.1%}" if allowed else "",
            f"{layer.saved_us / 1e3:.{digits}f}",
        )
        for layer in (*layers, *others)
    ]
    names = ("layer", "MB", "squares", "sent by", "error", "spent", "ms saved")
    return Table(names, rows, text=("layer", "sent by"), optional=("squares", "ms saved"))
