"""Write what a plan may lose and what it loses, by layer: the sections of a report under an error budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fxcomp.plan.budget import Budget
from fxcomp.report.by_layer import Instead, Layer, layers_of
from fxcomp.report.document import Block, Column, Section, Table, count, decimals, mb
from fxcomp.report.explanation import Explanation, exposed_by_bucket

_FEW, _MOST_LAYERS = 8, 24
_SMALL = 0.01  # the share of squares and of saved time below which a layer that spends next to nothing is not named
_SPENT = 0.0005  # the share of the budget that is next to nothing
_SHARES = "Shares of the gradient's squares and of the budget, and ms on the wire less than dense."
_WHAT = "How much longer the step would be if all buckets that hold a layer travelled otherwise:"


def error_sections(explanation: Explanation, budget: Budget) -> list[Section]:
    """Compare what is lost with the budget, and say by layer what it buys and why no other parameter is taken."""
    blocks: list[Block] = [_spent(explanation, budget), _source(explanation)]
    notes = [note for note in budget.table.notes if note not in explanation.notes]
    shown, rest = _split(layers_of(explanation), explanation)
    return [
        Section("Error", [*blocks, *notes]),
        Section("By layer", [_SHARES, _by_layer(shown, rest, explanation)]),
        Section("Why these parameters", [_WHAT, _reasons(shown, explanation)]),
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
    known = sum(1 for name in names if name in errors.rows and errors.rows[name].samples)
    of_all = f"of {known} of {count(len(names), 'gradient')}" if known < len(names) else "of every gradient"
    rest = "; the others' are those of Gaussian values" if known < len(names) else ""
    return f"Errors {of_all} were measured in training, in {count(errors.looks, 'look')}{rest}."


def _split(layers: Sequence[Layer], explanation: Explanation) -> tuple[list[Layer], list[Layer]]:
    """Separate the layers with a row of their own from those that share one."""
    budget = explanation.allowed or 0.0
    saved_us = sum(layer.saved_us for layer in layers)

    def counts(layer: Layer) -> bool:
        is_small = layer.squares < _SMALL and layer.saved_us <= _SMALL * saved_us
        return layer.spent > _SPENT * budget or not is_small

    few = len(layers) <= _FEW
    shown = [layer for layer in layers if few or counts(layer)][:_MOST_LAYERS]
    return shown, [layer for layer in layers if layer not in shown]


def _by_layer(layers: Sequence[Layer], rest: Sequence[Layer], explanation: Explanation) -> Table:
    """Number the layers, and add up the others."""
    columns = (
        Column(""),
        Column("layer", is_text=True),
        Column("MB"),
        Column("squares", is_optional=True),
        Column("sent by", is_text=True),
        Column("error"),
        Column("spent"),
        Column("ms saved", is_optional=True),
    )
    digits, allowed = decimals(explanation.step_us), explanation.allowed or 0.0
    rows = [
        (
            str(number),
            layer.name if len(layer.names) == 1 else f"{layer.name} ({len(layer.names)})",
            mb(layer.dense_bytes),
            f"{layer.squares:.1%}",
            explanation.short(layer.strategy),
            "" if layer.error is None else f"{layer.error:.3g}",
            f"{layer.spent / allowed:.1%}" if allowed else "",
            f"{layer.saved_us / 1e3:.{digits}f}",
        )
        for number, layer in enumerate(layers)
    ]
    if rest:
        spent, saved_us = sum(each.spent for each in rest), sum(each.saved_us for each in rest)
        rows.append(
            (
                "",
                f"{count(len(rest), 'other layer')}",
                mb(sum(each.dense_bytes for each in rest)),
                f"{sum(each.squares for each in rest):.1%}",
                "",
                "",
                f"{spent / allowed:.1%}" if allowed else "",
                f"{saved_us / 1e3:.{digits}f}",
            )
        )
    return Table(columns, rows)


def _reasons(layers: Sequence[Layer], explanation: Explanation) -> Table:
    """Say it once for layers with the same reason."""
    waits = exposed_by_bucket(explanation.timeline)
    numbers: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        is_hidden = not any(waits.get(bucket) for bucket in layer.buckets)
        numbers.setdefault(reason(layer, explanation, is_hidden=is_hidden), []).append(number)
    return Table(
        (Column("layer", is_text=True), Column("", is_text=True)),
        [(_ranges(each), why) for why, each in numbers.items()],
    )


def reason(layer: Layer, explanation: Explanation, *, is_hidden: bool) -> str:
    """Say in a phrase why a layer's parameter is what it is; `is_hidden` tells that compute never waits for it."""
    digits = decimals(explanation.step_us)
    if layer.is_pinned:
        return "pinned by hand"
    told = [_change(layer.dense, digits, explanation)] if layer.dense is not None else []
    finer, coarser = layer.finer, layer.coarser
    if finer is not None and finer != layer.dense:
        told.append(f"finer: {_change(finer, digits, explanation)}")
    if coarser is None:
        told.append("nothing coarser is offered")
    elif _rounded(coarser, digits) < 0:
        told.append(f"coarser: {_change(coarser, digits, explanation)}, {_price(coarser, explanation)}")
    elif not layer.strategy.is_dense:
        told.append("nothing coarser is faster")
    else:
        told.append("hidden: dense costs nothing" if is_hidden else "nothing is faster than dense")
    return "; ".join(told)


def _change(instead: Instead, digits: int, explanation: Explanation) -> str:
    return f"{explanation.short(instead.strategy)} {_rounded(instead, digits):+.{digits}f} ms"


def _rounded(instead: Instead, digits: int) -> float:
    return round(instead.longer_us / 1e3, digits) + 0.0


def _price(instead: Instead, explanation: Explanation) -> str:
    """Describe the additional error of a coarser strategy."""
    over = explanation.spent + instead.spent > (explanation.allowed or 0.0) * (1 + 1e-9)
    return f"{instead.spent:.2g} more lost{', beyond the budget' if over else ''}"


def _ranges(numbers: list[int]) -> str:
    """`0, 3-5`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
