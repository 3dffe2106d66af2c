"""Correct the prices of collectives by what those of a running step took: a link's latency, its bandwidth, or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cost.measured import MeasuredCollective
from fxcomp.cost.piecewise import Fit
from fxcomp.cost.table import CostTable
from fxcomp.graph.lines import CostKind
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.step.drift.judge import NOISE, Finding

SOURCE = "measured while training"

MINOR = 4
"""A collective so many times smaller than another that changed is ignored: it may only be late because the link was
busy (assumed: several under way share it, which the order of launches does not show)."""

LARGE_BYTES = 64 << 20
"""The size at which a collective's bandwidth is read off its price."""


def link_factors(finding: Finding, costs: CostTable, cluster: Cluster) -> tuple[float, float]:
    """Find the factors of latency and of time on the wire that explain what was measured, the simplest ones.

    First the larger share of the price alone is scaled, then the other alone, by the sums over all sizes; then both, by
    least squares. Where nothing fits every size, the first that is possible keeps the sum.
    """
    kind, level = collective_of(finding.cost.what)
    parts: list[tuple[float, float, float]] = []
    for size, predicted, measured in finding.parts:
        alpha_us, wire_us = price_shares(kind, level, size, costs, cluster)
        one_us = alpha_us + wire_us
        if measured > 0 and one_us > 0:
            parts.append((alpha_us, wire_us, one_us * measured / predicted if predicted else measured))
    alpha_us, wire_us, took_us = (sum(part[k] for part in parts) for k in range(3))
    wire = (took_us - alpha_us) / wire_us if wire_us else math.nan
    latency = (took_us - wire_us) / alpha_us if alpha_us else math.nan
    alone = [(1.0, wire), (latency, 1.0)]
    candidates = [*(alone if wire_us > alpha_us else reversed(alone)), _least_both(parts)]
    possible = [each for each in candidates if min(each) > 0 and math.isfinite(sum(each))]
    for factors in possible:
        if _misfit(factors, parts) <= NOISE[CostKind.COLLECTIVE]:
            return factors
    # Where collectives share the link, what each took is blurred; what all of them took together is not.
    return possible[0] if possible else (finding.ratio, finding.ratio)


def price_shares(
    kind: CollectiveKind, level: Level, size: int, costs: CostTable, cluster: Cluster
) -> tuple[float, float]:
    """Split the table's price of one collective into latency and time on the wire, in us."""
    alpha_us = costs.collective_us(kind, level, 0, cluster)
    return alpha_us, max(0.0, costs.collective_us(kind, level, size, cluster) - alpha_us)


def _least_both(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Minimize the sum of squared relative errors over both factors; nan where there is only one size."""
    aa = sum((a / m) ** 2 for a, _, m in parts)
    ww = sum((w / m) ** 2 for _, w, m in parts)
    aw = sum(a * w / m**2 for a, w, m in parts)
    a1, w1 = sum(a / m for a, _, m in parts), sum(w / m for _, w, m in parts)
    determinant = aa * ww - aw * aw
    if determinant <= 1e-9 * aa * ww:
        return math.nan, math.nan
    return (a1 * ww - w1 * aw) / determinant, (w1 * aa - a1 * aw) / determinant


def _misfit(factors: tuple[float, float], parts: Sequence[tuple[float, float, float]]) -> float:
    """Return the largest relative error of any part."""
    return max((abs((factors[0] * a + factors[1] * w) / m - 1) for a, w, m in parts), default=0.0)


def with_links(costs: CostTable, findings: Sequence[Finding], cluster: Cluster) -> CostTable:
    """Scale collectives over links that have changed: those in use by their own factors, others by the largest's.

    Another collective over the same link that the plan does not use is corrected like those that it does.
    """
    if not findings:
        return costs
    largest = max(finding.cost.size for finding in findings)
    own = {
        collective_of(finding.cost.what): link_factors(finding, costs, cluster)
        for finding in sorted(findings, key=lambda finding: -finding.cost.size)
        if finding.cost.size * MINOR >= largest
    }
    levels = {level: cluster.topology_at(level).text for level in Level if cluster.ranks_at(level) > 1}
    fits = {**costs.collectives}
    for level, sits in levels.items():
        shared = [factors for (_, other), factors in own.items() if _same_link(level, other, cluster)]
        for kind in CollectiveKind:
            known, factors = costs.collectives.get((kind, sits)), own.get((kind, level))
            if shared and (known or any(level is other for _, other in own)):
                known = known or _line(kind, level, costs, cluster)
                fit = scaled_fit(known.fit, *(factors or shared[0]))
                fits[kind, sits] = replace(known, fit=fit, source=SOURCE)
    return replace(costs, collectives=fits)


def _line(kind: CollectiveKind, level: Level, costs: CostTable, cluster: Cluster) -> MeasuredCollective:
    """Price a collective that has no measurement of its own, as the table does it by other means."""
    alpha_us, wire_us = price_shares(kind, level, LARGE_BYTES, costs, cluster)
    return MeasuredCollective(cluster.ranks_at(level), Fit.line(alpha_us, wire_us / LARGE_BYTES), SOURCE)


def _same_link(level: Level, other: Level, cluster: Cluster) -> bool:
    """Return whether collectives at two levels are limited by the same links."""

    def is_inside(it: Level) -> bool:
        return it is Level.INTRA or (it is Level.WORLD and cluster.hosts == 1)

    return is_inside(level) == is_inside(other)


def collective_of(what: str) -> tuple[CollectiveKind, Level]:
    """Read `all_reduce@world`."""
    kind, _, level = what.partition("@")
    return CollectiveKind(kind), Level(level)


def scaled_fit(fit: Fit, at_zero: float, slope: float) -> Fit:
    """Scale a fit's time at zero and its growth."""
    start_us = fit.pieces[0].at_zero_us
    pieces = tuple(
        replace(
            piece,
            at_zero_us=start_us * at_zero + (piece.at_zero_us - start_us) * slope,
            us_per_unit=piece.us_per_unit * slope,
            at_zero_error=piece.at_zero_error * max(at_zero, slope),
            us_per_unit_error=piece.us_per_unit_error * slope,
        )
        for piece in fit.pieces
    )
    return replace(fit, pieces=pieces)
