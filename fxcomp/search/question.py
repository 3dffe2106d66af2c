"""Ask for a plan: of what, and what it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxcomp.plan.modes import Content
from fxcomp.plan.strategy import Strategy
from fxcomp.search.atoms import atoms_of
from fxcomp.search.descent.problem import NO_BOUNDS, Bounds, TracedPrices
from fxcomp.search.losses import Losses
from fxcomp.search.pinned import NOTHING_PINNED, Pinned, elements_of
from fxcomp.search.terms import Terms
from fxcomp.search.workload import Workload

Choices = Mapping[Content, tuple[Strategy, ...]]
"""The strategies that buckets of each content may have."""


@dataclass(frozen=True, slots=True)
class Question:
    """Whose plan, and what it may be."""

    workload: Workload
    choices: Choices
    bounds: Bounds = NO_BOUNDS
    cuts: bool = True
    """Large gradients are cut. The sizes of parts add up, which prices the factors of a joined matrix too high."""
    pinned: Pinned = NOTHING_PINNED
    """Gradients that are no part of `choices`."""
    losses: Losses | None = None
    """Errors of strategies; of Gaussian values if None."""
    prices_errors: bool = False
    """Look for the price of an element's loss at which the limit is spent best."""


def questions_of(workload: Workload, traced: TracedPrices, terms: Terms) -> list[Question]:
    """Ask for what terms offer: vectors apart, and in buckets with matrices; large gradients cut, and whole.

    Where latency rules, one bucket less is worth more than the vectors' precision, or than stages that overlap. What is
    pinned goes its own way, and what it loses is spent. If that is too much, all else is dense.
    """
    cluster, offload = traced.cluster, traced.costs.offloads
    losses, limit = terms.losses(workload, cluster), terms.limit(workload, cluster)
    pinned = Pinned.of(terms.pins, workload, cluster, losses, offload=offload)
    lossable = limit * elements_of(workload)
    left = 0.0 if pinned.exceeds(lossable) else limit
    has_both = len({gradient.is_vector for gradient in workload.gradients}) == 2
    has_parts = len(atoms_of(workload, cluster.world_size)) > len(workload.gradients)
    groupings = [(Content.MATRICES, Content.VECTORS), *([(Content.MIXED,)] if has_both else [])]
    return [
        Question(
            workload,
            {each: terms.strategies(left, losses, cluster, each, offload=offload) for each in contents},
            pinned.bounds(workload, lossable, terms.bursts),
            cuts,
            pinned,
            losses,
            prices_errors=terms.budget is not None,
        )
        for cuts in ((True, False) if has_parts else (True,))
        for contents in groupings
    ]
