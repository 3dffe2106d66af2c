"""Read the log of a run: a line of JSON per step.

    {"step": 12, "loss": 2.31, "seconds": 4.2, "sent_mb": 0.6, "residual_norm": 0.1, "plan": "5f0c..."}

A number may be missing, null, or not finite. Lines cut off by a killed run are skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxcomp.errors import BadOption
from fxcomp.report.document import count

_FEW = 0.1
_RANKS = "do several ranks write this file? Let rank 0 alone write it"


def are_few(number: float, lines: float) -> bool:
    """Return whether interruptions of a run may explain `number` bad lines: at most two or a tenth of `lines`."""
    return number <= max(2, _FEW * lines)


@dataclass(frozen=True, slots=True)
class LoggedRun:
    name: str
    steps: Sequence[float]
    seconds: Sequence[float] | None
    """Time since the run began, by line number, without the gaps before restarts."""
    series: Mapping[str, Mapping[int, float]]
    """Values of each metric by line number; they may be infinite or NaN."""
    plans: Sequence[tuple[int, str]]
    """First step and digest of each plan."""
    notes: Sequence[str]


Lines = Sequence[tuple[str, Mapping[str, Any]]]
"""Position (`path:line`) and JSON object of each line."""


def read_run(path: str | Path, name: str, metrics: Sequence[str]) -> LoggedRun:
    """Read metrics from a file. Raise BadOption for an invalid line."""
    notes: list[str] = []
    lines = list(_lines(Path(path), notes))
    if not lines:
        raise BadOption(f"{path} has no line to draw.{_CURE}")
    steps = [_step(where, line) for where, line in lines]
    series = {metric: values for metric in metrics if (values := _values(lines, metric))}
    twice = [
        f"{where}: step {step:.0f} comes twice"
        for k, ((where, line), step) in enumerate(zip(lines, steps, strict=True))
        if k and step == steps[k - 1] and any(k - 1 in series[metric] for metric in series if metric in line)
    ]
    notes += _repeats(path, lines, steps, twice)
    if not series:
        raise BadOption(f"{path}: no line has {' or '.join(map(repr, metrics))}.{_CURE}")
    seconds = _since_begin(str(path), lines, notes, is_interleaved=not are_few(len(twice), len(lines)))
    plans: list[tuple[int, str]] = []
    for (_, line), step in zip(lines, steps, strict=True):
        plan = line.get("plan")
        if isinstance(plan, str) and plan and plan.isascii() and (not plans or plans[-1][1] != plan):
            plans.append((int(step), plan))
    return LoggedRun(name, steps, seconds, series, plans, notes)


def _step(where: str, line: Mapping[str, Any]) -> float:
    step = _number(where, line, "step")
    if step is None or not step.is_integer() or not 0 <= step <= 2**53:
        raise BadOption(f"{where}: 'step' must be a whole number, from 0; it is {line.get('step')!r}.{_CURE}")
    return step


def _values(lines: Lines, metric: str) -> dict[int, float]:
    found = {k: _number(where, line, metric) for k, (where, line) in enumerate(lines) if metric in line}
    return {k: math.nan if value is None else value for k, value in found.items()}


def _repeats(path: str | Path, lines: Lines, steps: Sequence[float], twice: Sequence[str]) -> Iterator[str]:
    """Yield notes on repeated and decreasing steps. Raise BadOption if several runs write the file."""
    if twice:
        yield f"{twice[0]}{_in_all(twice)}: {_RANKS}"
    falls = [
        f"{where}: step {before:.0f} is followed by step {after:.0f}"
        for (where, _), before, after in zip(lines[1:], steps, steps[1:], strict=False)
        if after < before
    ]
    if not are_few(len(falls), len(lines)):
        raise BadOption(f"{path}: steps fall back {len(falls)} times in {len(lines)} lines: {_RANKS}.{_CURE}")
    if falls:
        yield (
            f"{falls[0]}{_in_all(falls)}: the run went on from an earlier step; repeated steps are drawn twice, and not"
            " joined"
        )


def _in_all(places: Sequence[str]) -> str:
    return f" ({len(places)} such lines)" if len(places) > 1 else ""


_CURE = (
    '\n  Write such lines: {"loss": float(loss), "seconds": time.perf_counter() - begun, **step.metrics()}'
    " on rank 0 (docs/reports.md, Metrics over a run)."
)


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield objects with their positions. Skip a few broken lines; raise BadOption for more."""
    whole, broken = 0, list[str]()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    found: Any = json.loads(line.decode("utf-8-sig"))
                except UnicodeDecodeError as error:
                    broken.append(f"{where}: this is no text: {error.reason}")
                except (ValueError, RecursionError) as error:
                    broken.append(f"{where}: this is no JSON: {error}")
                else:
                    if isinstance(found, dict):
                        whole += 1
                        yield where, found
                    else:
                        broken.append(f"{where}: a line must be an object, not {type(found).__name__}")
    except OSError as error:
        raise BadOption(f"cannot read {path}: {error.strerror}") from None
    if broken and not (whole and are_few(len(broken), whole + len(broken))):
        more = f" (and {len(broken) - 1} more of {whole + len(broken)} lines)" if len(broken) > 1 else ""
        raise BadOption(f"{broken[0]}{more}.{_CURE}")
    if broken:
        notes.append(f"{broken[0]}; {count(len(broken), 'broken line')} left out (a killed run leaves such)")


def _number(where: str, line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadOption(f"{where}: {name!r} must be a number; it is {str(value)[:40]!r}.{_CURE}")
    try:
        return float(value)
    except OverflowError:
        raise BadOption(f"{where}: {name!r} is larger than a number of 64 bits.{_CURE}") from None


def _since_begin(path: str, lines: Lines, notes: list[str], *, is_interleaved: bool) -> Sequence[float] | None:
    """Return seconds since the run began. After a restart, seconds continue from the previous end."""
    seconds: list[float] = []
    for where, line in lines:
        if (read := _number(where, line, "seconds")) is not None:
            if not math.isfinite(read) or read < 0:
                raise BadOption(f"{where}: 'seconds' must be the time since the run began; it is {read!r}.{_CURE}")
            seconds.append(read)
    if not seconds:
        notes.append(f"{path}: no line has 'seconds', so nothing of it is drawn over time")
        return None
    if len(seconds) < len(lines):
        raise BadOption(
            f"{path}: 'seconds' is in {count(len(seconds), 'line')} of {len(lines)}: write it in all.{_CURE}"
        )
    falls, since, ended = 0, list[float](), 0.0
    for number, each in enumerate(seconds):
        if number and each < seconds[number - 1]:
            falls, ended = falls + 1, since[-1]
        since.append(ended + each)
    if not are_few(falls, len(seconds)):
        why = _RANKS if is_interleaved else "it must be the time since the run began, not the time of a step"
        raise BadOption(f"{path}: 'seconds' falls back {falls} times in {len(seconds)} lines: {why}.{_CURE}")
    if falls:
        notes.append(f"{path}: 'seconds' begins again {count(falls, 'time')}; parts follow each other without a gap")
    return since
