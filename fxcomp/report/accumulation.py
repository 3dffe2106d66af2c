"""Compare steps of other numbers of micro-batches: what a slow link costs is paid once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxcomp.report.document import Block, Column, Table, ms
from fxcomp.report.explanation import Explanation
from fxcomp.search.choose import predict_us

LENGTHS = (1, 2, 4, 8, 16)
"""The numbers of micro-batches that are compared, beside the one that was asked about."""

SHOWN_FROM = 1.25
"""Accumulation is worth a table if the dense step takes so many times what it would without communication (assumed)."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """A step of so many micro-batches: what it takes for each of them."""

    micro_batches: int
    dense_us: float
    plan_us: float

    def to_json(self) -> dict[str, float]:
        return {
            "micro_batches": self.micro_batches,
            "dense_ms": self.dense_us / 1e3,
            "chosen_ms": self.plan_us / 1e3,
        }


def accumulated(explanation: Explanation) -> tuple[Accumulated, ...]:
    """Predict the plan, and the best dense one, after other numbers of backward passes; empty if it hardly matters."""
    choice, workload, costs = explanation.choice, explanation.workload, explanation.costs
    asked = explanation.micro_batches
    if choice is None or not explanation.plan.buckets:
        return ()
    if asked == 1 and choice.dense_us < SHOWN_FROM * workload.free_us:
        return ()
    once_us = workload.backward_us / asked
    found: list[Accumulated] = []
    for number in sorted({*LENGTHS, asked}):
        host_us = workload.host_us * number / asked
        other = replace(workload.after_compute((number - asked) * once_us), host_us=host_us)
        dense, chosen = (predict_us(other, p, costs, explanation.cluster) for p in (choice.dense, explanation.plan))
        found.append(Accumulated(number, dense / number, chosen / number))
    return tuple(found)


def accumulation_blocks(rows: Sequence[Accumulated], asked: int, digits: int) -> list[Block]:
    """Write the comparison for people."""
    columns = (
        Column("micro-batches"),
        Column("dense"),
        Column("this plan"),
        Column("", is_text=True, is_optional=True),
    )
    cells = [
        (
            str(row.micro_batches),
            f"{ms(row.dense_us, digits)} ms",
            f"{ms(row.plan_us, digits)} ms",
            "now" if row.micro_batches == asked else "",
        )
        for row in rows
    ]
    said = (
        "The time for one micro-batch, so for as many tokens, if a step sums up the gradients of so many before it"
        " sends them. Fewer, larger steps are other training: compare what the loss is after as many tokens."
    )
    return [Table(columns, cells), said]
