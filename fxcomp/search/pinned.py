"""Give the gradients that are pinned by hand lanes of their own, with the strategies that their rules name.

What they lose counts toward the mode's limits. If they alone lose more, everything else stays dense.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from fxcomp.cluster.cluster import Cluster
from fxcomp.plan.error_budget import is_bursty, strategy_error
from fxcomp.plan.modes import Mode, error_limit
from fxcomp.plan.pins import Pins
from fxcomp.plan.strategy import Strategy
from fxcomp.search.descent.parts import SAME
from fxcomp.search.descent.problem import Bounds
from fxcomp.search.workload import Workload


@dataclass(frozen=True, slots=True)
class PinnedLane:
    """Gradients that share buckets with each other alone, and the strategies that these may have."""

    text: str
    """The compressor or strategy that rules name."""
    strategies: tuple[Strategy, ...]
    names: Collection[str]
    elements: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """What pins mean for one workload on one cluster."""

    lanes: tuple[PinnedLane, ...] = ()
    lost: float = 0.0
    """The most that they may lose, in elements."""
    bursting: float = 0.0
    """The most elements of theirs that may come in bursts."""
    lane_of: dict[str, PinnedLane] = field(default_factory=dict[str, PinnedLane])
    """By the gradient's name."""

    @classmethod
    def of(cls, pins: Pins, workload: Workload, cluster: Cluster, *, offload: bool = True) -> Pinned:
        decided = pins.decided(gradient.name for gradient in workload.gradients)
        names: dict[str, list[str]] = {}
        for rule, found in decided.items():
            names.setdefault(rule.text, []).extend(found)
        strategies = {rule.text: rule.strategies(cluster, offload=offload) for rule in decided}
        sizes = workload.sizes
        lanes = tuple(
            PinnedLane(text, strategies[text], frozenset(found), sum(sizes[name] for name in found))
            for text, found in names.items()
        )
        lost = sum(lane.elements * max(strategy_error(each, cluster) for each in lane.strategies) for lane in lanes)
        bursting = sum(lane.elements for lane in lanes if any(is_bursty(each, cluster) for each in lane.strategies))
        return cls(lanes, lost, bursting, {name: lane for lane in lanes for name in lane.names})

    def mode_of_others(self, workload: Workload, mode: Mode) -> Mode:
        """Return the mode for all that is not pinned: lossless where pins alone lose more than the mode allows."""
        return Mode.LOSSLESS if self.exceeds(workload, mode) else mode

    def exceeds(self, workload: Workload, mode: Mode) -> bool:
        """Tell that pins alone lose more than a mode allows."""
        return self.lost > _elements(workload) * error_limit(mode) * (1 + SAME)

    def bounds(self, workload: Workload, mode: Mode, bursts: float = 1.0) -> Bounds:
        """Return a plan's limits: the mode's and the optimizer's, or what pins alone take if that is more."""
        elements = _elements(workload)
        bursting = math.inf if bursts >= 1 else max(elements * bursts, self.bursting)
        return Bounds(max(elements * error_limit(mode), self.lost) * (1 + SAME), bursting)


NOTHING_PINNED = Pinned()


def pins_note(pins: Pins, workload: Workload, cluster: Cluster, mode: Mode) -> tuple[str, ...]:
    """Say that pins alone lose more than the mode allows, if they do."""
    pinned = Pinned.of(pins, workload, cluster)
    if not pinned.exceeds(workload, mode):
        return ()
    share = pinned.lost / max(1, _elements(workload))
    return (
        f"What is pinned by hand loses {share:.2g} of the gradient's square, more than the {error_limit(mode):.2g} that"
        f" mode {mode.value} allows in all. So everything else stays dense.",
    )


def _elements(workload: Workload) -> int:
    return workload.dense_bytes // 4
