"""Put a cost table right by what was found, and say what was found in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import format_gbit
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.fit import Fit
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective, parse_compressor_key
from fxcomp.cost.table import CostTable, Measured
from fxcomp.graph.info import info
from fxcomp.graph.regions import regions
from fxcomp.graph.work import is_free, work_key
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.strategy import Device
from fxcomp.step.drift.judge import NOISE, Finding
from fxcomp.step.drift.sheet import Kind, Sheet

SOURCE = "measured while training"

MINOR = 4
"""A collective so many times smaller than another that changed is late because the link was busy, and says nothing of
the link itself (assumed: several under way share it, which the order of launches does not show)."""

LARGE_BYTES = 64 << 20
"""Where a collective's bandwidth is read off its price."""


def describe(finding: Finding, costs: CostTable, cluster: Cluster) -> str:
    """A finding as a sentence: `all_reduce@world of 57 MB takes 2.1 x what the table says (...): the link is ...`."""
    took = f"({finding.measured_us / 1e3:.3g} ms a step, not {finding.predicted_us / 1e3:.3g})"
    times = f"{finding.ratio:.3g} x what the table says" if math.isfinite(finding.ratio) else "what was not foreseen"
    several = " of up to " if len(finding.parts) > 1 else " of "
    text = f"{str(finding.cost).replace(' of ', several)} takes {times} {took}"
    if finding.cost.kind is not Kind.COLLECTIVE:
        return text
    kind, level = _parse(finding.cost.what)
    latency, wire = link_factors(finding, costs, cluster)
    alpha_us, wire_us = _shares(kind, level, finding.cost.size, costs, cluster)
    if wire != 1.0 and wire_us > 0:
        sent = wire_bytes(kind, cluster.ranks_at(level), finding.cost.size)
        before = sent / (wire_us * 1e3)
        return f"{text}: a rank's link is {format_gbit(before / wire)}, not {format_gbit(before)}"
    return f"{text}: its latency is {latency * alpha_us:.3g} us, not {alpha_us:.3g}" if latency != 1.0 else text


def corrected(
    costs: CostTable, findings: Sequence[Finding], sheet: Sheet, gm: GraphModule, cluster: Cluster
) -> CostTable:
    """The table with what was found: a link's latency and bandwidth, a compressor's points, compute, packing, starts.

    Another collective over the same link that the plan does not use is corrected like those that it does.
    """
    compute = {**costs.compute}
    compressors = {**costs.compressors}
    for finding in findings:
        match finding.cost.kind:
            case Kind.COMPUTE | Kind.UPDATE:
                compute |= _scaled_compute(gm, finding)
            case Kind.PACK:
                costs = replace(costs, pack_gb_per_s=costs.pack_gb_per_s / finding.ratio)
            case Kind.START:
                starts = sum(1 for cost in sheet.lines.values() if cost.kind is Kind.START)
                longer_us = (finding.measured_us - finding.predicted_us) / starts
                costs = replace(costs, launch_us=max(0.0, costs.launch_us + longer_us))
            case Kind.COMPRESS | Kind.DECOMPRESS:
                compressors |= _scaled_points(replace(costs, compressors=compressors), finding, sheet)
            case Kind.COLLECTIVE:
                pass
    costs = replace(costs, compute=compute, compressors=compressors)
    return _with_links(costs, [f for f in findings if f.cost.kind is Kind.COLLECTIVE], cluster)


def _scaled_compute(gm: GraphModule, finding: Finding) -> dict[str, Measured]:
    """Every operation of the regions that took longer, by the same factor."""
    if not math.isfinite(finding.ratio):
        return {}
    updates = finding.cost.kind is Kind.UPDATE
    found: dict[str, Measured] = {}
    for node in (node for region in regions(gm) if region.updates == updates for node in region.nodes):
        if not is_free(node):
            us = (info(node).cost_us or 0.0) * finding.ratio
            found[work_key(node)] = Measured(us, NOISE[finding.cost.kind], SOURCE)
    return found


def _scaled_points(costs: CostTable, finding: Finding, sheet: Sheet) -> dict[str, CompressorCost]:
    """A compressor on its device, with any threads; where it was only estimated, by one point of what was timed."""
    name, _, place = finding.cost.what.rpartition("@")
    known = {key: cost for key, cost in costs.compressors.items() if parse_compressor_key(key)[:2] == (name, place)}
    if not known:
        point = _estimated(costs, parse_compressor(name), Device(place), sheet.elements[finding.cost])
        known = {finding.cost.what: CompressorCost.of(point)}
    times, ratio = finding.cost.kind is Kind.DECOMPRESS, finding.ratio
    encode, decode = (1.0, ratio) if times else (ratio, 1.0)
    return {key: _scaled_compressor(cost, encode, decode) for key, cost in known.items()}


def _scaled_compressor(cost: CompressorCost, encode: float, decode: float) -> CompressorCost:
    points = tuple(
        replace(p, encode_us=p.encode_us * encode, propose_us=p.propose_us * encode, decode_us=p.decode_us * decode)
        for p in cost.points
    )
    return CompressorCost(
        points,
        encode=_scaled_fit(cost.encode, encode, encode) if cost.encode else None,
        decode=_scaled_fit(cost.decode, decode, decode) if cost.decode else None,
        propose=_scaled_fit(cost.propose, encode, encode) if cost.propose else None,
    )


def _scaled_fit(fit: Fit, at_zero: float, slope: float) -> Fit:
    """A fit whose time at zero and whose growth take so many times as long."""
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


def _estimated(costs: CostTable, compressor: Compressor, device: Device, elements: int) -> CompressorPoint:
    return CompressorPoint(
        elements,
        costs.encode_us(compressor, elements, device),
        costs.decode_us(compressor, elements, 1, device),
        costs.propose_us(compressor, elements, device),
    )


def link_factors(finding: Finding, costs: CostTable, cluster: Cluster) -> tuple[float, float]:
    """By what latency and time on the wire are multiplied to give what was measured: the simplest that explains it.

    That is the one of the two that the price is mostly made of, else the other one, by the sums over all sizes; else
    both, by least squares. Where none of them fits every size, the first keeps the sum.
    """
    kind, level = _parse(finding.cost.what)
    parts: list[tuple[float, float, float]] = []
    for size, predicted, measured in finding.parts:
        alpha_us, wire_us = _shares(kind, level, size, costs, cluster)
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
        if _misfit(factors, parts) <= NOISE[Kind.COLLECTIVE]:
            return factors
    # Where collectives share the link, what each took is blurred; what all of them took together is not.
    return possible[0] if possible else (finding.ratio, finding.ratio)


def _shares(kind: CollectiveKind, level: Level, size: int, costs: CostTable, cluster: Cluster) -> tuple[float, float]:
    """What latency and wire take of one collective, as the table has it, in µs."""
    alpha_us = costs.collective_us(kind, level, 0, cluster)
    return alpha_us, max(0.0, costs.collective_us(kind, level, size, cluster) - alpha_us)


def _least_both(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The two factors that make the relative errors' squares smallest together; nan where one size is all there is."""
    aa = sum((a / m) ** 2 for a, _, m in parts)
    ww = sum((w / m) ** 2 for _, w, m in parts)
    aw = sum(a * w / m**2 for a, w, m in parts)
    a1, w1 = sum(a / m for a, _, m in parts), sum(w / m for _, w, m in parts)
    determinant = aa * ww - aw * aw
    if determinant <= 1e-9 * aa * ww:
        return math.nan, math.nan
    return (a1 * ww - w1 * aw) / determinant, (w1 * aa - a1 * aw) / determinant


def _misfit(factors: tuple[float, float], parts: Sequence[tuple[float, float, float]]) -> float:
    """The largest relative error of any part."""
    return max((abs((factors[0] * a + factors[1] * w) / m - 1) for a, w, m in parts), default=0.0)


def _with_links(costs: CostTable, findings: Sequence[Finding], cluster: Cluster) -> CostTable:
    """What goes over links that have changed: collectives in use by their own factors, others by the worst's."""
    if not findings:
        return costs
    largest = max(finding.cost.size for finding in findings)
    own = {
        _parse(finding.cost.what): link_factors(finding, costs, cluster)
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
                fit = _scaled_fit(known.fit, *(factors or shared[0]))
                fits[kind, sits] = replace(known, fit=fit, source=SOURCE)
    return replace(costs, collectives=fits)


def _line(kind: CollectiveKind, level: Level, costs: CostTable, cluster: Cluster) -> MeasuredCollective:
    """What a collective without a measurement of its own is priced by: another one's, or the cluster's links."""
    alpha_us, wire_us = _shares(kind, level, LARGE_BYTES, costs, cluster)
    return MeasuredCollective(cluster.ranks_at(level), Fit.line(alpha_us, wire_us / LARGE_BYTES), SOURCE)


def _same_link(level: Level, other: Level, cluster: Cluster) -> bool:
    """Whether collectives at two levels are limited by the same links."""
    return _is_inside(level, cluster) == _is_inside(other, cluster)


def _is_inside(level: Level, cluster: Cluster) -> bool:
    return level is Level.INTRA or (level is Level.WORLD and cluster.hosts == 1)


def _parse(what: str) -> tuple[CollectiveKind, Level]:
    kind, _, level = what.partition("@")
    return CollectiveKind(kind), Level(level)
