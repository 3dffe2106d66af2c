"""Compare plans when the costs are as wrong as they may be: every plan meets the same errors.

    the step of a draw = simulate(tasks, each × the error of what it is: compute, a link, copies, or a compressor)

An error is log-normal with median 1 and belongs to the draw, not to the plan. What two plans share, such as compute and
a link that is slower than its table, moves both of them, so it does not hide which one is faster. `DRAWS` draws have
fixed seeds: every rank and every run finds the same.
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

COMPUTE_ERROR = 0.05  # assumed: compute is timed in the job's own step
COMPRESSOR_ERROR = (
    0.25  # assumed: compressors are timed by themselves, with caches that the step's compute does not fill
)

COMPRESSING = ("compress", "decompress", "propose")
"""The first words of a compressor's tasks."""

LEAST_GAIN = 0.01
"""A plan beats another one if it saves this share of its step: a race can hardly measure less."""


def in_draws(prices: StepPrices, plan: Plan) -> list[float]:
    """Predict the step once in each draw of the costs' errors, in µs."""
    tasks, costs = prices.tasks(plan), prices.costs
    compute, links, compressors = drawn_errors(costs.error, costs.compute_error)
    errors = {_COMPUTE: compute, **dict.fromkeys(_MOVING.values(), links)}
    kinds = _kinds_of(tasks, plan)
    number = {kind: k for k, kind in enumerate(dict.fromkeys(kinds))}
    factors = np.stack([np.exp(errors.get(kind, compressors) * _normals(kind)) for kind in number], axis=1)
    durations = np.array([task.duration_us for task in tasks])
    varied = durations * factors[:, [number[kind] for kind in kinds]]
    return step_times_us(tasks, [array("d", row.tobytes()) for row in varied], costs.processors)


def drawn_errors(error: float, compute_error: float) -> tuple[float, float, float]:
    """Return the standard deviations of the logarithms of compute, links and compressors, by a cost table's errors.

    Most of a prediction's error is the links'.
    """
    return COMPUTE_ERROR + compute_error, error, max(COMPRESSOR_ERROR, error) + compute_error


def share_won(mine: Sequence[float], others: Sequence[float]) -> float:
    """Return the share of draws in which the first plan is faster by LEAST_GAIN."""
    return sum(a < b * (1 - LEAST_GAIN) for a, b in zip(mine, others, strict=True)) / len(mine)


_MOVING = {stream: stream.value for stream in (*WIRES, Stream.D2H, Stream.H2D)}
_COMPUTE = Stream.COMPUTE.value


def _kinds_of(tasks: Sequence[Task], plan: Plan) -> list[str]:
    """Name the error that each task has: its link's, its compressors', else compute's."""
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
    """Draw standard normals that belong to a name, whatever else is drawn."""
    return np.random.default_rng((0, zlib.crc32(kind.encode()))).standard_normal(DRAWS)
