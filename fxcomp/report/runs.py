"""Read what a run has logged: a line of JSON a step, with what `step.metrics()` says, the loss and the time.

    {"step": 12, "loss": 2.31, "seconds": 4.2, "sent_mb": 0.6, "residual_norm": 0.1, "plan": "5f0c..."}

A number may be missing from a line, null, or not finite; nothing is made up for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxcomp.errors import BadLog
from fxcomp.report.document import count

_FALLS = 0.1
"""Where the clock falls back in more than such a share of lines, it does not say how long a run has lasted."""


@dataclass(frozen=True, slots=True)
class Series:
    """One number over a run: the places of the lines that have it, and its values, which may be not finite."""

    places: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """Numbers of one run, by the number of a line."""

    name: str
    steps: Sequence[float]
    seconds: Sequence[float] | None
    """Since the run began; without the time between two parts of one that went on from a checkpoint."""
    series: Mapping[str, Series]
    plans: Sequence[tuple[int, str]]
    """Each plan's digest, with the step at which it was followed first."""
    notes: Sequence[str]


def read_run(path: str | Path, name: str, metrics: Sequence[str]) -> LoggedRun:
    """Read a file, of which `metrics` are wanted. Raises BadLog naming the line and the field."""
    columns = _Columns({metric: ([], []) for metric in metrics})
    for where, line in _lines(Path(path), columns.notes):
        columns.add(where, line)
    if not columns.steps:
        raise BadLog(f"{path} has no line to draw.{_CURE}")
    known = {metric: Series(*column) for metric, column in columns.values.items() if column[0]}
    if not known:
        raise BadLog(f"{path}: no line has {' or '.join(map(repr, metrics))}.{_CURE}")
    since = _since_begin(str(path), columns.steps, columns.seconds, columns.notes)
    return LoggedRun(name, columns.steps, since, known, columns.plans, columns.notes)


@dataclass(slots=True)
class _Columns:
    """The numbers of the lines read so far."""

    values: dict[str, tuple[list[int], list[float]]]
    """For each metric the places of the lines that have it, and what they have."""
    steps: list[float] = field(default_factory=list[float])
    seconds: list[float] = field(default_factory=list[float])
    plans: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    notes: list[str] = field(default_factory=list[str])

    def add(self, where: str, line: Mapping[str, Any]) -> None:
        """Take in a line."""
        step = _number(where, line, "step")
        if step is None or not step.is_integer() or step < 0:
            raise BadLog(f"{where}: 'step' must be a whole number, from 0; it is {line.get('step')!r}.{_CURE}")
        if self.steps and step < self.steps[-1]:
            before = f"step {self.steps[-1]:.0f} is followed by step {step:.0f}"
            self.notes.append(f"{where}: {before}; what came twice is drawn twice")
        if (since := _number(where, line, "seconds")) is not None:
            if not math.isfinite(since) or since < 0:
                raise BadLog(f"{where}: 'seconds' must be the time since the run began; it is {since!r}.{_CURE}")
            self.seconds.append(since)
        for metric, (places, values) in self.values.items():
            if metric in line:
                value = _number(where, line, metric)
                places.append(len(self.steps))
                values.append(math.nan if value is None else value)
        self.steps.append(step)
        plan = line.get("plan")
        if isinstance(plan, str) and plan and (not self.plans or self.plans[-1][1] != plan):
            self.plans.append((int(step), plan))


_CURE = (
    '\n  Write such lines: {"loss": float(loss), "seconds": time.perf_counter() - begun, **step.metrics()}'
    " (docs/reports.md, Metrics over a run)."
)


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read line by line, each with its place. A last line that was not finished is left out, with a note."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    found: Any = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if not line.endswith("\n"):
                        notes.append(f"{where}: the last line is cut off, and left out")
                        return
                    raise BadLog(f"{where}: this is no JSON: {error}.{_CURE}") from None
                if not isinstance(found, dict):
                    raise BadLog(f"{where}: a line must be an object, not {type(found).__name__}.{_CURE}")
                yield where, found
    except OSError as error:
        raise BadLog(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadLog(f"cannot read {path}: it is no text ({error.reason} at byte {error.start:,})") from None


def _number(where: str, line: Mapping[str, Any], name: str) -> float | None:
    """Read a number; None where there is none. Raises BadLog for anything else."""
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLog(f"{where}: {name!r} must be a number; it is {str(value)[:40]!r}.{_CURE}")
    try:
        return float(value)
    except OverflowError:
        raise BadLog(f"{where}: {name!r} is larger than a number of 64 bits.{_CURE}") from None


def _since_begin(path: str, steps: Sequence[float], seconds: list[float], notes: list[str]) -> Sequence[float] | None:
    """Join the clocks of the parts of a run: where one falls back, it goes on from the last time."""
    if len(seconds) < len(steps):
        if seconds:
            raise BadLog(
                f"{path}: 'seconds' is in {count(len(seconds), 'line')} of {len(steps)}: write it in all.{_CURE}"
            )
        notes.append(f"{path}: no line has 'seconds', so nothing of it is drawn over time")
        return None
    falls, since, ended = 0, list[float](), 0.0
    for number, each in enumerate(seconds):
        if number and each < seconds[number - 1]:
            falls, ended = falls + 1, since[-1]
        since.append(ended + each)
    if falls > _FALLS * len(seconds):
        raise BadLog(
            f"{path}: 'seconds' falls back {falls} times in {len(seconds)} lines: it must be the time since the run"
            f" began, not that of a step.{_CURE}"
        )
    if falls:
        notes.append(f"{path}: 'seconds' begins again {count(falls, 'time')}; parts follow each other without a gap")
    return since
