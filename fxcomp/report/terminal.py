"""Render reports and tables of costs on a terminal."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from fxcomp.cost.measured import format_bytes
from fxcomp.cost.table import CostTable
from fxcomp.report.document import Block, Section, Table
from fxcomp.report.draw_timeline import draw_timelines, legend
from fxcomp.report.explanation import Explanation, machine_of
from fxcomp.report.sections import Tone, report_of


def sections_of(costs: CostTable, notes: Sequence[str]) -> list[Section]:
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
    names = ("collective", "ranks", "us a step", "from", "a rank gets", "off by", "samples")
    rows: list[Sequence[str]] = []
    for (kind, reach), measured in costs.collectives.items():
        alpha, *speeds = measured.parts(kind)
        ends = (f"{measured.spread:.1%}", str(measured.fit.samples))
        rows.append((kind.value, reach, alpha, "", speeds[0], *ends))
        for piece, speed in zip(measured.fit.pieces[1:], speeds[1:], strict=True):
            mark = " switch" if piece.is_switch else ""
            rows.append(("", "", "", f"{format_bytes(piece.start)}{mark}", speed, "", ""))
    return Table(names, rows, text=("collective",))


def _compressors(costs: CostTable) -> Table:
    names = ("compressor", "elements", "encode us", "decode us", "8 payloads us", "points")
    rows: list[Sequence[str]] = []
    for key, known in costs.compressors.items():
        name, count = costs.shown(key), str(len(known.points))
        for elements in sorted({known.points[0].elements, known.points[-1].elements}):
            prices = known.encode_us(elements), known.decode_us(elements), known.decode_us(elements, 8)
            times = [f"{us:.4g}" for us in prices]
            rows.append((name, f"{elements:,}", *times, count))
            name, count = "", ""
    return Table(names, rows, text=("compressor",))


def _machine(costs: CostTable) -> Table:
    rows = [("operations", f"{len(costs.compute)} measured, others by {costs.roofline} ({costs.roofline.source})")]
    rows.append(("a bucket", f"filled with {costs.pack_gb_per_s:.4g} GB/s"))
    if costs.copy_gb_per_s is not None:
        rows.append(("host to device", f"{costs.copy_gb_per_s:.4g} GB/s"))
    rows.append(("starting", f"{costs.launch_us:.3g} us for a collective"))
    return Table((), [*rows, *_sharing(costs)])


def _sharing(costs: CostTable) -> list[tuple[str, str]]:
    told = [
        (
            "transport",
            f"{kind.value} takes {taken.us:.3g} us of the processor, and {taken.us_per_mb:.4g} a MB",
        )
        for kind, taken in costs.transport.items()
    ]
    if not math.isinf(costs.processors.count):
        shared = costs.processors
        told.append(("processors", f"{shared.count:.3g} for each rank, compute takes {shared.compute:.3g}"))
    if costs.contention != 1.0:
        told.append(("contention", f"{costs.contention:.3g} times the processor time of collectives during compute"))
    if costs.overlap_speed != 1.0:
        told.append(("overlap", f"a collective takes {1 / costs.overlap_speed:.3g} times as long during compute"))
    return told


WIDTH = 100
"""Default number of columns."""
_NARROWEST = 20  # columns; narrower reports are not legible
_NARROW = 64  # columns; below, tables omit optional columns
_STYLES = {Tone.COMPRESS: "bold green", Tone.DENSE: "bold yellow", Tone.GIVEN: "bold"}


def to_text(explanation: Explanation, *, width: int = WIDTH, colors: bool = False) -> str:
    report = report_of(explanation)
    head = [Text(report.headline, style="dim"), Text(), Text(report.verdict, style=_STYLES[report.tone])]
    if report.reason:
        head.append(Text(report.reason))
    return _render([*head, *_sections(report.sections, width)], width, colors)


def print_report(explanation: Explanation, stream: TextIO) -> None:
    """Print the report in the stream's width, colors and encoding."""
    colors = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    text = to_text(explanation, width=width_of(stream), colors=colors)
    stream.write(encodable(text, stream.encoding))


def sections_to_text(headline: str, sections: Sequence[Section], *, width: int = WIDTH) -> str:
    return _render([Text(headline), *_sections(sections, width)], width, colors=False)


def print_sections(headline: str, sections: Sequence[Section], stream: TextIO) -> None:
    stream.write(encodable(sections_to_text(headline, sections, width=width_of(stream)), stream.encoding))


_ASCII = str.maketrans(
    {
        "⌈": "ceil(",
        "⌉": ")",
        "₂": "2",
        "█": "#",
        "▓": "+",
        "░": "-",
        "·": ".",
        "±": "+/-",
        "→": "->",
        "–": "-",
        "µ": "u",
        "…": "~",
        "α": "alpha",
    }
)


def encodable(text: str, encoding: str | None) -> str:
    """Convert text to ASCII if the encoding lacks a character."""
    try:
        text.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
    return text


def width_of(stream: TextIO, *, otherwise: int = WIDTH) -> int:
    """Return the width: the variable COLUMNS, else the terminal's columns, else `otherwise`."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return max(_NARROWEST, int(told))
    return max(_NARROWEST, Console(file=stream).width) if stream.isatty() else otherwise


def _render(parts: Iterable[RenderableType], width: int, colors: bool) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colors,
        color_system="standard" if colors else None,
        markup=False,  # names may contain brackets
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _sections(sections: Sequence[Section], width: int) -> Iterator[RenderableType]:
    for section in sections:
        yield Text()
        if section.title:
            yield Text(section.title, style="bold")
        for block in section.blocks:
            yield from _block(block, width)


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    if isinstance(block, Table):
        yield Padding(_table(block, width), (0, 0, 0, 2))
        return
    if not isinstance(block, str):
        yield Text("\n".join(draw_timelines(block, width)), no_wrap=True, overflow="crop")
        block = legend([timeline for _, timeline in block])
    yield Padding(Text(block), (0, 0, 0, 2))


def _table(table: Table, width: int) -> RichTable:
    rich = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=bool(table.names))
    if not table.names:
        rich.add_column(no_wrap=True)
        rich.add_column(overflow="fold")
    shown = [k for k, name in enumerate(table.names) if width >= _NARROW or name not in table.optional]
    for name in (table.names[k] for k in shown):
        if name in table.text:
            rich.add_column(name, overflow="fold")
        else:
            rich.add_column(name, justify="right", no_wrap=True)
    for row in table.rows:
        rich.add_row(*(Text(row[k]) for k in shown or (0, 1)))
    return rich
