"""Write the report as sections of text, for all formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fxcomp.cluster.link import format_gbit
from fxcomp.plan.plan import ExchangePoint
from fxcomp.report.accumulation import accumulated, accumulation_blocks
from fxcomp.report.by_layer import error_sections
from fxcomp.report.document import (
    Block,
    Section,
    Table,
    count,
    decimals,
    in_types,
    mb,
    members,
    ms,
)
from fxcomp.report.explanation import (
    Explanation,
    critical_shares,
    exposed_by_bucket,
    moves_section,
    parts_us,
    sources_of,
)
from fxcomp.report.links import links_in_words, measured_links
from fxcomp.report.tracks import tracks_of
from fxcomp.report.whole_job import lasting_plan, momenta_section
from fxcomp.report.wire_arithmetic import break_even_lines, formula_lines
from fxcomp.search.choose import Alternative, Choice
from fxcomp.search.decision import JUDGED_STEPS, Raced
from fxcomp.search.runners import DENSE, WORTH_FOLLOWING
from fxcomp.search.shared_draws import LEAST_GAIN

_LONGEST_PATH = 12  # entries of the critical path that are shown


class Tone(Enum):
    COMPRESS = "compress"
    DENSE = "dense"
    GIVEN = "given"
    """The search did not choose this plan."""


@dataclass(frozen=True, slots=True)
class Report:
    headline: str
    tone: Tone
    verdict: str
    reason: str
    sections: Sequence[Section]


def report_of(explanation: Explanation) -> Report:
    plan, cluster, choice = explanation.plan, explanation.cluster, explanation.choice
    digits = decimals(explanation.step_us)
    summary: list[Block] = [_steps(explanation, digits), _arithmetic(explanation, digits)]
    summary += [*_gap(explanation, digits), _prediction(explanation, digits)]
    sections = [Section("", summary)]
    if explanation.raced is not None:
        sections.append(Section("Race", _race(explanation.raced, digits)))
    elif explanation.is_chosen and choice is not None and len(choice.runners) > 1:
        sections.append(Section("Worth trying", [_worth_trying(choice, digits)]))
    if plan.buckets:
        sections += [Section("Plan", [_plan(explanation, digits)]), Section("", [_strategies(explanation)])]
    if lasting_plan(explanation).moves_exchange:
        sections.append(momenta_section(explanation))
    if explanation.budget is not None and plan.buckets:
        sections += error_sections(explanation, explanation.budget)
    if explanation.moves:
        sections.append(moves_section(explanation.moves))
    if explanation.pins and plan.buckets:
        sections.append(Section("Pinned by hand", [_pinned(explanation)]))
    if explanation.is_chosen and choice is not None and any(choice.alternatives):
        sections.append(Section("Not taken", _not_taken(explanation, choice, digits)))
    if rows := accumulated(explanation):
        sections.append(Section("Accumulation", accumulation_blocks(rows, explanation.micro_batches, digits)))
    if plan.buckets:
        sections.append(Section("Collectives", _collectives(explanation)))
    if explanation.device is not None:
        sections.append(Section("On the device", explanation.device.blocks()))
    sections.append(Section("Timeline", [[(track.name, track.timeline) for track in tracks_of(explanation)]]))
    sections.append(Section("Critical path", [_critical_path(explanation, digits)]))
    if choice is not None and cluster.hosts > 1:
        sections.append(Section("Break-even bandwidth", [_flip(explanation)]))
    sections.append(Section("Sources of the numbers", [sources_of(explanation)]))
    if explanation.notes:
        sections.append(Section("Notes", list(explanation.notes)))
    tone, verdict = _verdict(explanation)
    return Report(_headline(explanation), tone, verdict, _reason(explanation), sections)


def _headline(explanation: Explanation) -> str:
    cluster, workload = explanation.cluster, explanation.workload
    where = f"{count(cluster.hosts, 'host')} x {count(cluster.ranks_per_host, 'rank')}"
    if not cluster.is_even or cluster.above:
        where = f"{count(cluster.hosts, 'host')}, {count(cluster.world_size, 'rank')} ({cluster.shape})"
    parts = [", ".join([where, *links_in_words(cluster, explanation.costs)])]
    parts.append(
        f"{count(len(workload.gradients), 'gradient')}{in_types(workload.types)}, {mb(workload.dense_bytes)} MB"
    )
    if explanation.batch:
        parts.append(f"batch {explanation.batch}")
    if explanation.micro_batches > 1:
        parts.append(f"{explanation.micro_batches} micro-batches a step")
    if explanation.budget is not None:
        parts.append(f"error budget {explanation.budget.asked}")
    elif explanation.mode:
        parts.append(f"mode {explanation.mode}")
    if explanation.costs.estimate:
        parts.append(f"estimate for {explanation.costs.hardware}")
    return " · ".join(parts)


def _verdict(explanation: Explanation) -> tuple[Tone, str]:
    buckets, choice = explanation.plan.buckets, explanation.choice
    compressed = [bucket for bucket in buckets if not bucket.strategy.is_dense]
    share = f"{len(compressed)} of {count(len(buckets), 'bucket')}"
    if buckets and not (explanation.is_chosen or explanation.has_won or explanation.has_moved):
        given = f"The plan in use {f'compresses {share}' if compressed else 'is dense'}"
        if explanation.is_racing:
            given += "; plans are racing, and this is its turn"
        elif choice is not None:
            given += f"; fxcomp {'would not compress' if choice.stays_dense else 'would choose another'}"
        return Tone.GIVEN, given
    if not compressed:
        return Tone.DENSE, "Do not compress"
    if explanation.pins.leaves_dense(explanation.plan):
        return Tone.DENSE, "Compress only pinned parameters"
    of_bytes = sum(bucket.dense_bytes for bucket in compressed) / sum(bucket.dense_bytes for bucket in buckets)
    return Tone.COMPRESS, f"Compress {share} ({of_bytes:.1%} of the bytes)"


def _reason(explanation: Explanation) -> str:
    choice, raced = explanation.choice, explanation.raced
    if raced is not None and explanation.has_won:
        return f"Measured in a race of {raced.what}: {raced.verdict}."
    if explanation.has_moved:
        return f"Follows the gradients since step {explanation.moves[-1].step}."
    if choice is not None and explanation.is_chosen:
        return f"{choice.reason[0].upper()}{choice.reason[1:]}."
    return ""


def _steps(explanation: Explanation, digits: int) -> Table:
    choice, step_us, free_us = explanation.choice, explanation.step_us, explanation.workload.free_us
    dense_us = choice.dense_us if choice else None
    steps: list[tuple[str, float]] = []
    if choice is None:
        steps = [("this plan", step_us), ("no communication", free_us)]
    else:
        this = "measured best" if explanation.has_won else "this plan"
        steps = [("chosen" if explanation.is_chosen else this, step_us)]
        if not explanation.is_chosen:
            chosen = "chosen at first" if explanation.has_moved else "fxcomp's choice"
            steps.append(("chosen by prediction" if explanation.has_won else chosen, choice.step_us))
        elif choice.fastest != explanation.plan:
            steps.append(("predicted best, not chosen", choice.fastest_us))
        steps += [("dense", choice.dense_us), ("bf16 everywhere", choice.bf16_us), ("no communication", free_us)]
    rows: list[Sequence[str]] = []
    for name, us in steps:
        gain = f"{round(us / dense_us - 1, 3) + 0.0:+.1%}" if dense_us and name != "dense" else ""
        rows.append((name, f"{ms(us, digits)} ms", gain))
    if not math.isnan(explanation.measured_ms):
        rows.append(("measured", f"{ms(1e3 * explanation.measured_ms, digits)} ms", ""))
    return Table(("", "a step", "against dense"), rows)


def _arithmetic(explanation: Explanation, digits: int) -> str:
    """Return the step's parts, rounded such that they add up."""
    step = round(explanation.step_us / 1e3, digits)
    parts = {name: round(us / 1e3, digits) for name, us in parts_us(explanation.timeline).items()}
    largest = max(parts, key=lambda name: parts[name])
    parts[largest] = round(step - sum(part for name, part in parts.items() if name != largest), digits)
    shown = " + ".join(f"{name} {part:.{digits}f}" for name, part in parts.items() if part or name in _ALWAYS_SHOWN)
    return f"{shown} = {step:.{digits}f} ms"


_ALWAYS_SHOWN = ("compute", "exposed")


def _gap(explanation: Explanation, digits: int) -> list[Block]:
    bound_us = explanation.bound_us
    if not bound_us:
        return []
    gap = max(0.0, explanation.step_us / bound_us - 1)
    bound = f"no plan of this mode is predicted to be faster than {ms(bound_us, digits)} ms"
    return [f"At most {f'{gap:.1%}' if gap < 0.1 else f'{gap:.0%}'} above the best possible: {bound}."]


def _prediction(explanation: Explanation, digits: int) -> str:
    what = "This is an estimate and" if explanation.costs.estimate else "The prediction"
    error = f"{what} may be off by ±{explanation.error:.0%}."
    if math.isnan(explanation.measured_ms):
        return error
    off = 1e-3 * explanation.step_us / explanation.measured_ms - 1
    text = f"{error} It is off by {off:+.1%}"
    if math.isnan(explanation.exposed_ms):
        return f"{text}."
    predicted = ms(explanation.timeline.exposed_us, digits)
    return f"{text}; exposed: {explanation.exposed_ms:.{digits}f} ms measured, {predicted} ms predicted."


def _race(raced: Raced, digits: int) -> list[Block]:
    rows: list[Sequence[str]] = []
    for k, runner in enumerate(raced.runners):
        measured = "not timed" if runner.measured_ms is None else f"{ms(1e3 * runner.measured_ms, digits)} ms"
        predicted = f"{ms(runner.step_us, digits)} ms"
        rows.append((runner.name, predicted, measured, str(runner.steps), "stays" if k == raced.winner else ""))
    cost = (
        f"The plans took turns in {raced.when}, which cost"
        f" {ms(1e3 * raced.cost_ms, digits)} ms: {raced.share:.1%} of the first {JUDGED_STEPS:,} steps."
    )
    names = ("plan", "predicted", "measured", "steps", "")
    return [Table(names, rows, text=("plan", ""), optional=("steps",)), cost]


def _worth_trying(choice: Choice, digits: int) -> Table:
    rows = [
        (each.name, f"{ms(each.step_us, digits)} ms", "" if each.name == DENSE else f"{each.wins:.0%} of draws")
        for each in choice.runners
    ]
    return Table(("plan", "predicted", "beats dense in"), rows, text=("plan",), optional=("beats dense in",))


_POINTS = {ExchangePoint.GRADIENT: "", ExchangePoint.MOMENTUM: ", at the momentum"}


def _plan(explanation: Explanation, digits: int) -> Table:
    waits = exposed_by_bucket(explanation.timeline)
    rows: list[Sequence[str]] = []
    for k, bucket in enumerate(explanation.plan.buckets):
        way = f"{explanation.short(bucket.strategy)}{_POINTS[bucket.at]}"
        sent, exposed = mb(explanation.sent_bytes(bucket)), ms(waits.get(k, 0.0), digits)
        labels = members(explanation.plan.labels(bucket))
        rows.append((str(k), mb(bucket.dense_bytes), way, sent, exposed, labels))
    if waits.get(None):
        rows.append(("buffers", "", "broadcast@world", "", ms(waits[None], digits), ""))
    names = ("bucket", "MB", "strategy", "MB sent", "exposed ms", "tensors")
    return Table(names, rows, text=("strategy", "tensors"), optional=("MB sent", "tensors"))


def _strategies(explanation: Explanation) -> Table:
    strategies = dict.fromkeys(bucket.strategy for bucket in explanation.plan.buckets)
    return Table((), [(explanation.short(each), explanation.costs.shown(str(each))) for each in strategies])


def _pinned(explanation: Explanation) -> Table:
    sizes = {gradient.name: gradient.dense_bytes for gradient in explanation.workload.gradients}
    rows = [
        (rule.pattern, rule.text, mb(sum(sizes[name] for name in names)), members(names))
        for rule, names in explanation.pins.decided(sizes).items()
    ]
    text = ("pattern", "strategy", "parameters")
    return Table(("pattern", "strategy", "MB", "parameters"), rows, text, optional=("parameters",))


def _not_taken(explanation: Explanation, choice: Choice, digits: int) -> list[Block]:
    """List each bucket's best other strategy; equal consecutive rows are merged."""
    runs: list[tuple[int, int, Sequence[str]]] = []
    shorter: list[Alternative] = []
    for k, (bucket, others) in enumerate(zip(explanation.plan.buckets, choice.alternatives, strict=True)):
        best = _best_other(others)
        limit = "mode's limit" if explanation.budget is None else "budget"
        why = "pinned by hand" if choice.pins.is_pinned(bucket) else f"nothing within the {limit}"
        taken = explanation.short(bucket.strategy)
        cells = (taken, why, "", "")
        if best is not None:
            longer_ms = round((best.step_us - explanation.step_us) / 1e3, digits)
            shorter += [best] if longer_ms < 0 else []
            step = f"{ms(best.step_us, digits)} ms"
            cells = (taken, explanation.short(best.strategy), step, _difference(longer_ms, digits))
        first = runs.pop()[0] if runs and runs[-1][2] == cells else k
        runs.append((first, k, cells))
    rows = [(str(first) if first == last else f"{first}-{last}", *cells) for first, last, cells in runs]
    names, text = ("bucket", "instead of", "best other", "a step", "difference"), ("instead of", "best other")
    return [
        Table(names, rows, text, optional=("instead of", "a step")),
        *([_why_they_lost(shorter, choice)] if shorter else []),
    ]


def _best_other(others: Sequence[Alternative]) -> Alternative | None:
    possible = [other for other in others if math.isfinite(other.step_us)]
    return min(possible, key=lambda other: other.step_us, default=None)


def _difference(longer_ms: float, digits: int) -> str:
    if not longer_ms:
        return "none"
    return f"{abs(longer_ms):.{digits}f} ms {'longer' if longer_ms > 0 else 'shorter'}"


def _why_they_lost(shorter: Sequence[Alternative], choice: Choice) -> str:
    """Explain why faster alternatives lost: too little saved under random cost errors, or slower by exact prices."""
    if choice.plan != choice.fastest and any(not each.strategy.is_dense for each in shorter):
        return (
            f"Shorter, and not taken: a plan that compresses must save {LEAST_GAIN:.0%} of the step in"
            f" {WORTH_FOLLOWING:.0%} of the draws, and the best one does so in {choice.wins:.0%}."
        )
    return "Shorter by the search's prices, and not taken: by exact prices, this plan was the best of those compared."


def _collectives(explanation: Explanation) -> list[Block]:
    asked = (explanation.plan, explanation.costs, explanation.cluster, explanation.workload.shapes)
    return [Table((), formula_lines(*asked)), *break_even_lines(*asked)]


def _critical_path(explanation: Explanation, digits: int) -> str:
    shares = critical_shares(explanation.timeline)
    texts = [f"{name} {ms(us, digits)}" for name, us in shares]
    if len(texts) > _LONGEST_PATH:
        middle = slice(_LONGEST_PATH // 2, -_LONGEST_PATH // 2)
        texts[middle] = [f"... {ms(sum(us for _, us in shares[middle]), digits)}"]
    return " → ".join(texts) + " ms"


def _flip(explanation: Explanation) -> str:
    gbit, choice = explanation.flip_gbit, explanation.choice
    if gbit is None:
        stays_dense = explanation.plan.is_dense if choice is None else choice.stays_dense
        verdict = "not to compress" if stays_dense else "to compress"
        return f"None: from 1 Mbit/s to 1 Tbit/s between hosts the verdict is {verdict}."
    text = f"Below {format_gbit(gbit / 8)} between hosts compression pays, above it does not"
    inter, costs = explanation.cluster.inter, explanation.costs
    if "inter" in measured_links(explanation.cluster, costs):
        return f"{text}, with latencies of {inter.alpha_us:g} us; the links here are listed below."
    return f"{text}; here it is {format_gbit(inter.gb_per_s)}{' (assumed)' if costs.collectives else ''}."
