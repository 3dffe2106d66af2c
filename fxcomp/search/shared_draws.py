"""Compare plans under random cost errors that all plans share.

    step time of a draw = simulate(each task's time × error of its kind: compute, a link, copies, or a compressor)

Errors are log-normal factors with median 1. All plans share them, because a wrong price of compute or of a link changes
all plans alike. Seeds are fixed, so every rank and run draws the same errors.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import cache

import numpy as np

from fxcomp.cost.timeline import Task, step_times_us
from fxcomp.plan.kinds import WIRES, Stream
from fxcomp.plan.plan import Plan
from fxcomp.search.plan_tasks import StepPrices

DRAWS = 64

COMPUTE_ERROR = 0.05  # assumed: compute is timed in the step
COMPRESSOR_ERROR = 0.25  # assumed: compressors are timed alone, without the step's compute in the caches

COMPRESSING = ("compress", "decompress", "propose")
"""First words of compressors' task names."""

_MOST_LOG = 300.0  # so that times stay finite

LEAST_GAIN = 0.01
"""Fraction of the step that a plan must save to beat another; about the resolution of a race."""


def in_draws(prices: StepPrices, plan: Plan) -> list[float]:
    """Predict the step time in each draw, in µs."""
    tasks, costs = prices.tasks(plan), prices.costs
    compute, links, compressors = drawn_errors(costs.error, costs.compute_error)
    errors = {_COMPUTE: compute, **dict.fromkeys(_MOVING.values(), links)}
    kinds = _kinds_of(tasks, plan)
    number = {kind: k for k, kind in enumerate(dict.fromkeys(kinds))}
    logs = np.stack([errors.get(kind, compressors) * _normals(kind) for kind in number], axis=1)
    factors = np.exp(np.clip(logs, -_MOST_LOG, _MOST_LOG))
    durations = np.array([task.duration_us for task in tasks])
    varied = durations * factors[:, [number[kind] for kind in kinds]]
    return step_times_us(tasks, [array("d", row.tobytes()) for row in varied], costs.processors)


def drawn_errors(error: float, compute_error: float) -> tuple[float, float, float]:
    """Return the standard deviations of the log errors of compute, links and compressors.

    Links get the whole prediction error, because wrong link prices cause most of the error.
    """
    return COMPUTE_ERROR + compute_error, error, max(COMPRESSOR_ERROR, error) + compute_error


def share_won(mine: Sequence[float], others: Sequence[float]) -> float:
    """Return the fraction of draws in which `mine` is below `others` by more than LEAST_GAIN."""
    return sum(a < b * (1 - LEAST_GAIN) for a, b in zip(mine, others, strict=True)) / len(mine)


_MOVING = {stream: stream.value for stream in (*WIRES, Stream.D2H, Stream.H2D)}
_COMPUTE = Stream.COMPUTE.value


def _kinds_of(tasks: Sequence[Task], plan: Plan) -> list[str]:
    compressors = [", ".join(dict.fromkeys(map(str, bucket.strategy.compressors))) for bucket in plan.buckets]

    def kind_of(task: Task) -> str:
        moving = _MOVING.get(task.stream)
        if moving is not None:
            return moving
        words = task.name.split()
        return compressors[int(words[-1])] if words[0] in COMPRESSING else _COMPUTE

    return [kind_of(task) for task in tasks]


@cache
def _normals(kind: str) -> np.ndarray:
    """Draw standard normals, seeded by the kind's name."""
    return np.random.default_rng((0, zlib.crc32(kind.encode()))).standard_normal(DRAWS)
