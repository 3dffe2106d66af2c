"""Correct a cost table by what was found, and say what was found in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import format_gbit
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.measured import CompressorCost, CompressorPoint, parse_compressor_key
from fxcomp.cost.roofline import Measured
from fxcomp.cost.table import CostTable
from fxcomp.graph.info import info
from fxcomp.graph.lines import CostKind
from fxcomp.graph.regions import regions
from fxcomp.graph.work import is_free
from fxcomp.passes.annotate_costs import cost_key
from fxcomp.plan.strategy import Device
from fxcomp.step.drift.correct_links import SOURCE, collective_of, link_factors, price_shares, scaled_fit, with_links
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
