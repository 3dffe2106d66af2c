"""Write a table of costs as sections of text: what was measured, and how far fits are off."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxcomp.cost.measured import CompressorCost, format_bytes
from fxcomp.cost.table import CostTable
from fxcomp.report.document import Column, Pairs, Section, Table
from fxcomp.report.explanation import machine_of


def sections_of(costs: CostTable, notes: Sequence[str]) -> list[Section]:
    """List the table's collectives, compressors and constants of the machine, then the notes."""
    sections: list[Section] = []
    if costs.collectives:
        sections.append(Section("Collectives", [_collectives(costs)]))
    if costs.compressors:
        sections.append(Section("Compressors", [_compressors(costs)]))
    sections.append(Section("Machine", [_machine(costs)]))
    if notes:
        sections.append(Section("Notes", list(notes)))
    return sections


def headline(costs: CostTable) -> str:
    return f"Costs of {machine_of(costs)} ({costs.source})"


def _collectives(costs: CostTable) -> Table:
    names = ("ranks", "us a step", "from", "a rank gets", "off by", "samples")
    rows: list[Sequence[str]] = []
    for (kind, reach), measured in costs.collectives.items():
        alpha, *speeds = measured.parts(kind)
        ends = (f"{measured.spread:.1%}", str(measured.fit.samples))
        rows.append((kind.value, reach, alpha, "", speeds[0], *ends))
        for piece, speed in zip(measured.fit.pieces[1:], speeds[1:], strict=True):
            mark = " switch" if piece.is_switch else ""
            rows.append(("", "", "", f"{format_bytes(piece.start)}{mark}", speed, "", ""))
    return Table((Column("collective", is_text=True), *map(Column, names)), rows)


def _compressors(costs: CostTable) -> Table:
    names = ("elements", "encode us", "decode us", "8 payloads us", "lines", "off by")
    rows: list[Sequence[str]] = []
    for key, known in costs.compressors.items():
        name, ends = key, _fit(known)
        for elements in sorted({known.points[0].elements, known.points[-1].elements}):
            prices = known.encode_us(elements), known.decode_us(elements), known.decode_us(elements, 8)
            times = [f"{us:.4g}" for us in prices]
            rows.append((name, f"{elements:,}", *times, *ends))
            name, ends = "", ("", "")
    return Table((Column("compressor", is_text=True), *map(Column, names)), rows)


def _fit(cost: CompressorCost) -> tuple[str, str]:
    """The number of lines that encoding was fitted with and their error, or the number of points that are joined."""
    if cost.encode is None:
        return f"{len(cost.points)} points", ""
    return str(len(cost.encode.pieces)), f"{cost.encode.residual:.1%}"


def _machine(costs: CostTable) -> Pairs:
    rows = [("operations", f"{len(costs.compute)} measured, others by {costs.roofline} ({costs.roofline.source})")]
    rows.append(("a bucket", f"filled with {costs.pack_gb_per_s:.4g} GB/s"))
    if costs.copy_gb_per_s is not None:
        rows.append(("host to device", f"{costs.copy_gb_per_s:.4g} GB/s"))
    rows.append(("starting", f"{costs.launch_us:.3g} us for a collective"))
    return Pairs([*rows, *_sharing(costs)])


def _sharing(costs: CostTable) -> list[tuple[str, str]]:
    """Write how compute and communication slow each other, as (name, text)."""
    told = [
        (
            "transport",
            f"{kind.value} takes {taken.us:.3g} us of the processor, and {taken.us_per_mb:.4g} a MB; beside compute"
            f" {1 / taken.speed:.3g} times as long and {taken.more_us:.4g} us",
        )
        for kind, taken in costs.transport.items()
    ]
    if not math.isinf(costs.processors.count):
        shared = costs.processors
        told.append(("processors", f"{shared.count:.3g} for each rank, compute takes {shared.compute:.3g}"))
    if costs.contention != 1.0:
        told.append(("contention", f"{costs.contention:.3g} times that of the processor beside this job's compute"))
    return told
