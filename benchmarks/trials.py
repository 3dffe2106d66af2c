"""Trials of convergence.py, their bands and records."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasks import WORKERS

OPTIMIZERS = ("sgd", "adamw")
DENSE = "dense"


@dataclass(frozen=True)
class Trial:
    task: str
    optimizer: str
    method: str
    """Text of a compressor, or of two for two shots, name of a control, or `dense`."""
    feedback: bool = False
    seed: int = 0
    workers: int = WORKERS
    owner: str | None = None
    """Treatment of the shard owner's residual in two shots."""


@dataclass(frozen=True)
class Band:
    low: float
    high: float

    def __contains__(self, excess: float) -> bool:
        return self.low <= excess <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {percent(self.low)}"
        return f"within ±{self.high:.1%}"


@dataclass(frozen=True, kw_only=True)
class Record(Trial):
    """Result of a trial; no loss if it diverged."""

    loss: float | None
    dense_loss: float
    excess: float | None
    low: float | None
    high: float | None
    within_band: bool | None
    bits_per_value: float | None
    seconds: float


def percent(excess: float) -> str:
    return f"{excess:+.2%}" if abs(excess) < 0.1 else f"{excess:+.0%}" if excess < 10 else f"× {excess + 1:.3g}"
