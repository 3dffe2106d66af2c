"""Group pinned gradients by rule into strands, which share no buckets.

Errors of pinned gradients count toward the limit. If these errors exceed the limit, all other gradients stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from fxcomp.cluster.cluster import Cluster
from fxcomp.plan.budget import is_bursty
from fxcomp.plan.pins import Pins
from fxcomp.plan.strategy import Strategy
from fxcomp.search.descent.cells import SAME
from fxcomp.search.descent.problem import Bounds
from fxcomp.search.losses import Losses
from fxcomp.search.workload import Workload


@dataclass(frozen=True, slots=True)
class PinnedStrand:
    """Gradients that share buckets only with each other, and the strategies of these buckets."""

    text: str
    """Compressor or strategy, as written in `pins`."""
    strategies: tuple[Strategy, ...]
    names: Collection[str]
    elements: int


@dataclass(frozen=True, slots=True)
class Pinned:
    strands: tuple[PinnedStrand, ...] = ()
    lost: float = 0.0
    """Largest possible error of the pinned gradients, in elements."""
    bursting: float = 0.0
    """Largest number of pinned elements with bursty strategies (rare large values)."""
    strand_of: dict[str, PinnedStrand] = field(default_factory=dict[str, PinnedStrand])

    @classmethod
    def of(cls, pins: Pins, workload: Workload, cluster: Cluster, losses: Losses, *, offload: bool = True) -> Pinned:
        decided = pins.decided(gradient.name for gradient in workload.gradients)
        names: dict[str, list[str]] = {}
        for rule, found in decided.items():
            names.setdefault(rule.text, []).extend(found)
        strategies = {rule.text: rule.strategies(cluster, offload=offload) for rule in decided}
        sizes = workload.sizes
        strands = tuple(
            PinnedStrand(text, strategies[text], frozenset(found), sum(sizes[name] for name in found))
            for text, found in names.items()
        )
        places = {
            text: [number for number, gradient in enumerate(workload.gradients) if gradient.name in strand.names]
            for text, strand in zip(names, strands, strict=True)
        }
        lost = sum(max(losses.of(each, places[strand.text]) for each in strand.strategies) for strand in strands)
        bursting = sum(
            strand.elements for strand in strands if any(is_bursty(each, cluster) for each in strand.strategies)
        )
        return cls(strands, lost, bursting, {name: strand for strand in strands for name in strand.names})

    def exceeds(self, lossable: float) -> bool:
        """Return whether the error of pinned gradients exceeds the limit `lossable`, in elements."""
        return self.lost > lossable * (1 + SAME)

    def bounds(self, workload: Workload, lossable: float, bursts: float = 1.0) -> Bounds:
        """Return a plan's limits, in elements: at least the error and bursts of the pinned gradients."""
        bursting = math.inf if bursts >= 1 else max(workload.elements * bursts, self.bursting)
        return Bounds(max(lossable, self.lost) * (1 + SAME), bursting)


NOTHING_PINNED = Pinned()
