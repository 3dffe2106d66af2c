"""Notice that steps take another time than when their plan was settled. It never switches.

    every WINDOW steps under a plan     the median of their times, on the slowest rank
    the first of these medians          the settled time, until another plan is followed
    a later one that is FACTOR off      drift: links are measured again, and plans race

All ranks judge the same medians after the same steps, so they find the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fxcomp.step.calendar import WINDOW

FACTOR = 1.25
"""Relative change of the median of WINDOW steps that is drift. A busy machine varies by less (assumed)."""

LEAST = WINDOW // 4
"""Steps of a window that every rank must have timed. Verified steps and batches of another kind are not timed."""


def median_of_window(times_ms: Sequence[float]) -> float:
    """Return a rank's median of a window, in ms; -1 where it has timed too few of its steps."""
    return statistics.median(times_ms) if len(times_ms) >= LEAST else -1.0


def judged(step: int, settled_ms: float | None, medians_ms: Sequence[float]) -> tuple[float | None, str]:
    """Compare the window that ends after `step` steps with the settled time; `medians_ms` are those of all ranks.

    Returns the settled time from now on, and a sentence on the drift, empty if it is none. A window that some rank has
    not timed is left out.
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
