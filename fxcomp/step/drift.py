"""Detect changed step times and faster links (drift).

    every WINDOW steps under a plan     median step time on the slowest rank; time of an all_reduce
    race                                its times are compared with the first window
    first window                        settled times, until another plan is followed
    later median, up or down by FACTOR  drift; the schedule measures the links again or races plans
    all_reduce that became shorter      the same, if it is not alike (`is_alike`)

A compressed step may be as long over faster links, although a plan with less compression has become the fastest. Slower
links show in step times, or do not matter to the plan. All ranks compare the same times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.cost.measured import format_bytes
from fxcomp.planning.decide import is_alike
from fxcomp.step.calendar import WINDOW

FACTOR = 1.25
"""Ratio of window medians that counts as drift. On a busy machine, medians vary by less (assumed)."""

SHARE = 0.15
"""Time of the all_reduce in median steps. `Planner.sum_us` runs it PROBES times per window."""

SMALL_BYTES, MOST_BYTES = 64 << 10, 4 << 20
"""Bytes of the all_reduce by which the size is chosen, and maximum size, because training needs the memory."""

LEAST = WINDOW // 10
"""Minimum number of timed steps per window and rank. Not timed: verified steps, and batches unlike the first."""


@dataclass(frozen=True, slots=True)
class Window:
    step_ms: float
    """Median step time on the slowest rank."""
    size: int = 0
    """Bytes of the all_reduce; 0 without one."""
    sum_us: float = 0.0
    """Time of the all_reduce on the slowest rank."""


def median_of_window(times_ms: Sequence[float]) -> float:
    """Return a rank's median of a window, in ms; -1 with fewer than LEAST times."""
    return statistics.median(times_ms) if len(times_ms) >= LEAST else -1.0


def size_for(step_ms: float, small_us: float) -> int:
    """Return the bytes summed in SHARE of a step, if SMALL_BYTES take `small_us`. Latency counts as bandwidth."""
    return max(4, min(int(SMALL_BYTES * 1e3 * SHARE * step_ms / small_us), MOST_BYTES))


def drift_since(step: int, settled: Window, now: Window) -> str:
    """Compare the window that ends after `step` steps with the plan's first. Return a sentence on drift, or ""."""
    drift = ""
    if max(settled.step_ms, now.step_ms) > FACTOR * min(settled.step_ms, now.step_ms):
        drift = f"steps take {now.step_ms:.4g} ms, and took {settled.step_ms:.4g}"
    elif now.sum_us < settled.sum_us and not is_alike(now.sum_us, settled.sum_us):
        times = f"take {now.sum_us / 1e3:.4g} ms, and took {settled.sum_us / 1e3:.4g}"
        drift = f"all_reduces of {format_bytes(now.size)} {times}"
    return drift and f"step {step}: {drift} when their plan was settled."
