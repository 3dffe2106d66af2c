"""Write the page of convergence.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from exchanges import MOMENTUM, OwnerResidual
from planted_mistakes import CONTROLS
from records import table
from tasks import ALL_TASKS, TASKS, WORKERS
from trials import OPTIMIZERS, Band, Record, percent


def report(records: Sequence[Record]) -> str:
    sections = ["# Loss under compression", "", INTRODUCTION]
    for task in TASKS:
        of_task = [record for record in records if record.task == task and record.owner is None]
        if of_task:
            sections += [f"## {task}", "", *_table(of_task), "", *_controls(of_task)]
    in_two_shots = [record for record in records if record.owner is not None]
    if in_two_shots:
        sections += ["## Two shots", "", TWO_SHOTS]
        sections += [line for task in ALL_TASKS for line in _pairs([r for r in in_two_shots if r.task == task])]
    judged = [record for record in records if record.within_band is not None]
    outside = [record for record in judged if not record.within_band]
    sections += ["## Outside their bands", "", f"{len(outside)} of {len(judged)} trials that have a band."]
    sections += ["", *(f"- {_describe(record)}" for record in outside)]
    return "\n".join(sections).rstrip() + "\n"


INTRODUCTION = f"""\
{WORKERS} workers in one process, each with batches of its own; SGD with momentum {MOMENTUM} and AdamW on the mean; made
with `python benchmarks/convergence.py`. Numbers are final losses over the dense one, minus 1. *EF* is error feedback
around every compressor, also around those that refuse it. ✓ is within the band for its class, ✗ outside; a number
without a mark has no band: it is measured, not judged.
"""


TWO_SHOTS = """\
Each worker encodes every shard with the first compressor and its residual. The shard's owner averages what it decodes,
adds a residual of its own, and encodes with the second compressor. *Bits* are those of both shots; of p workers, each
sends (p - 1) / p of them. Columns name what becomes of the owner's residual, and the number of workers; SGD unless they
say AdamW. *Dropped* and *miscounted* are negative controls: the owner forgets its residual, or adds it to its own
gradient once, where only p times would make up for the mean over p workers. int4 and int8 lose too little for the loss
to show either; `tests/testing/test_rounds.py` sees both, in what was delivered and is owed.

A band is that of the coarser compressor in one shot. int4 and int8 keep to it, top-k before int8 nearly. A second
shot of sign or top-k makes gradients late once more: quadratic and logreg have the time to make up for it, charlm and
images have not, and with sign they would be better off without the owner's residual.
"""

HEADS = {
    OwnerResidual.KEPT.value: "kept",
    OwnerResidual.DROPPED.value: "dropped",
    OwnerResidual.MISCOUNTED.value: "miscounted",
}


def _table(records: Sequence[Record]) -> list[str]:
    dense = {record.optimizer: record.dense_loss for record in records}
    columns = [(optimizer, feedback) for optimizer in OPTIMIZERS for feedback in (False, True)]
    lines = ["Dense loss: " + ", ".join(f"{loss:.4f} with {name}" for name, loss in dense.items()) + ".", ""]
    heads = ["bits a value", *(f"{optimizer}{' + EF' if feedback else ''}" for optimizer, feedback in columns)]
    rows: list[Sequence[str]] = []
    cells: dict[str, dict[tuple[str, bool], list[Record]]] = {}
    for record in records:
        if record.bits_per_value is not None:
            cell = cells.setdefault(record.method, {}).setdefault((record.optimizer, record.feedback), [])
            cell.append(record)
    for method, found in cells.items():
        bits = next(iter(found.values()))[0].bits_per_value
        rows.append((method, f"{bits:.3g}", *(_cell(found.get(column, [])) for column in columns)))
    return [*lines, table("compressor | " + " > | ".join(heads) + " >", rows)]


def _controls(records: Sequence[Record]) -> list[str]:
    controls = [record for record in records if record.method in CONTROLS]
    if not controls:
        return []
    by_name = {name: [r for r in controls if r.method == name] for name in (record.method for record in controls)}
    rows = [(name, _band(found[0]), _cell(found)) for name, found in by_name.items()]
    return [table("negative control (SGD) | expected > | excess >", rows), ""]


def _pairs(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    dense = {(record.optimizer, record.workers): record.dense_loss for record in records}
    shown = ", ".join(f"{loss:.4g} with {name} on {workers}" for (name, workers), loss in dense.items())
    columns = list(dict.fromkeys((record.optimizer, record.workers, record.owner) for record in records))
    heads = [f"{HEADS[str(owner)]}, {workers}{'' if name == 'sgd' else f' {name}'}" for name, workers, owner in columns]
    lines = [f"### {records[0].task}", "", f"Dense loss: {shown} workers.", ""]
    rows: list[Sequence[str]] = []
    for pair in dict.fromkeys(record.method for record in records):
        of_pair = [record for record in records if record.method == pair]
        row = [_cell([r for r in of_pair if (r.optimizer, r.workers, r.owner) == column]) for column in columns]
        rows.append((pair, f"{of_pair[0].bits_per_value:.3g}", *row))
    return [*lines, table("pair | bits a value > | " + " > | ".join(heads) + " >", rows), ""]


def _cell(records: Sequence[Record]) -> str:
    if not records:
        return "–"
    verdicts = [record.within_band for record in records if record.within_band is not None]
    mark = "" if not verdicts else " ✓" if all(verdicts) else " ✗"
    excesses = [record.excess for record in records if record.excess is not None]
    if len(excesses) < len(records):
        return "diverges" + mark
    return percent(sum(excesses) / len(excesses)) + mark


def _band(record: Record) -> str:
    assert record.low is not None, "asked only where there is a band"
    return str(Band(record.low, math.inf if record.high is None else record.high))


def _describe(record: Record) -> str:
    feedback = " with error feedback" if record.feedback else ""
    if record.owner is not None:
        feedback = f" on {record.workers}, the owner's residual {record.owner},"
    came = "diverges" if record.excess is None else percent(record.excess)
    return f"{record.task}, {record.optimizer}: {record.method}{feedback} {came}, expected {_band(record)}"
