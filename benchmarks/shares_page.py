"""Write the section about shares of delayed error on convergence.py's page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

DENSE, NOISE, MOST_DELAYED = "dense", "bf16", "topk(0.01)"
SHARES = (0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0)
ALLOWED = 0.01
"""The excess that the mode `aggressive` is to keep."""


@dataclass(frozen=True)
class Record:
    """The result of a trial of shares.py. A diverged one has no loss."""

    task: str
    optimizer: str
    method: str
    share: float
    seed: int
    elements: float
    """The compressed part's share of all elements."""
    squares: float
    """Its share of the mean gradient's squares."""
    error: float
    """The relative squared error of what is applied, of gradients and what had been left out before."""
    loss: float | None
    dense_loss: float
    excess: float | None
    seconds: float
    length: int = 1
    """So many times the task's steps."""


Cells = dict[tuple[str, str, str, float], list[Record]]
"""Records of all seeds, by task, optimizer, compressor and share."""


def section(records: Sequence[Record]) -> list[str]:
    """Lay out the tables, as lines of Markdown."""
    cells = _cells([record for record in records if record.length == 1])
    longer = [record for record in records if record.length > 1]
    lines = ["## A share of delayed error", "", INTRODUCTION, FINDINGS, *_waiting(cells), "", OTHERS_INTRODUCTION]
    lines += [*_others(cells), "", PREDICTORS_INTRODUCTION, *_predictors(cells)]
    return [*lines, "", LONGER_INTRODUCTION, *_longer(cells, _cells(longer))] if longer else lines


def _cells(records: Sequence[Record]) -> Cells:
    cells: Cells = {}
    for record in records:
        cells.setdefault((record.task, record.optimizer, record.method, record.share), []).append(record)
    return cells


INTRODUCTION = f"""\
What delayed error costs each kind of update, made with `python benchmarks/shares.py` on 2026-11-22. A share of the rows
of every parameter is compressed with {MOST_DELAYED} and error feedback, the rest is averaged exactly. SGD with momentum
0.9; LAMB is written in plain tensors. Cells are the median excess of the seeds in percent, and the least and the
largest; the column of bf16 on everything, whose rounding costs nothing, shows how much of that is noise. The last
column is the share at which the median passes {ALLOWED:.0%}, on a straight line between measured shares.
"""

OTHERS_INTRODUCTION = """\
The same with other compressors. *Error* is the mean over the steps of the relative squared error of the compressed
part; int2(stochastic=true) has no feedback: its error is rounding, which nothing delays.
"""

PREDICTORS_INTRODUCTION = """\
What orders the excess of the trials with feedback: Spearman's rank correlation, over compressors and shares together.
*Squares* is the part's share of the gradient's squares. *Wait* is error / (1 - error), the steps that a value waits if
every step delivers the same part.
"""

LONGER_INTRODUCTION = """\
Training four times as long, on the same batches again, with topk(0.01):
"""

FINDINGS = """\
The excess grows with the share, in proportion on logreg and faster on charlm. On logreg a second moment makes it five
times that of momentum, and a trust ratio twenty times. On charlm delay alone costs as much; but trained four times as
long, 15 % of all elements cost momentum 0.1 % and AdamW still 1.1 %. So 10 % may wait before a second moment, with or
without a trust ratio: the largest share at which every seed of both tasks keeps to 1 %. The loss of images is so small
that its noise is several percent, and it has one seed here and no LAMB: it decides nothing.

Over compressors the share times the error orders the excess better than the share, on both tasks. Weighting by the wait
is better still on logreg and worse on charlm. Rounding without feedback is another matter, since nothing makes it good:
two bits at random cost +75 % before momentum and +34 % before AdamW on logreg, +5 % and +11 % on charlm.
"""


def _waiting(cells: Cells) -> list[str]:
    heads = ["task", "update", "dense loss", "bf16", *(f"{share:g}" for share in SHARES), f"{ALLOWED:.0%} at"]
    lines = [_row(heads), "|---|---|" + "--:|" * (len(heads) - 2)]
    for task, optimizer in dict.fromkeys((task, optimizer) for task, optimizer, *_ in cells):
        dense = median(record.dense_loss for record in cells[task, optimizer, DENSE, 0.0])
        of_shares = [cells.get((task, optimizer, MOST_DELAYED, share), []) for share in SHARES]
        noise = cells.get((task, optimizer, NOISE, 1.0), [])
        at = allowed_share(dict(zip(SHARES, of_shares, strict=True)))
        shown = [f"{dense:.4f}", *map(_cell, (noise, *of_shares)), "more" if at is None else f"{at:.2f}"]
        lines.append(_row([task, optimizer, *shown]))
    return lines


def allowed_share(of_shares: dict[float, list[Record]]) -> float | None:
    """Find the share at which the median excess passes what is allowed; None if it never does."""
    share, excess = 0.0, 0.0
    for next_share, found in of_shares.items():
        if not found:
            continue
        next_excess = median(map(_excess, found))
        if next_excess > ALLOWED:
            return share + (next_share - share) * max(0.0, ALLOWED - excess) / (next_excess - min(excess, ALLOWED))
        share, excess = next_share, next_excess
    return None


def _others(cells: Cells) -> list[str]:
    shares = (0.15, 0.5, 1.0)
    heads = ["task", "update", "compressor", "error", *(f"{share:g}" for share in shares)]
    lines = [_row(heads), "|---|---|---|" + "--:|" * (len(heads) - 3)]
    several = {(task, optimizer) for task, optimizer, method, _ in cells if method not in (DENSE, NOISE, MOST_DELAYED)}
    for task, optimizer, method in dict.fromkeys(key[:3] for key in cells if key[:2] in several):
        if method in (DENSE, NOISE):
            continue
        of_shares = [cells.get((task, optimizer, method, share), []) for share in shares]
        error = median(record.error for found in of_shares for record in found)
        lines.append(_row([task, optimizer, method, f"{error:.2f}", *map(_cell, of_shares)]))
    return lines


def _longer(cells: Cells, longer: Cells) -> list[str]:
    heads = ["task", "update", "share", "the task's steps", "four times as many"]
    lines = [_row(heads), "|---|---|--:|--:|--:|"]
    for key in longer:
        if key[2] == MOST_DELAYED:
            lines.append(_row([*key[:2], f"{key[3]:g}", _cell(cells.get(key, [])), _cell(longer[key])]))
    return lines


PREDICTORS: dict[str, Callable[[Record], float]] = {
    "share": lambda record: record.elements,
    "share × error": lambda record: record.elements * record.error,
    "squares × error": lambda record: record.squares * record.error,
    "share × wait": lambda record: record.elements * record.error / max(1 - record.error, 1e-3),
}


def _predictors(cells: Cells) -> list[str]:
    lines = [_row(["task", "update", "trials", *PREDICTORS]), "|---|---|--:|" + "--:|" * len(PREDICTORS)]
    for task, optimizer in dict.fromkeys(key[:2] for key in cells):
        found = [
            record
            for key, records in cells.items()
            if key[:2] == (task, optimizer) and key[2] not in (DENSE, NOISE) and "stochastic" not in key[2]
            for record in records
        ]
        if len({record.method for record in found}) > 2:
            order = _ranks(map(_excess, found))
            fits = [_correlation(order, _ranks(map(predictor, found))) for predictor in PREDICTORS.values()]
            lines.append(_row([task, optimizer, str(len(found)), *(f"{fit:.2f}" for fit in fits)]))
    return lines


def _ranks(values: Iterable[float]) -> list[float]:
    found = list(values)
    ordered = sorted(found)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in found]


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    means = sum(first) / len(first), sum(second) / len(second)
    centred = [[value - mean for value in values] for values, mean in zip((first, second), means, strict=True)]
    both, *alone = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in _pairs(centred))
    return both / (alone[0] * alone[1]) ** 0.5 if min(alone) > 0 else 0.0


def _pairs(centred: Sequence[Sequence[float]]) -> list[tuple[Sequence[float], Sequence[float]]]:
    first, second = centred
    return [(first, second), (first, first), (second, second)]


def _excess(record: Record) -> float:
    return float("inf") if record.excess is None else record.excess


def _cell(records: Sequence[Record]) -> str:
    """The median excess of the seeds in percent, the least and the largest."""
    if not records:
        return "–"
    found = sorted(map(_excess, records))
    return (
        _percent(found[0])
        if len(found) == 1
        else f"{_percent(median(found))} ({_percent(found[0])} … {_percent(found[-1])})"
    )


def _percent(excess: float) -> str:
    return (
        "diverges"
        if excess == float("inf")
        else f"{100 * excess:+.2f}"
        if abs(excess) < 0.1
        else f"{100 * excess:+.0f}"
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
