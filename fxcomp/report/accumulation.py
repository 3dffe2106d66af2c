"""Predict the time per micro-batch for several numbers of micro-batches per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxcomp.report.document import Block, Table, ms
from fxcomp.report.explanation import Explanation
from fxcomp.search.choose import predict_us

LENGTHS = (1, 2, 4, 8, 16)
"""Numbers of micro-batches compared with the current one."""

SHOWN_FROM = 1.25
"""Show the table if the dense step takes at least this multiple of a step without communication (assumed)."""


def accumulated(explanation: Explanation) -> list[tuple[int, float, float]]:
    """Return (micro-batches, time of the best dense plan, time of this plan), in µs per micro-batch.

    Empty if nothing was compared or `SHOWN_FROM` is not reached.
    """
    choice, workload, costs = explanation.choice, explanation.workload, explanation.costs
    asked = explanation.micro_batches
    if choice is None or not explanation.plan.buckets:
        return []
    if asked == 1 and choice.dense_us < SHOWN_FROM * workload.free_us:
        return []
    once_us = workload.backward_us / asked
    found: list[tuple[int, float, float]] = []
    for number in sorted({*LENGTHS, asked}):
        host_us = workload.host_us * number / asked
        other = replace(workload.after_compute((number - asked) * once_us), host_us=host_us)
        dense, chosen = (predict_us(other, p, costs, explanation.cluster) for p in (choice.dense, explanation.plan))
        found.append((number, dense / number, chosen / number))
    return found


def accumulation_blocks(rows: Sequence[tuple[int, float, float]], asked: int, digits: int) -> list[Block]:
    cells = [
        (str(number), f"{ms(dense_us, digits)} ms", f"{ms(plan_us, digits)} ms", "now" if number == asked else "")
        for number, dense_us, plan_us in rows
    ]
    said = (
        "Times per micro-batch, if a step sums the gradients of the given number of micro-batches before it sends"
        " them. Fewer, larger steps change training: compare losses after the same number of tokens."
    )
    return [Table(("micro-batches", "dense", "this plan", ""), cells, optional=("",)), said]
