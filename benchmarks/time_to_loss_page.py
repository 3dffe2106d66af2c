"""Join step times with loss curves: loss over seconds, time to a loss, and a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from records import Record, table

WARMUP = 0.2
ONE_BIT_WARMUP = 0.15
"""Shares of the steps. Tang et al. (2021) warm up for 15 to 20 %."""
DILOCO_STEPS = 25
AIM = 1.005
"""Target loss, relative to DDP's final loss."""

DDP, FREE, SYNC = "ddp_fp32", "free", "sync"
"""Names of times. `sync` is the network's time in a step of DDP."""

Curve = list[tuple[float, float]]
"""(seconds, loss) pairs."""


@dataclass(frozen=True)
class Phase:
    """Part of a job: its share of the steps, and the times that add up to a step."""

    share: float
    times: tuple[tuple[str, float], ...]
    """Names of times, each with the share of the steps that include it."""


@dataclass(frozen=True)
class Contender:
    label: str
    losses: str
    """Name of its training."""
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
    model: str
    inter: str
    label: str
    steps: int
    step_ms: tuple[float, ...]
    """Step time of each phase, in ms."""
    job_s: float
    loss: float
    curve: Curve


def joined(times: Iterable[Record], losses: Iterable[Record]) -> list[Run]:
    """Join step times per link with loss curves; skip contestants without either."""
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
    """Return the seconds after `step` steps of consecutive phases; the last phase has no end."""
    seconds, left = 0.0, step
    for length, ms in zip((*lengths[:-1], math.inf), step_ms, strict=True):
        taken = min(left, length)
        seconds, left = seconds + taken * ms / 1e3, left - taken
    return seconds


def time_to(curve: Curve, aim: float) -> float | None:
    """Return the time when a curve first reaches a loss, by linear interpolation; None if never."""
    if curve and curve[0][1] <= aim:
        return curve[0][0]
    for (before, above), (after, below) in pairwise(curve):
        if below <= aim:
            return before + (after - before) * (above - aim) / (above - below)
    return None


def recovered(mine: float | None, plain: float | None, floor: float | None) -> float | None:
    if mine is None or plain is None or floor is None or plain <= floor:
        return None
    return (plain - mine) / (plain - floor)


def summaries(runs: Sequence[Run]) -> list[dict[str, Any]]:
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
