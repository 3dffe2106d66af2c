"""Send more in a job's first steps than its plan does: nothing compressed first, then lower and lower densities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fxcomp.compressors import Compressor
from fxcomp.errors import BadOption
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

FIRST_DENSITY = 0.25
"""The share of values that a density warm-up sends first, and by which each stage multiplies it (Lin et al. 2018)."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A plan, and the number of the first step that follows it."""

    first_step: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """The first steps of a job, of which none are special by default.

    `dense_steps`: so many first steps send the same buckets uncompressed, and residuals stay zero.

    `density_steps`: over so many steps, after the dense ones, compressors with a ratio send 25 %, then 6.25 %, and so
    on, down to their own ratio (Lin et al. 2018). Each stage is compiled beforehand: shapes are static.
    """

    dense_steps: int = 0
    density_steps: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            steps: object = getattr(self, each.name)
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
                raise BadOption(f"Warmup.{each.name} is a whole number of steps, from 0; it is {steps!r}")

    def __bool__(self) -> bool:
        return bool(self.dense_steps or self.density_steps)

    def stages(self, plan: Plan) -> tuple[Stage, ...]:
        """Return the plans to follow one after the other; the last one is the plan itself."""
        densities = _densities(plan) if self.density_steps else ()
        ends = [self.density_steps * (k + 1) // len(densities) for k in range(len(densities))]
        plans = [(_dense(plan), self.dense_steps)] if not plan.is_dense else []
        for density, steps in zip(densities, _differences(ends), strict=True):
            plans.append((_with_density(plan, density), steps))
        first, stages = 0, list[Stage]()
        for other, steps in plans:
            if steps:
                stages.append(Stage(first, other))
            first += steps
        return (*stages, Stage(first, plan))


NO_WARMUP = Warmup()


def _differences(ends: Sequence[int]) -> list[int]:
    return [end - (ends[k - 1] if k else 0) for k, end in enumerate(ends)]


def _dense(plan: Plan) -> Plan:
    """Return the same buckets over the same levels, uncompressed."""
    return plan.with_strategies([bucket.strategy.uncompressed for bucket in plan.buckets])


def _densities(plan: Plan) -> tuple[float, ...]:
    """Return the densities above the smallest ratio of the plan, falling."""
    ratios = [ratio for bucket in plan.buckets if (ratio := _smallest_ratio(bucket.strategy)) is not None]
    stages = math.ceil(math.log(min(ratios), FIRST_DENSITY) - 1e-9) if ratios else 0
    return tuple(FIRST_DENSITY**k for k in range(1, stages + 1) if FIRST_DENSITY**k > min(ratios))


def _smallest_ratio(strategy: Strategy) -> float | None:
    return min((ratio for each in strategy.compressors if (ratio := _ratio(each)) is not None), default=None)


def _ratio(compressor: Compressor | None) -> float | None:
    """Return the share of values that a compressor sends; None if that is no parameter of it."""
    named = compressor is not None and any(p.name == "ratio" for p in compressor.facts.parameters)
    return float(getattr(compressor, "ratio")) if named else None  # noqa: B009  # of some compressors only


def _with_density(plan: Plan, density: float) -> Plan:
    """Raise every smaller ratio of a plan to a density."""
    return plan.with_strategies([_strategy_with_density(bucket, density) for bucket in plan.buckets])


def _strategy_with_density(bucket: Bucket, density: float) -> Strategy:
    def raised(step: Any) -> Any:
        ratio = _ratio(getattr(step, "compressor", None))
        if ratio is None or ratio >= density:
            return step
        return replace(step, compressor=replace(step.compressor, ratio=density))

    return Strategy(tuple(map(raised, bucket.strategy.steps)))
