"""Sum running steps up in a flat dictionary of numbers, for whoever writes logs step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxcomp.cost.timeline import Timeline
from fxcomp.plan.plan import Plan
from fxcomp.report.document import count
from fxcomp.step.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of what has run so far: steps, or backward passes that are somebody else's."""

    steps: int
    skipped: int
    """Those left out, because a gradient was not finite on some rank."""
    payload_bytes: Mapping[tuple[str, str], int]
    """The bytes that this rank put into collectives in the last one, by kind and level."""


def metrics_of(counts: Counts, times: StepTimes, plan: Plan | None, predicted: Timeline | None) -> dict[str, Any]:
    """Read what is known without a wait. Before there is a plan, what needs one is nan, and its name empty."""
    sent = sum(counts.payload_bytes.values())
    dense = sum(bucket.dense_bytes for bucket in plan.buckets) if plan is not None else math.nan
    return {
        "step": counts.steps,
        "step_ms": times.median_ms,
        "exposed_ms": times.exposed_ms,
        "predicted_ms": math.nan if predicted is None else predicted.step_time_us / 1e3,
        "sent_mb": sent / 1e6,
        "ratio": dense / sent if sent else math.nan,
        "skipped": counts.skipped,
        "plan": "" if plan is None else plan.digest,
    }


def in_a_line(metrics: Mapping[str, Any], plan: Plan, *, is_racing: bool) -> str:
    """Say in a line how gradients travel and how long steps take."""
    buckets = plan.buckets
    compressed = sum(not bucket.strategy.is_dense for bucket in buckets)
    said = [f"{compressed} of {count(len(buckets), 'bucket')} compressed" if compressed else "dense"]
    if compressed and not math.isnan(metrics["ratio"]):
        said.append(f"gradients / sent {metrics['ratio']:.3g}")
    measured = metrics["step_ms"]
    times = f"predicted {metrics['predicted_ms']:.4g} ms a step"
    said.append(times if math.isnan(measured) else f"{measured:.4g} ms a step, {times}")
    said += ["plans take turns"] if is_racing else []
    return ", ".join([*said, count(metrics["step"], "step"), f"plan {metrics['plan']}"])
