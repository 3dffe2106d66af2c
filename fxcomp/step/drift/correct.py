"""Correct a cost table by what was found, and say what was found in a sentence.

A collective's price is corrected by its link: the latency, the bandwidth, or both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import format_gbit
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective, parse_compressor_key
from fxcomp.cost.piecewise import Fit
from fxcomp.cost.roofline import Measured
from fxcomp.cost.table import CostTable
from fxcomp.graph.info import info
from fxcomp.graph.lines import CostKind
from fxcomp.graph.regions import regions
from fxcomp.graph.work import is_free
from fxcomp.passes.annotate_costs import cost_key
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device
from fxcomp.step.drift.judge import NOISE, Finding
from fxcomp.step.drift.predicted_costs import PredictedCosts


def describe(finding: Finding, costs: CostTable, cluster: Cluster) -> str:
    """Say a finding: `all_reduce@world of 57 MB takes 2.1 x what the table says (...): a rank's link is ...`."""
    took = f"({finding.measured_us / 1e3:.3g} ms a step, not {finding.predicted_us / 1e3:.3g})"
    times = f"{finding.ratio:.3g} x what the table says" if math.isfinite(finding.ratio) else "what was not foreseen"
    several = " of up to " if len(finding.parts) > 1 else " of "
    text = f"{str(finding.cost).replace(' of ', several)} takes {times} {took}"
    if finding.cost.kind is not CostKind.COLLECTIVE:
        return text
    kind, level = collective_of(finding.cost.what)
    latency, wire = link_factors(finding, costs, cluster)
    alpha_us, wire_us = price_shares(kind, level, finding.cost.size, costs, cluster)
    if wire != 1.0 and wire_us > 0:
        sent = wire_bytes(kind, cluster.ranks_at(level), finding.cost.size)
        before = sent / (wire_us * 1e3)
        return f"{text}: a rank's link is {format_gbit(before / wire)}, not {format_gbit(before)}"
    return f"{text}: its latency is {latency * alpha_us:.3g} us, not {alpha_us:.3g}" if latency != 1.0 else text


def corrected(costs: CostTable, findings: Sequence[Finding], predicted: PredictedCosts, cluster: Cluster) -> CostTable:
    """Correct compute, packing, starts, compressors and links by what was found."""
    compute = {**costs.compute}
    compressors = {**costs.compressors}
    for finding in findings:
        match finding.cost.kind:
            case CostKind.COMPUTE | CostKind.UPDATE:
                compute |= _scaled_compute(predicted, finding)
            case CostKind.PACK:
                costs = replace(costs, pack_gb_per_s=costs.pack_gb_per_s / finding.ratio)
            case CostKind.START:
                starts = sum(1 for cost in predicted.lines.values() if cost.kind is CostKind.START)
                longer_us = (finding.measured_us - finding.predicted_us) / starts
                costs = replace(costs, launch_us=max(0.0, costs.launch_us + longer_us))
            case CostKind.COMPRESS | CostKind.DECOMPRESS:
                compressors |= _scaled_points(replace(costs, compressors=compressors), finding, predicted)
            case CostKind.COLLECTIVE:
                pass
    costs = replace(costs, compute=compute, compressors=compressors)
    return with_links(costs, [f for f in findings if f.cost.kind is CostKind.COLLECTIVE], cluster)


def _scaled_compute(predicted: PredictedCosts, finding: Finding) -> dict[str, Measured]:
    """Scale every operation of the regions that took longer by the same factor."""
    if not math.isfinite(finding.ratio):
        return {}
    updates = finding.cost.kind is CostKind.UPDATE
    found: dict[str, Measured] = {}
    for node in (
        node for region in regions(predicted.program.graph) if region.updates == updates for node in region.nodes
    ):
        if not is_free(node):
            us = (info(node).cost_us or 0.0) * finding.ratio
            found[cost_key(node)] = Measured(us, NOISE[finding.cost.kind], SOURCE)
    return found


def _scaled_points(costs: CostTable, finding: Finding, predicted: PredictedCosts) -> dict[str, CompressorCost]:
    """Scale a compressor on its device, with any threads; one that was only estimated gets one point, at its size."""
    name, _, place = finding.cost.what.rpartition("@")
    known = {key: cost for key, cost in costs.compressors.items() if parse_compressor_key(key)[:2] == (name, place)}
    if not known:
        point = _estimated(costs, parse_compressor(name), Device(place), predicted.elements[finding.cost])
        known = {finding.cost.what: CompressorCost.of(point)}
    times, ratio = finding.cost.kind is CostKind.DECOMPRESS, finding.ratio
    encode, decode = (1.0, ratio) if times else (ratio, 1.0)
    return {key: _scaled_compressor(cost, encode, decode) for key, cost in known.items()}


def _scaled_compressor(cost: CompressorCost, encode: float, decode: float) -> CompressorCost:
    points = tuple(
        replace(
            p,
            encode_us=p.encode_us * encode,
            propose_us=p.propose_us * encode,
            decode_us=p.decode_us * decode,
            decode_more_us=None if p.decode_more_us is None else p.decode_more_us * decode,
        )
        for p in cost.points
    )
    return CompressorCost(
        points,
        encode=scaled_fit(cost.encode, encode, encode) if cost.encode else None,
        decode=scaled_fit(cost.decode, decode, decode) if cost.decode else None,
        propose=scaled_fit(cost.propose, encode, encode) if cost.propose else None,
        decode_more=scaled_fit(cost.decode_more, decode, decode) if cost.decode_more else None,
    )


def _estimated(costs: CostTable, compressor: Compressor, device: Device, elements: int) -> CompressorPoint:
    first_us, both_us = (costs.decode_us(compressor, elements, ranks, device) for ranks in (1, 2))
    return CompressorPoint(
        elements,
        costs.encode_us(compressor, elements, device),
        first_us,
        costs.propose_us(compressor, elements, device),
        both_us - first_us,
    )


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
