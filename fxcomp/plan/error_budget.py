"""Sum what a plan loses: the relative squared error of every element, which a mode limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.seating import Axis
from fxcomp.compressors import Compressor
from fxcomp.compressors.facts import Bias
from fxcomp.compressors.gaussian_error import SHAPE, gaussian_error
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.plan.interpret import Standing
from fxcomp.plan.plan import Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.steps import Compress
from fxcomp.plan.strategy import Strategy

POLLUTING_ERROR = 0.5
"""Above it, error feedback sends a value seldom and then in a burst: top-k. Sign, at 0.36, and low rank are below."""


ErrorOf = Callable[[Compressor, int], float]
"""A compressor's loss among so many ranks, relative and squared."""


def strategy_error(strategy: Strategy, cluster: Cluster, error_of: ErrorOf = gaussian_error) -> float:
    """Return the relative squared error of a strategy, by default on Gaussian gradients.

    Gradients are taken to be orthogonal from rank to rank. One compression loses e of what it is given, and averaging
    loses none of that: sum and errors shrink alike. The next compression is given the sum with the error in it.
    Rounding adds to it: (1 + e1) (1 + e2) - 1. What only leaves values out keeps 1 - e1 of it, of which the next loses
    its share: 1 - (1 - e1) (1 - e2). `ErrorTable.errors_of` has measured errors of one gradient; the next compression
    is taken to lose as much of the sum as it would of that gradient.
    """
    kept, grown, beyond = _kept_and_grown(strategy, cluster, error_of, max)
    return beyond + (1.0 - kept * (2.0 - grown) if kept < 1.0 else grown - 1.0)


def strategy_errors(strategy: Strategy, cluster: Cluster, errors_of: Callable[[Compressor, int], Any]) -> Any:
    """Return the same for many gradients at once; `errors_of` gives an array with an entry for each."""
    kept, grown, beyond = _kept_and_grown(strategy, cluster, errors_of, np.maximum)
    where: Any = np.where
    return beyond + where(kept < 1.0, 1.0 - kept * (2.0 - grown), grown - 1.0)


def _kept_and_grown(
    strategy: Strategy, cluster: Cluster, error_of: Callable[[Compressor, int], Any], larger: Callable[[Any, Any], Any]
) -> tuple[Any, Any, Any]:
    """Multiply what each compression keeps, of those that leave values out, and what the others add.

    What one of the former loses beyond all that there is, by a strange table, is added up: nothing is kept of it twice.
    """
    kept: Any = 1.0
    grown: Any = 1.0
    beyond: Any = 0.0
    for held, step in zip(strategy.held, strategy.steps, strict=False):
        if isinstance(step, Compress):
            error = error_of(step.compressor, _ranks_missing(held, cluster))
            if step.compressor.bias is Bias.BIASED:
                kept = kept * larger(1 - error, 0.0)
                beyond = beyond + larger(error - 1, 0.0)
            else:
                grown = grown * (1 + error)
    return kept, grown, beyond


def _ranks_missing(held: Standing, cluster: Cluster) -> int:
    return math.prod(cluster.length_of(axis) for axis in Axis if axis not in held.summed)


def plan_error(plan: Plan, cluster: Cluster, table: ErrorTable = ASSUMED) -> float:
    """Return the relative squared error of the whole gradient.

    Every gradient weighs as much as its squares in the table, a part of one as much as its share of the elements.
    Without a table every element weighs the same.
    """
    if not table.rows:
        elements = sum(bucket.elements for bucket in plan.buckets)
        lost = sum(bucket.elements * strategy_error(bucket.strategy, cluster) for bucket in plan.buckets)
        return lost / elements if elements else 0.0
    sizes = plan.sizes
    squares = lost = 0.0
    for bucket in plan.buckets:
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            part = table.squares_of(name, sizes[name]) * (size / sizes[name]) if size else 0.0
            squares += part
            lost += part * strategy_error(bucket.strategy, cluster, table.errors_of(name))
    return lost / squares if squares else 0.0


def polluting_share(plan: Plan, cluster: Cluster) -> float:
    """Return the share of all elements that error feedback sends in bursts."""
    elements = sum(bucket.elements for bucket in plan.buckets)
    bursts = sum(bucket.elements for bucket in plan.buckets if is_bursty(bucket.strategy, cluster))
    return bursts / elements if elements else 0.0


def is_bursty(strategy: Strategy, cluster: Cluster) -> bool:
    """Return whether much is left out at a time, and fed back later."""
    first = strategy.compressor
    if first is None or strategy_error(strategy, cluster) <= POLLUTING_ERROR:
        return False
    return any(each.compressor.needs_error_feedback for each in route_of(strategy, [SHAPE], cluster).slots)
