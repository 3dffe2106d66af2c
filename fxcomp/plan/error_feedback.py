"""Error feedback: what compression leaves out of a gradient is added to the next one. Its options, and what is refused.

    p = g + e            what a rank compresses: its gradient and its residual
    e <- p - C(p)        what the payload C(p) does not stand for

A residual is in the gradient's unit, one fp32 value an element and rank, and the optimizer runs behind the mean of the
payloads. Over all steps, payloads and the last residual add up to the gradients (Stich et al. 2018, Karimireddy et al.
2019). With momentum correction a rank compresses its own momentum instead of its gradient (Lin et al. 2018):

    u <- m u + g         the velocity of its own gradients
    p = u + e
    u <- 0               where a value was sent as it is: momentum does not go on from before what is new by then

`ErrorFeedback` holds the variants; `check_experiment`, `check_momentum` and `check_plan` refuse what diverges or trains
badly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor
from fxcomp.compressors.facts import Feedback
from fxcomp.errors import BadOption, DivergingCombination
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.error_budget import POLLUTING_ERROR, POLLUTING_SHARE, polluting_share, strategy_error
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

FIRST_DENSITY = 0.25
"""The share of values that a density warm-up sends first, and by which each stage multiplies it (Lin et al. 2018)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
    """How what compression leaves out is fed back. The defaults are classic error feedback where it is needed.

    `scale_with_lr`: compress g + (lr_before / lr_now) e, so that a residual weighs in the update what it would have
    weighed when it was left out (Zheng et al. 2019). It matters where the learning rate drops in steps: without it,
    what a large rate left out is applied at the small one. A rate of zero is passed over. A step whose rate did not
    change does nothing more; otherwise residuals are read and written once.

    `dense_steps`: so many first steps send the same buckets uncompressed, and residuals stay zero.

    `density_steps`: over so many steps, behind the dense ones, compressors with a ratio send 25 %, then 6.25 %, and so
    on, down to their own ratio (Lin et al. 2018). Each stage is compiled beforehand: shapes are static.

    `momentum`: each rank keeps the momentum of its own gradients before compression, in the place of the optimizer's,
    which must have none (Lin et al. 2018). What waits in a residual then gathers momentum as it would have if it had
    been sent at once. Where compressors send values as they are, such as topk, the velocity of what was sent starts
    anew. In all other buckets, dense ones too, the mean of the ranks' velocities is the velocity of the mean: a dense
    plan trains as with the optimizer's momentum. One more fp32 value an element and rank, in the optimizer's stead.
    The optimizer's weight decay stays behind it, outside of the velocity: what `SGD(momentum=m, weight_decay=w)`
    does needs about w / (1 - m) here.

    `everywhere`: also around compressors that can do without, such as bf16: what a rank rounds away is not lost, for
    one more pass. Sums on the wire still round.

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
        """Whether a compressor gets a residual."""
        match compressor.feedback:
            case Feedback.REQUIRED:
                return not self.off
            case Feedback.OPTIONAL:
                return self.everywhere
            case Feedback.FORBIDDEN:
                return self.everywhere and self.allow_diverging

    def stages(self, plan: Plan) -> tuple[Stage, ...]:
        """The plans to follow one after the other; the last one is the plan itself."""
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
    """The same buckets over the same levels, uncompressed."""
    strategies: list[Strategy] = []
    for bucket in plan.buckets:
        first = bucket.strategy.collectives[0]
        by_level = first.kind is CollectiveKind.REDUCE_SCATTER
        strategies.append(Strategy.hierarchical(None) if by_level else Strategy.flat(None, level=first.level))
    return plan.with_strategies(strategies)


def _densities(plan: Plan) -> tuple[float, ...]:
    """The densities above the smallest ratio of the plan, falling."""
    ratios = [ratio for bucket in plan.buckets if (ratio := _ratio(bucket.strategy.compressor)) is not None]
    stages = math.ceil(math.log(min(ratios), FIRST_DENSITY) - 1e-9) if ratios else 0
    return tuple(FIRST_DENSITY**k for k in range(1, stages + 1) if FIRST_DENSITY**k > min(ratios))


def _ratio(compressor: Compressor | None) -> float | None:
    """The share of values that a compressor sends; None if that is no parameter of it."""
    named = compressor is not None and any(p.name == "ratio" for p in compressor.facts.parameters)
    return float(getattr(compressor, "ratio")) if named else None  # noqa: B009  # of some compressors only


def _with_density(plan: Plan, density: float) -> Plan:
    """The plan with every smaller ratio raised to a density."""
    return plan.with_strategies([_strategy_with_density(bucket, density) for bucket in plan.buckets])


def _strategy_with_density(bucket: Bucket, density: float) -> Strategy:
    def raised(step: Any) -> Any:
        ratio = _ratio(getattr(step, "compressor", None))
        if ratio is None or ratio >= density:
            return step
        return replace(step, compressor=replace(step.compressor, ratio=density))

    return Strategy(tuple(map(raised, bucket.strategy.steps)))


# Refusals


def check_is_feedback(options: object) -> None:
    """Refuse what is no ErrorFeedback, such as a dict of its options."""
    if not isinstance(options, ErrorFeedback):
        raise BadOption(
            f"error_feedback is an ErrorFeedback, not a {type(options).__name__}.\n"
            "  Pass fxcomp.ErrorFeedback(...), or leave error_feedback= out."
        )


def check_experiment(options: ErrorFeedback, *, planned: bool) -> None:
    """Refuse options for experiments where fxcomp chooses the plan: it chooses none that they are for."""
    for name in ("off", "allow_diverging"):
        if getattr(options, name) and not planned:
            raise BadOption(
                f"ErrorFeedback({name}=True) is for experiments with a given plan: fxcomp chooses none that needs it.\n"
                f"  Pass plan=, or leave {name}=True out."
            )


def check_momentum(
    options: ErrorFeedback, optimizer: torch.optim.Optimizer, *, clips: bool = False, alone: bool = False
) -> None:
    """Refuse what momentum correction cannot go with: another momentum, clipping, and one rank alone."""
    if not options.momentum:
        return
    which = f"ErrorFeedback(momentum={options.momentum:g})"
    kind = type(optimizer).__name__
    if is_adaptive(optimizer):
        raise BadOption(
            f"{which} keeps the momentum of gradients, but {kind} has one of its own, and divides by the root of the"
            f" mean square of what it is given.\n  Use torch.optim.SGD without momentum, or leave momentum= out."
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("momentum", 0.0) != 0:
            raise BadOption(
                f"{which} keeps the momentum before compression, but parameter group {number} of {kind} has"
                f" momentum={group['momentum']:g}: it would be applied twice.\n"
                f"  Give {kind} momentum=0, or leave momentum= of ErrorFeedback out."
            )
    if clips:
        raise BadOption(
            f"max_grad_norm clips the mean of what the ranks send, which with {which} is momentum and no gradient.\n"
            "  Leave max_grad_norm or momentum= of ErrorFeedback out."
        )
    if alone:
        raise BadOption(
            f"{which} keeps the momentum of what ranks send each other, and there is one rank: nothing is sent.\n"
            f"  On one rank, give momentum={options.momentum:g} to {kind}."
        )


def check_plan(
    options: ErrorFeedback,
    plan: Plan,
    shapes: Mapping[str, Sequence[int]],
    cluster: Cluster,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Refuse a plan that diverges by design or trains badly. `optimizer` is None where it is not known."""
    if options.allow_diverging:
        return
    for compressor in _compressors(plan, shapes, cluster):
        if compressor.feedback is Feedback.FORBIDDEN and options.everywhere:
            raise DivergingCombination(
                f"error feedback around {compressor} diverges: it is unbiased, and its error can be larger than what"
                " it is given, so that the residual grows without bound.\n"
                "  Leave everywhere=True out: it needs no feedback. To see it diverge, add allow_diverging=True."
            )
        if compressor.feedback is Feedback.REQUIRED and options.off:
            raise DivergingCombination(
                f"{compressor} without error feedback stays away from the optimum, or diverges: its error has a"
                " direction, which steps add up.\n"
                "  Leave off=True out, or use bf16, which can do without. To see it fail, add allow_diverging=True."
            )
    share = polluting_share(plan, cluster)
    if optimizer is not None and is_adaptive(optimizer) and share > POLLUTING_SHARE and not options.off:
        worst = max(plan.buckets, key=lambda bucket: strategy_error(bucket.strategy, cluster)).strategy.compressor
        raise DivergingCombination(
            f"{share:.0%} of all elements come through compressors such as {worst}, which leave out more than"
            f" {POLLUTING_ERROR:.0%} of a gradient's square and feed it back in bursts. {type(optimizer).__name__}"
            f" divides by the root of the mean square, which bursts inflate: at most {POLLUTING_SHARE:.0%} are"
            " allowed.\n"
            "  Use int8, int4 or sign, or torch.optim.SGD, or let fxcomp choose. To do it all the same, pass"
            " error_feedback=ErrorFeedback(allow_diverging=True)."
        )


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer divides by the root of the gradient's mean square, as Adam does."""
    return any("betas" in group for group in optimizer.param_groups)


def bursts_of(optimizer: torch.optim.Optimizer) -> float:
    """The part of all elements that may come in bursts before an optimizer."""
    return POLLUTING_SHARE if is_adaptive(optimizer) else 1.0


def _compressors(plan: Plan, shapes: Mapping[str, Sequence[int]], cluster: Cluster) -> Iterator[Compressor]:
    """As they are bound: what they need may follow from the number of ranks."""
    for bucket in plan.buckets:
        bound = bucket.strategy.bound([shapes[name] for name in bucket.names], cluster)
        if bound is not None:
            yield bound
