"""Say what the search is asked: what a plan of a workload may be (mode or budget, pins), and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Cluster
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.plan.budget import Budget
from fxcomp.plan.compress import Compress
from fxcomp.plan.modes import Content, Mode, error_limit, strategies, strategies_at_momenta, strategies_within
from fxcomp.plan.pins import NO_PINS, Pins
from fxcomp.plan.plan import ExchangePoint
from fxcomp.plan.strategy import Strategy
from fxcomp.search.atoms import atoms_of
from fxcomp.search.descent.problem import NO_BOUNDS, Bounds
from fxcomp.search.losses import Losses
from fxcomp.search.pinned import NOTHING_PINNED, Pinned
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.workload import Workload

LEAST_KEPT = 0.5
"""A strategy that would keep a smaller part of the gradient than this share of what the budget keeps is not offered.

Error feedback delays what is left out, and the wait grows as 1 / kept: one layer must not wait for thousands of steps
so that others need not wait at all. L-GreCo's parameters stay within a factor of 2 to 4 of the reference's, too."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits of one workload's plans."""

    mode: Mode
    bursts: float = 1.0
    """The share of all elements that may come in bursts."""
    pins: Pins = NO_PINS
    budget: Budget | None = None
    """In the place of the mode's limit and compressors."""
    share: float = 1.0
    """Of the limit: what may be spent."""
    at: ExchangePoint = ExchangePoint.GRADIENT
    """Momenta are free of limits: what is left out comes a step later into a mean."""

    @classmethod
    def of(cls, compress: Compress, bursts: float = 1.0, table: ErrorTable = ASSUMED) -> Terms:
        """Read what a user asked for, by errors of Gaussian values unless others are known."""
        asked = compress.budget
        return cls(compress.mode, bursts, compress.pinned, None if asked is None else Budget(asked, table))

    @property
    def table(self) -> ErrorTable:
        """The errors that limits are counted in."""
        return ASSUMED if self.budget is None else self.budget.table

    def by(self, table: ErrorTable) -> Terms:
        """The same, with a budget counted in other errors."""
        return self if self.budget is None else replace(self, budget=Budget(self.budget.asked, table))

    def limit(self, workload: Workload, cluster: Cluster) -> float:
        """Return the relative squared error that a plan may have."""
        if self.at is ExchangePoint.MOMENTUM:
            return math.inf
        limit = error_limit(self.mode) if self.budget is None else self.budget.limit(workload.shapes, cluster)
        return self.share * limit

    def losses(self, workload: Workload, cluster: Cluster) -> Losses:
        return Losses(workload.gradients, cluster, self.table)

    def strategies(
        self, limit: float, losses: Losses, cluster: Cluster, content: Content, *, offload: bool = True
    ) -> tuple[Strategy, ...]:
        """Return every strategy that a bucket of this content may have, with the limit of the whole plan."""
        if self.at is ExchangePoint.MOMENTUM:
            return strategies_at_momenta(cluster, content, offload=offload)
        if self.budget is None:
            mode = self.mode if limit > 0 else Mode.LOSSLESS
            return strategies(mode, cluster, content, offload=offload)
        offered = strategies_within(limit, cluster, content, offload=offload)
        least = LEAST_KEPT * (1 - limit) * losses.elements
        return tuple(each for each in offered if each.is_dense or losses.elements - losses.of(each) >= least)

    def notes(self, workload: Workload, cluster: Cluster) -> tuple[str, ...]:
        """Say that pins alone lose more than the limit, if they do."""
        losses, limit = self.losses(workload, cluster), self.limit(workload, cluster)
        pinned, elements = Pinned.of(self.pins, workload, cluster, losses), workload.elements
        if not pinned.exceeds(limit * elements):
            return ()
        by = f"mode {self.mode.value}" if self.budget is None else f"within={self.budget.asked}"
        return (
            f"What is pinned by hand loses {pinned.lost / max(1, elements):.2g} of the gradient's square, more than the"
            f" {limit:.2g} that {by} allows in all. So everything else stays dense.",
        )


Choices = Mapping[Content, tuple[Strategy, ...]]
"""The strategies that buckets of each content may have."""


@dataclass(frozen=True, slots=True)
class Question:
    """The plans that are searched among."""

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


def questions_of(prices: StepPrices, terms: Terms) -> list[Question]:
    """Ask for what terms offer: vectors apart, and in buckets with matrices; large gradients cut, and whole.

    Where latency rules, one bucket less is worth more than the vectors' precision, or than stages that overlap. What is
    pinned goes its own way, and what it loses is spent. If that is too much, all else is dense.
    """
    workload, cluster, offload = prices.workload, prices.cluster, prices.costs.offloads
    losses, limit = terms.losses(workload, cluster), terms.limit(workload, cluster)
    pinned = Pinned.of(terms.pins, workload, cluster, losses, offload=offload)
    lossable = limit * workload.elements
    left = 0.0 if pinned.exceeds(lossable) else limit
    has_both = len({gradient.is_vector for gradient in workload.gradients}) == 2
    has_parts = len(atoms_of(workload, cluster.world_size)) > len(workload.gradients)
    is_mixed = has_both and terms.at is ExchangePoint.GRADIENT
    groupings = [(Content.MATRICES, Content.VECTORS), *([(Content.MIXED,)] if is_mixed else [])]
    return [
        Question(
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
