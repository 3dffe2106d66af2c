"""Detect changed step times (drift).

    every WINDOW steps under a plan     median step time on the slowest rank
    first median                        settled time, until another plan is followed
    later median, up or down by FACTOR  drift; the schedule measures the links again or races plans

All ranks compare the same medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fxcomp.step.calendar import WINDOW

FACTOR = 1.25
"""Ratio of window medians that counts as drift. On a busy machine, medians vary by less (assumed)."""

LEAST = WINDOW // 4
"""Minimum number of timed steps per window and rank. Not timed: verified steps, and batches unlike the first."""


def median_of_window(times_ms: Sequence[float]) -> float:
    """Return a rank's median of a window, in ms; -1 with fewer than LEAST times."""
    return statistics.median(times_ms) if len(times_ms) >= LEAST else -1.0


def judged(step: int, settled_ms: float | None, medians_ms: Sequence[float]) -> tuple[float | None, str]:
    """Compare the window that ends after `step` steps with the settled time. `medians_ms` has one value per rank.

    Return the settled time and a sentence on drift. The sentence is empty without drift, or if a rank timed fewer than
    LEAST steps.
    """
    now_ms = max(medians_ms)
    if min(medians_ms) < 0 or settled_ms is None:
        return settled_ms if min(medians_ms) < 0 else now_ms, ""
    if max(settled_ms, now_ms) <= FACTOR * min(settled_ms, now_ms):
        return settled_ms, ""
    return (
        settled_ms,
        f"step {step}: steps take {now_ms:.4g} ms, and took {settled_ms:.4g} when their plan was settled.",
    )
