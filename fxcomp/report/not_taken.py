"""Show what each bucket could have had instead, what that would make of the step, and why a shorter one lost.

bucket  instead of           best other       a step  difference
     0  int8 twice by level  bf16 by level  2.475 ms  0.026 ms longer
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxcomp.report.document import Block, Column, Table, ms
from fxcomp.report.explanation import Explanation
from fxcomp.search.choose import Alternative, Choice
from fxcomp.search.runners import WORTH_FOLLOWING
from fxcomp.search.shared_draws import LEAST_GAIN


def not_taken(explanation: Explanation, choice: Choice, digits: int) -> list[Block]:
    """For each bucket the best of its other strategies, all else equal; consecutive equal rows share one."""
    columns = (
        Column("bucket"),
        Column("instead of", is_text=True, is_optional=True),
        Column("best other", is_text=True),
        Column("a step", is_optional=True),
        Column("difference"),
    )
    runs: list[tuple[int, int, Sequence[str]]] = []
    shorter: list[Alternative] = []
    for k, (bucket, others) in enumerate(zip(explanation.plan.buckets, choice.alternatives, strict=True)):
        best = _best_other(others)
        limit = "mode's limit" if explanation.budget is None else "budget"
        why = "pinned by hand" if choice.pins.is_pinned(bucket) else f"nothing within the {limit}"
        taken = explanation.short(bucket.strategy)
        cells = (taken, why, "", "")
        if best is not None:
            longer_ms = round((best.step_us - explanation.step_us) / 1e3, digits)
            shorter += [best] if longer_ms < 0 else []
            step = f"{ms(best.step_us, digits)} ms"
            cells = (taken, explanation.short(best.strategy), step, _difference(longer_ms, digits))
        first = runs.pop()[0] if runs and runs[-1][2] == cells else k
        runs.append((first, k, cells))
    rows = [(str(first) if first == last else f"{first}-{last}", *cells) for first, last, cells in runs]
    return [Table(columns, rows), *([_why_they_lost(shorter, choice)] if shorter else [])]


def _best_other(others: Sequence[Alternative]) -> Alternative | None:
    possible = [other for other in others if math.isfinite(other.step_us)]
    return min(possible, key=lambda other: other.step_us, default=None)


def _difference(longer_ms: float, digits: int) -> str:
    if not longer_ms:
        return "none"
    return f"{abs(longer_ms):.{digits}f} ms {'longer' if longer_ms > 0 else 'shorter'}"


def _why_they_lost(shorter: Sequence[Alternative], choice: Choice) -> str:
    """Name the rule: a compressed plan must save enough, surely enough; else prices of the search are coarse."""
    if choice.plan != choice.fastest and any(not each.strategy.is_dense for each in shorter):
        return (
            f"Shorter, and not taken: a plan that compresses must save {LEAST_GAIN:.0%} of the step in"
            f" {WORTH_FOLLOWING:.0%} of the draws, and the best one does so in {choice.wins:.0%}."
        )
    return "Shorter by the search's prices, and not taken: by exact prices, this plan was the best of those compared."
