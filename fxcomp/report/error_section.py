"""Write what a plan may lose and what it loses, by layer: the sections of a report under an error budget."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.plan.budget import Budget
from fxcomp.report.by_layer import Row, layers_of, summed
from fxcomp.report.document import Block, Column, Section, Table, count, decimals, mb
from fxcomp.report.explanation import Explanation

_FEW, _MOST_LAYERS = 8, 24
_SMALL = 0.01  # the share of squares and of saved time below which a layer that spends next to nothing is not named
_SPENT = 0.0005  # the share of the budget that is next to nothing
_SHARES = "Shares of the gradient's squares and of the budget, and ms on the wire less than dense."


def error_sections(explanation: Explanation, budget: Budget) -> list[Section]:
    """Compare what is lost with the budget, and list by layer the error and the time saved."""
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
        return "Errors are assumed to be those of Gaussian values: nothing is measured."
    names = explanation.workload.sizes
    assumed = [name for name in names if name not in errors.rows or not errors.rows[name].samples]
    known = f"{len(names) - len(assumed)} of {count(len(names), 'gradient')}" if assumed else "every gradient"
    some = ", ".join(assumed[:_FEW]) + (", ..." if len(assumed) > _FEW else "")
    rest = f"; the others' are those of Gaussian values ({some})" if assumed else ""
    return f"Errors of {known} were measured in training, in {count(errors.looks, 'look')}{rest}."


def _split(layers: Sequence[Row], explanation: Explanation) -> tuple[list[Row], list[Row]]:
    """Separate the layers with a row of their own from those that share one."""
    budget = explanation.allowed or 0.0
    saved_us = sum(layer.saved_us for layer in layers)

    def counts(layer: Row) -> bool:
        is_small = layer.squares < _SMALL and layer.saved_us <= _SMALL * saved_us
        return layer.spent > _SPENT * budget or not is_small

    few = len(layers) <= _FEW
    shown = [layer for layer in layers if few or counts(layer)][:_MOST_LAYERS]
    return shown, [layer for layer in layers if layer not in shown]


def _by_layer(layers: Sequence[Row], rest: Sequence[Row], explanation: Explanation) -> Table:
    """List the layers, and add up the others."""
    columns = (
        Column("layer", is_text=True),
        Column("MB"),
        Column("squares", is_optional=True),
        Column("sent by", is_text=True),
        Column("error"),
        Column("spent"),
        Column("ms saved", is_optional=True),
    )
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
    return Table(columns, rows)
