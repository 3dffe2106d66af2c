"""Detect changed step times and faster links (drift).

    every WINDOW steps under a plan     median step time on the slowest rank; time of an all_reduce
    first window                        settled times, until another plan is followed
    later median, up or down by FACTOR  drift; the schedule measures the links again or races plans
    later all_reduce, down by LINKS     the same

A compressed step may be as long over faster links, although a plan with less compression has become the fastest. Slower
links show in step times, or do not matter to the plan. All ranks compare the same times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.cost.measured import format_bytes
from fxcomp.step.calendar import WINDOW

FACTOR = 1.25
"""Ratio of window medians that counts as drift. On a busy machine, medians vary by less (assumed)."""

LINKS = 2.0
"""Ratio of an all_reduce's times, earlier to later, that counts as drift (assumed)."""

SHARE = 0.1
"""Time of the all_reduce as a fraction of the median step, by the plan's costs. It is timed twice per window."""

MOST_BYTES = 4 << 20
"""Maximum bytes of the all_reduce, because training needs the memory."""

LEAST = WINDOW // 4
"""Minimum number of timed steps per window and rank. Not timed: verified steps, and batches unlike the first."""


@dataclass(frozen=True, slots=True)
class Window:
    step_ms: float
    """Median step time on the slowest rank."""
    size: int = 0
    """Bytes of the all_reduce; 0 without one."""
    sum_ms: float = 0.0
    """Time of the all_reduce on the slowest rank."""


def median_of_window(times_ms: Sequence[float]) -> float:
    """Return a rank's median of a window, in ms; -1 with fewer than LEAST times."""
    return statistics.median(times_ms) if len(times_ms) >= LEAST else -1.0


def drift_since(step: int, settled: Window, now: Window) -> str:
    """Compare the window that ends after `step` steps with the plan's first. Return a sentence on drift, or ""."""
    drift = ""
    if max(settled.step_ms, now.step_ms) > FACTOR * min(settled.step_ms, now.step_ms):
        drift = f"steps take {now.step_ms:.4g} ms, and took {settled.step_ms:.4g}"
    elif settled.sum_ms > LINKS * now.sum_ms:
        drift = f"all_reduces of {format_bytes(now.size)} take {now.sum_ms:.4g} ms, and took {settled.sum_ms:.4g}"
    return drift and f"step {step}: {drift} when their plan was settled."
