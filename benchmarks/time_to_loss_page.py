"""Join the time of steps with losses by step: curves over seconds, the time to a loss, a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from records import Record, table

WARMUP = 0.2
ONE_BIT_WARMUP = 0.15
"""Shares of the steps. Tang et al. (2021) warm up for 15 to 20 % of them."""
DILOCO_STEPS = 25
AIM = 1.005
"""The loss to reach, over DDP's final one."""

DDP, FREE, SYNC = "ddp_fp32", "free", "sync"
"""Names of times. `sync` is what the network adds to a step of DDP."""

Curve = list[tuple[float, float]]
"""Seconds, and the loss."""


@dataclass(frozen=True)
class Phase:
    """A part of a job: its share of the steps, and the names of the times that make up a step."""

    share: float
    times: tuple[tuple[str, float], ...]
    """Each with the share of the steps that have it."""


@dataclass(frozen=True)
class Contender:
    label: str
    losses: str
    """The name of its training."""
    phases: tuple[Phase, ...]


def steady(name: str) -> tuple[Phase, ...]:
    return (Phase(1.0, ((name, 1.0),)),)


def warmed_up(share: float, first: str, then: str) -> tuple[Phase, ...]:
    return Phase(share, ((first, 1.0),)), Phase(1 - share, ((then, 1.0),))


CONTENDERS = (
    Contender("DDP fp32", "ddp_fp32", steady(DDP)),
    Contender("DDP, no network", "ddp_fp32", steady(FREE)),
    Contender("bf16 hook", "ddp_bf16", steady("ddp_bf16")),
    Contender("PowerSGD hook, rank 4", "ddp_powersgd", steady("ddp_powersgd")),
    Contender("1-bit Adam", "one_bit_adam", warmed_up(ONE_BIT_WARMUP, "dense", "momentum_sign")),
    Contender("DiLoCo, H 25", "diloco", (Phase(1.0, ((FREE, 1.0), (SYNC, 1 / DILOCO_STEPS))),)),
    Contender("fxcomp balanced", "fxcomp", steady("fxcomp")),
    Contender("fxcomp lossy", "fxcomp_lossy", steady("fxcomp_lossy")),
    Contender("fxcomp momenta, cmax(8)", "momentum_cmax8", warmed_up(WARMUP, "int4", "momentum_cmax8")),
)
BASE, FLOOR = CONTENDERS[0].label, CONTENDERS[1].label


@dataclass(frozen=True)
class Run:
    """A contestant's job over one link."""

    model: str
    inter: str
    label: str
    steps: int
    step_ms: tuple[float, ...]
    """Of each phase."""
    job_s: float
    loss: float
    curve: Curve


def joined(times: Iterable[Record], losses: Iterable[Record]) -> list[Run]:
    """Join what was measured over each link with what was learned by step; contestants without either are left out."""
    learned = {(each["name"], each["inter"]): each for each in losses}
    by_link: dict[tuple[str, str], dict[str, float]] = {}
    for each in times:
        by_link.setdefault((each["model"], each["inter"]), {})[each["name"]] = each["measured_ms"]["median"]
    runs: list[Run] = []
    for (model, inter), ms in by_link.items():
        known = ms | {SYNC: ms[DDP] - ms[FREE]}
        for contender in CONTENDERS:
            found = learned.get((contender.losses, inter)) or learned.get((contender.losses, None))
            if found is not None and all(name in known for p in contender.phases for name, _ in p.times):
                runs.append(_run(model, inter, contender, known, found))
    return runs


def _run(model: str, inter: str, contender: Contender, ms: dict[str, float], found: Record) -> Run:
    steps = found["steps"]
    step_ms = tuple(sum(share * ms[name] for name, share in phase.times) for phase in contender.phases)
    lengths = [phase.share * steps for phase in contender.phases]
    curve = [(seconds_at(step, lengths, step_ms), loss) for step, loss in found["curve"]]
    return Run(model, inter, contender.label, steps, step_ms, curve[-1][0], curve[-1][1], curve)


def seconds_at(step: float, lengths: Sequence[float], step_ms: Sequence[float]) -> float:
    """The time after so many steps, where phases of these lengths follow one another; the last one goes on."""
    seconds, left = 0.0, step
    for length, ms in zip((*lengths[:-1], math.inf), step_ms, strict=True):
        taken = min(left, length)
        seconds, left = seconds + taken * ms / 1e3, left - taken
    return seconds


def time_to(curve: Curve, aim: float) -> float | None:
    """When a curve is first at a loss or below it, on a straight line between its points; None if it never is."""
    if curve and curve[0][1] <= aim:
        return curve[0][0]
    for (before, above), (after, below) in pairwise(curve):
        if below <= aim:
            return before + (after - before) * (above - aim) / (above - below)
    return None


def recovered(mine: float | None, plain: float | None, floor: float | None) -> float | None:
    """The share of what the network costs that is recovered."""
    if mine is None or plain is None or floor is None or plain <= floor:
        return None
    return (plain - mine) / (plain - floor)


def summaries(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Sum each run up: its loss over DDP, its time to the loss to reach, and what it recovers."""
    found: list[dict[str, Any]] = []
    for run in runs:
        beside = {other.label: other for other in runs if (other.model, other.inter) == (run.model, run.inter)}
        base, floor = beside[BASE], beside[FLOOR]
        aim = AIM * base.loss
        found.append(
            {
                **asdict(run),
                "over": run.loss / base.loss - 1,
                "aim": aim,
                "aim_s": time_to(run.curve, aim),
                "recovered_at_aim": recovered(*(time_to(each.curve, aim) for each in (run, base, floor))),
                "recovered": recovered(run.job_s, base.job_s, floor.job_s),
                "compute": floor.job_s / run.job_s,
            }
        )
    return found


def page(runs: Sequence[Run]) -> str:
    """Write the table, by model and link, the first to reach the loss first."""
    parts: list[str] = []
    for model, inter in dict.fromkeys((run.model, run.inter) for run in runs):
        chosen = [each for each in summaries(runs) if (each["model"], each["inter"]) == (model, inter)]
        chosen.sort(key=lambda each: (each["aim_s"] is None, each["aim_s"] or each["job_s"]))
        head = "contestant | ms a step > | job, s > | loss over DDP > | s to DDP + 0.5 % >"
        head += " | recovered there > | over the job > | compute >"
        parts.append(f"{model}, {inter}\n\n{table(head, map(_row, chosen))}\n")
    return "\n".join(parts)


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    def percent(share: float | None) -> str:
        return "–" if share is None else f"{share:.0%}"

    is_bound = each["label"] in (BASE, FLOOR)
    return (
        each["label"],
        " → ".join(f"{ms:.0f}" for ms in each["step_ms"]),
        f"{each['job_s']:.0f}",
        "–" if is_bound else f"{each['over']:+.1%}",
        "never" if each["aim_s"] is None else f"{each['aim_s']:.0f}",
        "–" if is_bound else percent(each["recovered_at_aim"]),
        "–" if is_bound else percent(each["recovered"]),
        percent(each["compute"]),
    )


# The picture

COLORS = ("#444444", "#aaaaaa", "#1f77b4", "#17becf", "#9467bd", "#8c564b", "#2ca02c", "#ff7f0e", "#d62728")
"""By contender."""
PANEL, LEFT, TOP, HEIGHT = 420, 52, 44, 300
TICKS = (1, 2, 5)
HIGHEST = 1.8
"""The loss at the top, over DDP's final one."""


def draw(runs: Sequence[Run]) -> str:
    """Draw loss against seconds, a panel for each model and link, as SVG. Time is logarithmic."""
    groups = list(dict.fromkeys((run.model, run.inter) for run in runs))
    width, height = len(groups) * (PANEL + LEFT) + 20, TOP + HEIGHT + 110
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, group in enumerate(groups):
        chosen = [run for run in runs if (run.model, run.inter) == group]
        parts += _panel(LEFT + place * (PANEL + LEFT), f"{group[0]} GPT, {group[1]}", chosen)
    labels = {contender.label: color for contender, color in zip(CONTENDERS, COLORS, strict=True)}
    present = [label for label in labels if any(run.label == label for run in runs)]
    for place, label in enumerate(present):
        x, y = LEFT + place % 4 * 225, TOP + HEIGHT + 52 + place // 4 * 18
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{labels[label]}" stroke-width="2.5"/>')
        parts.append(_text(x + 28, y + 4, label))
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: float, title: str, runs: Sequence[Run]) -> list[str]:
    base = next(run for run in runs if run.label == BASE)
    first = min(_first_time(run) for run in runs)
    last = max(run.job_s for run in runs)
    low, high = 0.95 * min(run.loss for run in runs), HIGHEST * base.loss

    def x_of(seconds: float) -> float:
        return left + PANEL * math.log(max(seconds, first) / first) / math.log(last / first)

    def y_of(loss: float) -> float:
        return TOP + HEIGHT * (high - min(max(loss, low), high)) / (high - low)

    aim = y_of(AIM * base.loss)
    parts = [
        _text(left, TOP - 16, title, 14),
        f'<rect x="{left}" y="{TOP}" width="{PANEL}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<line x1="{left}" x2="{left + PANEL}" y1="{aim:.1f}" y2="{aim:.1f}" stroke="#444" stroke-dasharray="4 4"/>',
        _text(left + 6, aim + 14, "DDP's final loss + 0.5 %", 11),
        _text(left + PANEL - 52, TOP + HEIGHT + 32, "seconds", 11),
    ]
    for tick in _ticks(first, last):
        x = x_of(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + HEIGHT}" y2="{TOP + HEIGHT + 4}" stroke="#888"/>')
        parts.append(_text(x - 8, TOP + HEIGHT + 17, f"{tick:g}", 11))
    for part in range(5):
        loss = low + (high - low) * part / 4
        parts.append(_text(left - 32, y_of(loss) + 4, f"{loss:.2f}", 11))
    colors = {contender.label: color for contender, color in zip(CONTENDERS, COLORS, strict=True)}
    for run in runs:
        points = [(x_of(s), y_of(loss)) for s, loss in run.curve if loss <= high]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colors[run.label]}" stroke-width="2"/>')
    return parts


def _first_time(run: Run) -> float:
    return next(seconds for seconds, _ in run.curve)


def _ticks(first: float, last: float) -> list[float]:
    decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    return [tick * 10.0**decade for decade in decades for tick in TICKS if first <= tick * 10.0**decade <= last]


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#333">{escaped}</text>'
