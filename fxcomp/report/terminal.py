"""Explain a step: what was decided, why, what the other ways would have cost, and where the numbers are from.

The only file that draws. `to_text` is for people, `to_json` for programs; both read one `Explanation`.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fxcomp.cluster.cluster import Cluster, Level, format_gbit
from fxcomp.compressors import kernels
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.critical import critical_path, exposed_by_task
from fxcomp.cost.measured import CompressorCost, format_bytes
from fxcomp.cost.robust import Distribution, Jitter, draw_steps, jitter_of
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Span, Timeline
from fxcomp.graph.work import NO_UNKNOWNS, Unknowns
from fxcomp.plan.strategy import Bucket, Device, Plan, Strategy
from fxcomp.plan.streams import Stream
from fxcomp.report.wire_arithmetic import break_even_lines, formula_lines, sent_by
from fxcomp.search.choose import Alternative, Choice
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.workload import Workload

WIDTH = 100
_NARROW = 64  # below this many columns the tables leave out what is least needed


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that a report is made of."""

    plan: Plan
    timeline: Timeline
    """The predicted step of the plan."""
    workload: Workload
    costs: CostTable
    cluster: Cluster
    choice: Choice | None = None
    """What was chosen among; None if nothing was compared."""
    mode: str = ""
    flip_gbit: float | None = None
    knows_flip: bool = False
    """Whether it was asked at all where the verdict flips."""
    notes: Sequence[str] = ()
    measured_ms: float = math.nan
    exposed_ms: float = math.nan
    """Measured too: how long the step stood still for the network."""
    unknowns: Unknowns = NO_UNKNOWNS
    """Operators that the model of compute knows little of."""

    @property
    def step_us(self) -> float:
        return self.timeline.step_time_us

    @property
    def error(self) -> float:
        """The prediction's own relative error."""
        if self.choice is not None and self.is_chosen:
            return self.choice.error
        return self.costs.error_of(self.workload.free_us, self.step_us)

    @property
    def is_chosen(self) -> bool:
        """The plan is the one that was chosen, and not given or switched to later."""
        return self.choice is not None and self.choice.plan == self.plan


def explain_step(
    *,
    plan: Plan,
    timeline: Timeline,
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
    choice: Choice | None,
    mode: str,
    flip_gbit: float | None,
    notes: Sequence[str],
    measured_ms: float,
    exposed_ms: float,
    unknowns: Unknowns,
) -> str:
    """The report of a compiled step as plain text."""
    return to_text(
        Explanation(
            plan=plan,
            timeline=timeline,
            workload=workload,
            costs=costs,
            cluster=cluster,
            choice=choice,
            mode=mode,
            flip_gbit=flip_gbit,
            knows_flip=choice is not None,
            notes=notes,
            measured_ms=measured_ms,
            exposed_ms=exposed_ms,
            unknowns=unknowns,
        )
    )


# Cost tables


def print_costs(costs: CostTable, notes: Sequence[str], stream: TextIO) -> None:
    """Write what a table knows, with its errors, the way the stream can show it."""
    is_terminal = stream.isatty()
    console = Console(file=io.StringIO(), width=Console(file=stream).width if is_terminal else WIDTH, highlight=False)
    for section in _cost_sections(costs, notes):
        console.print(section, markup=False)
    out = console.file
    assert isinstance(out, io.StringIO), "the console writes where it was told to"
    stream.write(encodable("\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n", stream.encoding))


def _cost_sections(costs: CostTable, notes: Sequence[str]) -> list[RenderableType]:
    machine = ", ".join(part for part in (costs.hardware, costs.versions, costs.date) if part)
    sections: list[RenderableType] = [Text(f"Costs of {machine} ({costs.source})")]
    if costs.collectives:
        columns = ("collective", "ranks", "us a step", "from", "a rank gets", "off by", "samples")
        table = _table(*columns, left=("collective",))
        for (kind, reach), measured in costs.collectives.items():
            alpha, *speeds = measured.parts(kind)
            ends = (f"{measured.spread:.1%}", str(measured.fit.samples))
            table.add_row(kind.value, reach, alpha, "", speeds[0], *ends)
            for piece, speed in zip(measured.fit.pieces[1:], speeds[1:], strict=True):
                mark = " switch" if piece.is_switch else ""
                table.add_row("", "", "", f"{format_bytes(piece.start)}{mark}", speed, "", "")
        sections += [_title("Collectives"), Padding(table, (0, 0, 0, 2))]
    if costs.compressors:
        table = _table("compressor", "elements", "encode us", "decode us", "lines", "off by", left=("compressor",))
        for key, known in costs.compressors.items():
            name, ends = key, _how_fitted(known)
            for elements in sorted({known.points[0].elements, known.points[-1].elements}):
                times = [f"{us:.4g}" for us in (known.encode_us(elements), known.decode_us(elements))]
                table.add_row(name, f"{elements:,}", *times, *ends)
                name, ends = "", ("", "")
        sections += [_title("Compressors"), Padding(table, (0, 0, 0, 2))]
    rest = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    rest.add_row("operations", f"{len(costs.compute)} measured, others by {costs.roofline} ({costs.roofline.source})")
    rest.add_row("a bucket", f"filled with {costs.pack_gb_per_s:.4g} GB/s")
    if costs.copy_gb_per_s is not None:
        rest.add_row("host to device", f"{costs.copy_gb_per_s:.4g} GB/s")
    rest.add_row("starting", f"{costs.launch_us:.3g} us for a collective")
    for what, says in costs.sharing():
        rest.add_row(what, says)
    sections += [_title("Machine"), Padding(rest, (0, 0, 0, 2))]
    if notes:
        sections += [_title("Notes"), *(_indented(note) for note in notes)]
    return sections


def _how_fitted(cost: CompressorCost) -> tuple[str, str]:
    """How many lines encoding was fitted with, and how far they are off; or that points are joined."""
    if cost.encode is None:
        return f"{len(cost.points)} points", ""
    return str(len(cost.encode.pieces)), f"{cost.encode.residual:.1%}"


# For programs


def to_json(explanation: Explanation) -> dict[str, Any]:
    """The report as data; times in ms, None where nothing was compared."""
    choice, cluster = explanation.choice, explanation.cluster
    waits = exposed_by_bucket(explanation.timeline)
    return {
        "verdict": "dense" if explanation.plan.is_dense else "compress",
        "step_ms": {
            "chosen": explanation.step_us / 1e3,
            "dense": choice.dense_us / 1e3 if choice else None,
            "bf16": choice.bf16_us / 1e3 if choice else None,
            "free": explanation.workload.free_us / 1e3,
        },
        "error": explanation.error,
        "estimate": explanation.costs.estimate or None,
        "compute": {
            "source": _compute_source(explanation),
            "unpriced": _counted(explanation.unknowns.unpriced),
            "by_bytes": _counted(explanation.unknowns.by_bytes),
        },
        "varied": _varied_json(varied(explanation)),
        "critical_path": [span.task.name for span in critical_path(explanation.timeline)],
        "exposed_ms": explanation.timeline.exposed_us / 1e3,
        "measured_ms": None if math.isnan(explanation.measured_ms) else explanation.measured_ms,
        "plan": {
            "digest": explanation.plan.digest,
            "buckets": [
                {
                    "names": list(bucket.names),
                    "elements": bucket.elements,
                    "bytes": bucket.dense_bytes,
                    "wire_bytes": round(sent_bytes(bucket, cluster, explanation.workload)),
                    "strategy": str(bucket.strategy),
                    "exposed_ms": waits.get(k, 0.0) / 1e3,
                }
                for k, bucket in enumerate(explanation.plan.buckets)
            ],
        },
        "flip_gbit": explanation.flip_gbit,
        "mode": explanation.mode,
        "cluster": {
            "hosts": cluster.hosts,
            "ranks_per_host": cluster.ranks_per_host,
            "shape": cluster.shape,
            "inter": str(cluster.inter),
            "intra": str(cluster.intra),
        },
        "collectives": dict(formula_lines(explanation.plan, explanation.costs, cluster, explanation.workload.shapes)),
        "notes": list(explanation.notes),
    }


def _counted(operators: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"operator": name, "count": count} for name, count in operators]


# For people


def to_text(explanation: Explanation, *, width: int = WIDTH, colors: bool = False) -> str:
    """The report as text of so many columns; without escape codes unless colors are asked for."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colors,
        color_system="standard" if colors else None,
        markup=False,  # names of parameters may hold brackets
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(Group(*_sections(explanation, width)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_report(explanation: Explanation, stream: TextIO) -> None:
    """Write the report the way the stream can show it: its width, its colors, its letters."""
    is_terminal = stream.isatty()
    width = min(WIDTH, Console(file=stream).width) if is_terminal else WIDTH
    colors = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    stream.write(encodable(to_text(explanation, width=width, colors=colors), stream.encoding))


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
        "µ": "u",
        "…": "~",
        "α": "alpha",
    }
)


def encodable(text: str, encoding: str | None) -> str:
    """The text, in plain ASCII if the encoding lacks one of its letters."""
    try:
        text.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
    return text


def _sections(explanation: Explanation, width: int) -> list[RenderableType]:
    digits = _digits(explanation.step_us)
    sections: list[RenderableType] = [_headline(explanation), _verdict(explanation), _steps(explanation, digits)]
    sections.append(_indented(_arithmetic(explanation.timeline, digits)))
    sections.append(_indented(_prediction(explanation, digits)))
    sections.append(_indented(_variation(varied(explanation), digits)))
    if explanation.plan.buckets:
        sections += [_title("Plan"), _plan_table(explanation, digits, width), _strategies(explanation.plan)]
    if explanation.is_chosen and explanation.choice is not None and any(explanation.choice.alternatives):
        sections += [_title("Not taken"), _not_taken(explanation, explanation.choice, digits, width)]
    if explanation.plan.buckets:
        sections += [_title("Collectives"), _formulas(explanation)]
    sections += [_title("Timeline"), _drawing(explanation.timeline, width, digits)]
    sections += [_title("What the step's length hangs on"), _indented(_path(explanation.timeline, digits))]
    if explanation.knows_flip and explanation.cluster.hosts > 1:
        sections += [_title("Where the verdict flips"), _indented(_flip(explanation))]
    sections += [_title("Where the numbers are from"), _sources(explanation)]
    if explanation.notes:
        sections.append(_title("Notes"))
        sections += [_indented(note) for note in explanation.notes]
    return sections


def _title(text: str) -> RenderableType:
    return Padding(Text(text, style="bold"), (1, 0, 0, 0))


def _indented(text: str | Text) -> RenderableType:
    return Padding(text, (0, 0, 0, 2))


def _table(*columns: str, left: Sequence[str] = ()) -> Table:
    """A table without lines; columns are numbers unless named in `left`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        if column in left:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


# The verdict


def _headline(explanation: Explanation) -> RenderableType:
    cluster, workload = explanation.cluster, explanation.workload
    where = f"{_count(cluster.hosts, 'host')} x {_count(cluster.ranks_per_host, 'rank')}"
    if not cluster.is_even or cluster.above:
        where = f"{_count(cluster.hosts, 'host')}, {_count(cluster.world_size, 'rank')} ({cluster.shape})"
    device = [f"estimate for {explanation.costs.hardware}"] if explanation.costs.estimate else []
    links = [f"{format_gbit(cluster.inter.gb_per_s)} between hosts"] if cluster.hosts > 1 else []
    links += [f"{format_gbit(tier.link.gb_per_s)} between {tier.name}s" for tier in cluster.above]
    links += [f"{format_gbit(cluster.intra.gb_per_s)} inside"] if cluster.ranks_per_host > 1 else []
    if explanation.costs.collectives:
        links = ["links as measured"]
    mode = [f"mode {explanation.mode}"] if explanation.mode else []
    what = f"{_count(len(workload.gradients), 'gradient')}, {_mb(workload.dense_bytes)} MB"
    return Text(" · ".join([", ".join([where, *links]), what, *mode, *device]), style="dim")


def _verdict(explanation: Explanation) -> RenderableType:
    plan, choice = explanation.plan, explanation.choice
    compressed = [bucket for bucket in plan.buckets if not bucket.strategy.is_dense]
    if compressed:
        share = sum(bucket.elements for bucket in compressed) / sum(bucket.elements for bucket in plan.buckets)
        buckets = f"{len(compressed)} of {_count(len(plan.buckets), 'bucket')} ({share:.1%} of the bytes)"
        text = Text(f"Compress {buckets}", style="bold green")
    else:
        text = Text("Do not compress", style="bold yellow")
    if not explanation.is_chosen and plan.buckets:
        given = f"compresses {len(compressed)} of {_count(len(plan.buckets), 'bucket')}" if compressed else "is dense"
        text = Text(f"The plan in use {given}", style="bold")
        if choice is not None:
            text.append(f"; fxcomp {'would not compress' if choice.plan.is_dense else 'would choose another'}")
    lines = [text]
    if choice is not None and explanation.is_chosen:
        lines.append(Text(f"{choice.reason[0].upper()}{choice.reason[1:]}."))
    return Padding(Group(*lines), (1, 0, 1, 0))


def _steps(explanation: Explanation, digits: int) -> RenderableType:
    choice, free_us = explanation.choice, explanation.workload.free_us
    table = _table("", "a step", "against dense", left=("",))
    dense_us = choice.dense_us if choice else None
    rows: list[tuple[str, float]] = []
    if choice is None:
        rows = [("this plan", explanation.step_us), ("no communication", free_us)]
    else:
        rows = [("chosen" if explanation.is_chosen else "this plan", explanation.step_us)]
        if not explanation.is_chosen:
            rows.append(("fxcomp's choice", choice.step_us))
        elif choice.fastest != explanation.plan:
            rows.append(("fastest, not chosen", choice.fastest_us))
        rows += [("dense", choice.dense_us), ("bf16 everywhere", choice.bf16_us), ("no communication", free_us)]
    for name, us in rows:
        gain = f"{round(us / dense_us - 1, 3) + 0.0:+.1%}" if dense_us and name != "dense" else ""
        table.add_row(name, f"{_ms(us, digits)} ms", gain)
    if not math.isnan(explanation.measured_ms):
        table.add_row("measured", f"{_ms(1e3 * explanation.measured_ms, digits)} ms", "")
    return Padding(table, (0, 0, 0, 2))


def _arithmetic(timeline: Timeline, digits: int) -> str:
    """What the step is made of, rounded so that the numbers shown add up."""
    step = round(timeline.step_time_us / 1e3, digits)
    parts = {name: round(us / 1e3, digits) for name, us in parts_us(timeline).items()}
    largest = max(parts, key=lambda name: parts[name])
    parts[largest] = round(step - sum(ms for name, ms in parts.items() if name != largest), digits)
    shown = " + ".join(f"{name} {ms:.{digits}f}" for name, ms in parts.items() if ms or name in ("compute", "exposed"))
    return f"{shown} = {step:.{digits}f} ms"


def _prediction(explanation: Explanation, digits: int) -> str:
    what = "This is an estimate and" if explanation.costs.estimate else "The prediction"
    error = f"{what} may be off by ±{explanation.error:.0%}."
    if math.isnan(explanation.measured_ms):
        return error
    off = 1e-3 * explanation.step_us / explanation.measured_ms - 1
    text = f"{error} It is off by {off:+.1%}"
    if math.isnan(explanation.exposed_ms):
        return f"{text}."
    predicted = _ms(explanation.timeline.exposed_us, digits)
    return f"{text}; exposed: {explanation.exposed_ms:.{digits}f} ms measured, {predicted} ms predicted."


@dataclass(frozen=True, slots=True)
class Varied:
    """The same step when times vary from step to step."""

    jitter: Jitter
    plan: Distribution
    beats_dense: float | None
    """In which share of the draws; None where nothing was compared, or the plan is the dense one."""


def varied(explanation: Explanation) -> Varied:
    """Draw steps of the plan, and of the best dense one under the same luck."""
    costs, choice = explanation.costs, explanation.choice
    jitter = jitter_of(costs, explanation.cluster.world_size)
    drawn = draw_steps([span.task for span in explanation.timeline.spans], jitter, costs.processors)
    if choice is None or choice.dense == explanation.plan:
        return Varied(jitter, drawn, None)
    dense = plan_tasks(explanation.workload, choice.dense, costs, explanation.cluster)
    return Varied(jitter, drawn, drawn.share_faster_than(draw_steps(dense, jitter, costs.processors)))


def _varied_json(found: Varied) -> dict[str, float | None]:
    spread = {f"p{share}_ms": found.plan.at(share / 100) / 1e3 for share in (10, 50, 90)}
    return {**spread, "compute": found.jitter.compute, "links": found.jitter.links, "beats_dense": found.beats_dense}


def _variation(found: Varied, digits: int) -> str:
    low, high = (_ms(found.plan.at(share), digits) for share in (0.1, 0.9))
    text = f"Where compute varies by {found.jitter.compute:.0%} and links by {found.jitter.links:.0%}, 8 of 10 steps"
    text = f"{text} take {low} to {high} ms"
    if found.beats_dense is not None:
        text += f"; {found.beats_dense:.0%} are faster than the best dense plan's"
    return f"{text} ({len(found.plan.draws)} draws)."


def _path(timeline: Timeline, digits: int) -> str:
    """The critical path, with neighbours of one kind taken together."""
    shares: list[tuple[str, float]] = []
    for span in critical_path(timeline):
        name = _kind(span.task.name) if span.task.stream is Stream.COMPUTE else span.task.name
        us = span.end_us - span.start_us
        if shares and shares[-1][0] == name:
            shares[-1] = (name, shares[-1][1] + us)
        elif us:
            shares.append((name, us))
    texts = [f"{name} {_ms(us, digits)}" for name, us in shares]
    if len(texts) > _LONGEST_PATH:
        left_out = sum(us for _, us in shares[_LONGEST_PATH // 2 : -_LONGEST_PATH // 2])
        texts[_LONGEST_PATH // 2 : -_LONGEST_PATH // 2] = [f"... {_ms(left_out, digits)}"]
    return " → ".join(texts) + " ms"


_LONGEST_PATH = 12

_WORK = {
    "region": "compute",
    "backward": "compute",
    "update": "compute",
    "finish": "compute",
    "accumulate": "compute",  # the optimizer's momentum, before the wire
    "corrected": "compute",  # what the graph calls it
    "mask": "compression",
    "propose": "compression",
    "proposal": "compression",  # what the graph calls it
    "compress": "compression",
    "next": "compression",  # a compressor's next state
    "decompress": "compression",
    "mean": "compression",  # what the graph calls a decompressed bucket
    "exchange": "exchanges",  # the loss function's own collectives
}
_EXPOSED = "exposed"


def _kind(name: str) -> str:
    """What a task on the compute stream does; all else is packing buckets and starting collectives."""
    return _WORK.get(re.split(r"[ _]", name)[0], "packing")


def parts_us(timeline: Timeline) -> dict[str, float]:
    """Where the step goes: compute, packing, compression, the loss function's own exchanges, what these lose to the
    network's software, standing still."""
    parts: dict[str, float] = {"compute": 0.0, "packing": 0.0, "compression": 0.0}
    for span in timeline.spans:
        if span.task.stream is Stream.COMPUTE:
            kind = _kind(span.task.name)
            parts[kind] = parts.get(kind, 0.0) + span.task.duration_us
    return {**parts, "contention": timeline.slowed_us(Stream.COMPUTE), _EXPOSED: timeline.exposed_us}


# The plan


def _plan_table(explanation: Explanation, digits: int, width: int) -> RenderableType:
    waits = exposed_by_bucket(explanation.timeline)
    is_wide = width >= _NARROW
    columns = ("bucket", "MB", "strategy", "MB sent", "exposed ms", "tensors")
    if not is_wide:
        columns = ("bucket", "MB", "strategy", "exposed ms")
    table = _table(*columns, left=("strategy", "tensors"))
    for k, bucket in enumerate(explanation.plan.buckets):
        cells = [str(k), _mb(bucket.dense_bytes), short(bucket.strategy)]
        cells += [_mb(sent_bytes(bucket, explanation.cluster, explanation.workload))] if is_wide else []
        cells.append(_ms(waits.get(k, 0.0), digits))
        cells += [_members(bucket)] if is_wide else []
        table.add_row(*cells)
    if waits.get(None):
        table.add_row("buffers", "", "broadcast@world", *([""] if is_wide else []), _ms(waits[None], digits))
    return Padding(table, (0, 0, 0, 2))


def _members(bucket: Bucket) -> str:
    first, count = bucket.names[0], len(bucket.names)
    return first if count == 1 else f"{first} and {count - 1} more"


def _strategies(plan: Plan) -> RenderableType:
    """Spell out what the short names stand for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for strategy in dict.fromkeys(bucket.strategy for bucket in plan.buckets):
        table.add_row(short(strategy), str(strategy))
    return Padding(table, (1, 0, 0, 2))


def short(strategy: Strategy) -> str:
    """A strategy in a word or two: `dense`, `int8 by level`, `topk(0.01) on cpu`."""
    name = "dense" if strategy.compressor is None else str(strategy.compressor)
    levels = " by level" if strategy.is_hierarchical else ""
    return f"{name}{levels}{' on cpu' if strategy.device is Device.CPU else ''}"


def sent_bytes(bucket: Bucket, cluster: Cluster, workload: Workload) -> float:
    """What one rank sends of a bucket over the slowest links on its way: between hosts, if there are several."""
    sent: dict[bool, float] = {True: 0.0, False: 0.0}
    for part in sent_by(bucket, cluster, workload.shapes):
        ranks = cluster.ranks_at(part.step.level)
        sent[part.step.level is Level.INTRA] += wire_bytes(part.step.kind, ranks, part.size)
    return sent[False] or sent[True]


def exposed_by_bucket(timeline: Timeline) -> dict[int | None, float]:
    """How long compute stands still for each bucket, in µs; they add up to the timeline's exposed time.

    None stands for what belongs to no bucket: the broadcast of buffers.
    """
    waits: dict[int | None, float] = {}
    for name, us in exposed_by_task(timeline).items():
        bucket = _bucket_of(name)
        waits[bucket] = waits.get(bucket, 0.0) + us
    return waits


def _bucket_of(name: str) -> int | None:
    """`all_reduce 3`, `start all_gather_3_intra` and `d2h_3` belong to bucket 3."""
    match = re.search(r"(?<![A-Za-z\d])\d+", name)
    return int(match[0]) if match else None


# What was not taken


def _not_taken(explanation: Explanation, choice: Choice, digits: int, width: int) -> RenderableType:
    """For each bucket the best of its other strategies, all else the same; buckets that read alike share a line."""
    lines: list[tuple[int, int, tuple[str, ...]]] = []
    for k, (bucket, others) in enumerate(zip(explanation.plan.buckets, choice.alternatives, strict=True)):
        best = _best_other(others)
        cells = (short(bucket.strategy), "nothing within the mode's limit", "", "")
        if best is not None:
            longer_ms = round((best.step_us - explanation.step_us) / 1e3, digits) + 0.0
            step = f"{_ms(best.step_us, digits)} ms"
            cells = (short(bucket.strategy), short(best.strategy), step, f"{longer_ms:+.{digits}f} ms")
        if lines and lines[-1][2] == cells:
            lines[-1] = (lines[-1][0], k, cells)
        else:
            lines.append((k, k, cells))
    columns = ("bucket", "instead of", "best other", "a step", "longer by")
    shown = range(5) if width >= _NARROW else (0, 2, 4)
    table = _table(*(columns[k] for k in shown), left=("instead of", "best other"))
    for first, last, cells in lines:
        row = (str(first) if first == last else f"{first}-{last}", *cells)
        table.add_row(*(row[k] for k in shown))
    return Padding(table, (0, 0, 0, 2))


def _best_other(others: Sequence[Alternative]) -> Alternative | None:
    possible = [other for other in others if math.isfinite(other.step_us)]
    return min(possible, key=lambda other: other.step_us, default=None)


# The timeline


_ROWS = {
    Stream.COMPUTE: "compute",
    Stream.D2H: "to host",
    Stream.CPU: "cpu pool",
    Stream.INTRA: "in host",
    Stream.INTER: "between",
    Stream.H2D: "to device",
}
_MARKS = {"compute": "█", "compression": "▓", "packing": "░", "exchanges": "▒"}
_BUCKETS = "0123456789abcdefghijklmnopqrstuvwxyz"
_IDLE = "·"
_LABEL = 11


def _drawing(timeline: Timeline, width: int, digits: int) -> RenderableType:
    """One row a stream, the step from left to right."""
    cells = max(8, width - _LABEL - 1)
    busy = [stream for stream in _ROWS if timeline.busy_us(stream) > 0]
    lines = [f"  {_ROWS[stream]:<{_LABEL - 2}}{_row(timeline, stream, cells)}" for stream in busy]
    end = f"{_ms(timeline.step_time_us, digits)} ms"
    lines.append(f"{'':<{_LABEL}}0{end:>{cells - 1}}")
    legend = [f"{mark} {name}" for name, mark in _MARKS.items() if parts_us(timeline).get(name)]
    if any(stream is not Stream.COMPUTE for stream in busy):
        legend.append("0-9a-z a bucket on its way")
    legend.append(f"{_IDLE} idle")
    return Group(Text("\n".join(lines), no_wrap=True, overflow="crop"), _indented("   ".join(legend)))


def _row(timeline: Timeline, stream: Stream, cells: int) -> str:
    """A mark for what fills most of a cell; on a link, for what is there at all, however short."""
    cell_us = timeline.step_time_us / cells
    filled: list[dict[str, float]] = [{} for _ in range(cells)]
    for span in timeline.spans:
        if span.task.stream is not stream or not span.task.duration_us:
            continue
        mark = _mark(span)
        first, last = int(span.start_us / cell_us), min(cells - 1, int(span.end_us / cell_us))
        for cell in range(min(first, cells - 1), last + 1):
            us = min(span.end_us, (cell + 1) * cell_us) - max(span.start_us, cell * cell_us)
            filled[cell][mark] = filled[cell].get(mark, 0.0) + us
    least_us = cell_us / 2 if stream is Stream.COMPUTE else 0.0
    return "".join(_fullest(marks, least_us) for marks in filled)


def _fullest(marks: dict[str, float], least_us: float) -> str:
    if not marks or sum(marks.values()) <= least_us:
        return _IDLE
    return max(marks, key=lambda mark: marks[mark])


def _mark(span: Span) -> str:
    if span.task.stream is Stream.COMPUTE:
        return _MARKS[_kind(span.task.name)]
    bucket = _bucket_of(span.task.name)
    return "*" if bucket is None else _BUCKETS[bucket % len(_BUCKETS)]


# Where it flips, and where numbers are from


def _flip(explanation: Explanation) -> str:
    gbit = explanation.flip_gbit
    if gbit is None:
        verdict = "not to compress" if explanation.plan.is_dense else "to compress"
        if explanation.choice is not None:
            verdict = "not to compress" if explanation.choice.plan.is_dense else "to compress"
        return f"Nowhere: from 1 Mbit/s to 1 Tbit/s between hosts the verdict is {verdict}."
    text = f"Below {format_gbit(gbit / 8)} between hosts compression pays, above it does not"
    if explanation.costs.collectives:
        return f"{text}, with latencies of {explanation.cluster.inter.alpha_us:g} us; the links here are listed below."
    return f"{text}; here it is {format_gbit(explanation.cluster.inter.gb_per_s)}."


def _formulas(explanation: Explanation) -> RenderableType:
    """The largest of each kind of collective, as it is computed, and where compressing it would pay on its own."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    asked = (explanation.plan, explanation.costs, explanation.cluster, explanation.workload.shapes)
    for name, line in formula_lines(*asked):
        table.add_row(name, line)
    lines = [Text(line) for line in break_even_lines(*asked)]
    return Padding(Group(table, *lines), (0, 0, 0, 2))


def _sources(explanation: Explanation) -> RenderableType:
    costs, cluster, plan = explanation.costs, explanation.cluster, explanation.plan
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("compute", _compute_source(explanation))
    for what, operators in (
        ("unpriced", explanation.unknowns.unpriced),
        ("priced by bytes alone", explanation.unknowns.by_bytes),
    ):
        if operators:
            table.add_row(what, _operators(operators))
    steps = dict.fromkeys(step for bucket in plan.buckets for step in bucket.strategy.collectives)
    for (kind, reach), measured in costs.collectives.items():
        table.add_row(f"{kind.value}@{reach}", measured.describe(kind))
    for step in steps if not costs.collectives else ():
        table.add_row(str(step), costs.collective_source(step.kind, step.level, cluster))
    used = dict.fromkeys((bucket.strategy.compressor, bucket.strategy.device) for bucket in plan.buckets)
    for compressor, device in used:
        if compressor is not None and device is not None:
            table.add_row(f"{compressor}@{device.value}", costs.compressor_source(compressor, device))
    if costs.hardware != "unknown":
        table.add_row("machine", ", ".join(part for part in (costs.hardware, costs.versions, costs.date) if part))
    table.add_row("kernels", kernels.describe().removeprefix("compression on the CPU: "))
    return Padding(table, (0, 0, 0, 2))


def _compute_source(explanation: Explanation) -> str:
    costs = explanation.costs
    roofline = f"{costs.roofline} ({costs.roofline.source})"
    if not costs.compute:
        return f"by {roofline}"
    sources = ", ".join(dict.fromkeys(measured.source for measured in costs.compute.values()))
    return f"{_count(len(costs.compute), 'operation')}: {sources}; others by {roofline}"


_LISTED = 6  # operators by name; more are counted


def _operators(operators: Sequence[tuple[str, int]]) -> str:
    """`3 of 2 kinds: mine.scan x 2, mine.log x 1`."""
    shown = ", ".join(f"{name} x {count}" for name, count in operators[:_LISTED])
    more = f", and {len(operators) - _LISTED} more" if len(operators) > _LISTED else ""
    return f"{_count(sum(count for _, count in operators), 'call')}: {shown}{more}"


# Numbers


def _digits(step_us: float) -> int:
    """Decimals in ms, so that a step has four digits or so."""
    return 1 if step_us >= 100e3 else 2 if step_us >= 10e3 else 3


def _ms(us: float, digits: int) -> str:
    return f"{us / 1e3:.{digits}f}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.3g}" if size < 1e8 else f"{size / 1e6:.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
