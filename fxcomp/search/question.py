"""The input of the search: allowed plans (mode or budget, pins) and their limits."""

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
"""Minimum of (1 - error of a strategy) / (1 - error limit of the plan).

Error feedback delays the omitted part of a gradient by a time that grows as 1 / (1 - error), which must not be
thousands of steps.
"""


@dataclass(frozen=True, slots=True)
class Terms:
    mode: Mode
    bursts: float = 1.0
    """Maximum fraction of elements with bursty strategies, which send an element rarely and then a large value."""
    pins: Pins = NO_PINS
    budget: Budget | None = None
    """Error budget that replaces the mode's limit and compressors."""
    share: float = 1.0
    """Fraction of the error limit that may be used."""
    at: ExchangePoint = ExchangePoint.GRADIENT
    """Exchanged tensor. Plans for momenta have no error limit."""

    @classmethod
    def of(cls, compress: Compress, bursts: float = 1.0, table: ErrorTable = ASSUMED) -> Terms:
        """Build terms from user options. Without a `table`, compression errors on Gaussian values are assumed."""
        asked = compress.budget
        return cls(compress.mode, bursts, compress.pinned, None if asked is None else Budget(asked, table))

    @property
    def table(self) -> ErrorTable:
        return ASSUMED if self.budget is None else self.budget.table

    def by(self, table: ErrorTable) -> Terms:
        return self if self.budget is None else replace(self, budget=Budget(self.budget.asked, table))

    def limit(self, workload: Workload, cluster: Cluster) -> float:
        """Return the maximum relative squared error of a plan."""
        if self.at is ExchangePoint.MOMENTUM:
            return math.inf
        limit = error_limit(self.mode) if self.budget is None else self.budget.limit(workload.shapes, cluster)
        return self.share * limit

    def losses(self, workload: Workload, cluster: Cluster) -> Losses:
        return Losses(workload.gradients, cluster, self.table)

    def strategies(
        self, limit: float, losses: Losses, cluster: Cluster, content: Content, *, offload: bool = True
    ) -> tuple[Strategy, ...]:
        """Return the strategies allowed for a bucket of this content, given the plan's limit."""
        if self.at is ExchangePoint.MOMENTUM:
            return strategies_at_momenta(cluster, content, offload=offload)
        if self.budget is None:
            mode = self.mode if limit > 0 else Mode.LOSSLESS
            return strategies(mode, cluster, content, offload=offload)
        offered = strategies_within(limit, cluster, content, offload=offload)
        least = LEAST_KEPT * (1 - limit) * losses.elements
        return tuple(each for each in offered if each.is_dense or losses.elements - losses.of(each) >= least)

    def notes(self, workload: Workload, cluster: Cluster) -> tuple[str, ...]:
        losses, limit = self.losses(workload, cluster), self.limit(workload, cluster)
        pinned, elements = Pinned.of(self.pins, workload, cluster, losses), workload.elements
        if not pinned.exceeds(limit * elements):
            return ()
        by = f"mode {self.mode.value}" if self.budget is None else f"within={self.budget.asked}"
        return (
            f"The pinned parameters lose {pinned.lost / max(1, elements):.2g} of the gradient's square, more than the"
            f" {limit:.2g} that {by} allows in all. So everything else stays dense.",
        )


Choices = Mapping[Content, tuple[Strategy, ...]]


@dataclass(frozen=True, slots=True)
class Question:
    """Set of plans to search."""

    choices: Choices
    bounds: Bounds = NO_BOUNDS
    cuts: bool = True
    """True to cut large gradients into atoms.

    Payload sizes are sums over atoms, which overestimates the low-rank factors of a matrix cut into several atoms.
    """
    pinned: Pinned = NOTHING_PINNED
    losses: Losses | None = None
    """Errors of strategies on the workload's gradients; None to assume Gaussian gradient values."""
    prices_errors: bool = False
    """True to try several prices of error, to find the fastest plan within the limit."""


def questions_of(prices: StepPrices, terms: Terms) -> list[Question]:
    """Build the questions: vectors in their own buckets or together with matrices, large gradients cut or whole.

    Vectors in their own buckets are exchanged more precisely, and cut gradients overlap more. But if latency dominates,
    one bucket fewer can be faster. Pinned gradients have their own buckets.
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
