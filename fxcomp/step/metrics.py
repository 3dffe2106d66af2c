"""Sum a running step up in a flat dictionary of numbers, for whoever writes logs step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fxcomp.step.monitor import Monitor
from fxcomp.step.plan_in_force import PlanInForce

Payload = Mapping[tuple[str, str], int]


def metrics_of(
    force: PlanInForce, monitor: Monitor, payload_bytes: Payload, *, steps: int, skipped: int, residuals: bool
) -> dict[str, Any]:
    """Read what is known without a wait; the norm of residuals only if asked for, which waits for the device."""
    sent, dense = sum(payload_bytes.values()), force.decision.workload.dense_bytes
    found: dict[str, Any] = {
        "step": steps,
        "step_ms": monitor.times.median_ms,
        "exposed_ms": monitor.times.exposed_ms,
        "predicted_ms": force.predicted.step_time_us / 1e3,
        "sent_mb": sent / 1e6,
        "ratio": dense / sent if sent else math.nan,
        "skipped": skipped,
        "plan": force.plan.digest,
    }
    if residuals:
        found["residual_norm"] = force.state.residuals.norm
    return found
