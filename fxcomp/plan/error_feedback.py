"""Describe error feedback, which adds what compression leaves out of a gradient to the next one.

    p = g + e            what a rank compresses: its gradient and its residual
    e <- p - C(p)        what the payload C(p) does not stand for

A residual is in the gradient's unit, one fp32 value an element and rank, and the optimizer runs after the mean of the
payloads. Over all steps, payloads and the last residual add up to the gradients (Stich et al. 2018, Karimireddy et al.
2019). With momentum correction a rank compresses its own momentum instead of its gradient (Lin et al. 2018):

    u <- m u + g         the velocity of its own gradients
    p = u + e
    u <- 0               where a value was sent as it is: momentum does not go on from before what is new by then
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fxcomp.compressors import Compressor
from fxcomp.compressors.facts import Feedback
from fxcomp.errors import BadOption
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

FIRST_DENSITY = 0.25
"""The share of values that a density warm-up sends first, and by which each stage multiplies it (Lin et al. 2018)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
    """The variant of error feedback. The defaults are classic error feedback where it is needed.

    `scale_with_lr`: compress g + (lr_before / lr_now) e, so that a residual weighs in the update what it would have
    weighed when it was left out (Zheng et al. 2019). It matters where the learning rate drops in steps: without it,
    what a large rate left out is applied at the small one. A rate of zero is passed over. A step whose rate did not
    change does nothing more; otherwise residuals are read and written once.

    `dense_steps`: so many first steps send the same buckets uncompressed, and residuals stay zero.

    `density_steps`: over so many steps, after the dense ones, compressors with a ratio send 25 %, then 6.25 %, and so
    on, down to their own ratio (Lin et al. 2018). Each stage is compiled beforehand: shapes are static.

    `momentum`: each rank keeps the momentum of its own gradients before compression, in the place of the optimizer's,
    which must have none (Lin et al. 2018). What waits in a residual then gathers momentum as it would have if it had
    been sent at once. Where compressors send values as they are, such as topk, the velocity of what was sent starts
    again. In all other buckets, dense ones too, the mean of the ranks' velocities is the velocity of the mean: a dense
    plan trains as with the optimizer's momentum. One more fp32 value an element and rank, in the optimizer's stead.
    The optimizer's weight decay stays after it, outside of the velocity: what `SGD(momentum=m, weight_decay=w)`
    does needs about w / (1 - m) here.

    `everywhere`: also around compressors that can do without, such as bf16 and int8: what a rank rounds away is not
    lost, for one more pass. Sums on the wire still round.

    `off`: no feedback. `allow_diverging`: run what is refused otherwise. Both are for experiments, with `plan=`.
    """

    scale_with_lr: bool = False
    dense_steps: int = 0
    density_steps: int = 0
    momentum: float = 0.0
    everywhere: bool = False
    off: bool = False
    allow_diverging: bool = False

    def __post_init__(self) -> None:
        given: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("scale_with_lr", "everywhere", "off", "allow_diverging"):
            if not isinstance(given[name], bool):
                raise BadOption(f"ErrorFeedback.{name} is True or False; it is {given[name]!r}")
        for name in ("dense_steps", "density_steps"):
            steps = given[name]
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
                raise BadOption(f"ErrorFeedback.{name} is a whole number of steps, from 0; it is {steps!r}")
        momentum = given["momentum"]
        if not isinstance(momentum, int | float) or isinstance(momentum, bool) or not 0 <= momentum < 1:
            raise BadOption(f"ErrorFeedback.momentum is from 0 (none) to below 1; it is {momentum!r}")
        if self.off and (self.everywhere or self.scale_with_lr or self.momentum):
            raise BadOption(
                "ErrorFeedback(off=True) has nothing to scale, to correct or to put everywhere.\n"
                "  Leave off=True out, or the other options."
            )

    def surrounds(self, compressor: Compressor) -> bool:
        """Tell that a compressor gets a residual."""
        match compressor.feedback:
            case Feedback.REQUIRED:
                return not self.off
            case Feedback.OPTIONAL:
                return self.everywhere
            case Feedback.FORBIDDEN:
                return self.everywhere and self.allow_diverging

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


CLASSIC = ErrorFeedback()
"""Around compressors that need it, from the first step on."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A plan, and the number of the first step that follows it."""

    first_step: int
    plan: Plan


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
