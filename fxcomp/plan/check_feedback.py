"""Refuse error feedback that diverges or trains badly."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor
from fxcomp.compressors.facts import Feedback
from fxcomp.errors import BadOption, DivergingCombination
from fxcomp.plan.error_budget import POLLUTING_ERROR, polluting_share, strategy_error
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.update_kind import UpdateKind, burst_share, strictest


def check_is_feedback(options: object) -> None:
    """Refuse what is no ErrorFeedback, such as a dict of its options."""
    if not isinstance(options, ErrorFeedback):
        raise BadOption(
            f"feedback is an ErrorFeedback, not a {type(options).__name__}.\n"
            "  Pass fxcomp.ErrorFeedback(...), or leave feedback= out."
        )


def check_experiment(options: ErrorFeedback, *, planned: bool) -> None:
    """Refuse options for experiments where fxcomp chooses the plan: it chooses none that they are for."""
    for name in ("off", "allow_diverging"):
        if getattr(options, name) and not planned:
            raise BadOption(
                f"ErrorFeedback({name}=True) is for experiments with a given plan: fxcomp chooses none that needs it.\n"
                f"  Name a plan, or leave {name}=True out."
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
            f"max_grad_norm and max_grad_value clip the mean of what the ranks send, which with {which} is momentum"
            " and no gradient.\n  Leave clipping or momentum= of ErrorFeedback out."
        )
    if alone:
        raise BadOption(
            f"{which} keeps the momentum of what ranks send each other, and there is one rank: nothing is sent.\n"
            f"  On one rank, give momentum={options.momentum:g} to {kind}."
        )


def check_rates(options: ErrorFeedback, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to scale residuals by learning rates where a parameter group has none."""
    if not options.scale_with_lr:
        return
    for number, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            kind = type(optimizer).__name__
            raise BadOption(
                "ErrorFeedback(scale_with_lr=True) scales residuals where a learning rate changes, but parameter group"
                f" {number} of {kind} has no 'lr': its options are"
                f" {', '.join(sorted(map(repr, group.keys() - {'params'}))) or 'none'}.\n"
                f"  Let {kind} keep its rate in each group as 'lr', or leave scale_with_lr=True out."
            )


def check_plan(
    options: ErrorFeedback,
    plan: Plan,
    shapes: Mapping[str, Sequence[int]],
    cluster: Cluster,
    kinds: Collection[UpdateKind] = (),
) -> None:
    """Refuse a plan that diverges by design or trains badly. `kinds` are those of all updates, if they are known."""
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
    share, bent = polluting_share(plan, cluster), [kind for kind in kinds if not kind.is_linear]
    if share > burst_share(bent) and not options.off:
        worst = max(plan.buckets, key=lambda bucket: strategy_error(bucket.strategy, cluster)).strategy.compressor
        raise DivergingCombination(
            f"{share:.0%} of all elements come through compressors such as {worst}, which leave out more than"
            f" {POLLUTING_ERROR:.0%} of a gradient's square and feed it back in bursts. The optimizer's update is"
            f" {strictest(bent).value}: there delayed errors do not add up, and at most {burst_share(bent):.0%} are"
            " allowed.\n"
            "  Use int8, int4 or sign, or torch.optim.SGD, or let fxcomp choose: name no plan, and no pattern"
            " of pins= that pins these. To do it all the same, pass"
            " Compress(feedback=ErrorFeedback(allow_diverging=True), ...)."
        )


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer divides by the root of the gradient's mean square, as Adam does."""
    return any("betas" in group for group in optimizer.param_groups)


def _compressors(plan: Plan, shapes: Mapping[str, Sequence[int]], cluster: Cluster) -> Iterator[Compressor]:
    """Yield compressors as they are bound: what they need may depend on the number of ranks."""
    for bucket in plan.buckets:
        route = route_of(bucket.strategy, bucket.shapes(shapes), cluster)
        yield from (leg.compressor for leg in route.slots)
