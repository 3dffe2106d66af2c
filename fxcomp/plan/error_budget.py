"""Sum what a plan loses: the relative squared error of every element, which a mode limits."""

from __future__ import annotations

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors.gaussian_error import SHAPE, gaussian_error
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy

POLLUTING_ERROR = 0.5
"""Above it, error feedback sends a value seldom and then in a burst: top-k, low rank. Sign, at 0.36, is below."""

POLLUTING_SHARE = 0.15
"""The share of all elements that may come in bursts under Adam, whose second moment is quadratic in the gradient.

With 1 % top-k everywhere a char-LM ended at 2.308 nats, dense at 2.122. Of these 0.19 nats, 15 % are the 0.03 that four
bits are allowed (measured at both ends; the proportion is assumed)."""


def strategy_error(strategy: Strategy, cluster: Cluster) -> float:
    """Return the relative squared error of a strategy on Gaussian gradients, per rank and round."""
    if strategy.compressor is None:
        return 0.0
    return gaussian_error(strategy.compressor, cluster.ranks_at(strategy.level))


def plan_error(plan: Plan, cluster: Cluster) -> float:
    """Return the relative squared error of the whole gradient, every element alike."""
    elements = sum(bucket.elements for bucket in plan.buckets)
    lost = sum(bucket.elements * strategy_error(bucket.strategy, cluster) for bucket in plan.buckets)
    return lost / elements if elements else 0.0


def polluting_share(plan: Plan, cluster: Cluster) -> float:
    """Return the share of all elements that error feedback sends in bursts."""
    elements = sum(bucket.elements for bucket in plan.buckets)
    bursts = sum(bucket.elements for bucket in plan.buckets if is_bursty(bucket.strategy, cluster))
    return bursts / elements if elements else 0.0


def is_bursty(strategy: Strategy, cluster: Cluster) -> bool:
    """Tell that much is left out at a time, and fed back later."""
    bound = strategy.bound([SHAPE], cluster)
    return bound is not None and bound.needs_error_feedback and strategy_error(strategy, cluster) > POLLUTING_ERROR
