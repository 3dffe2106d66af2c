"""Read what a run has logged: a line of JSON a step, with what `step.metrics()` says, the loss and the time.

    {"step": 12, "loss": 2.31, "seconds": 4.2, "sent_mb": 0.6, "residual_norm": 0.1, "plan": "5f0c..."}

A number may be missing from a line, null, or not finite; nothing is made up for it. Lines that a killed run has left
half written are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxcomp.errors import BadOption
from fxcomp.report.document import count

_FEW = 0.1
_RANKS = "do several ranks write this file? Let rank 0 alone write it"


def are_few(number: float, lines: float) -> bool:
    """Tell what some interruptions leave in a log from what is wrong with it: two, or a tenth of its lines."""
    return number <= max(2, _FEW * lines)


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
    """Read a file, of which `metrics` are wanted. Raises BadOption naming the line and the field."""
    columns = _Columns({metric: ([], []) for metric in metrics})
    for where, line in _lines(Path(path), columns.notes):
        columns.add(where, line)
    if not columns.steps:
        raise BadOption(f"{path} has no line to draw.{_CURE}")
    columns.judge_steps(path)
    known = {metric: Series(*column) for metric, column in columns.values.items() if column[0]}
    if not known:
        raise BadOption(f"{path}: no line has {' or '.join(map(repr, metrics))}.{_CURE}")
    since = _since_begin(str(path), columns)
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
    falls: list[str] = field(default_factory=list[str])
    """Places where a step is below the last one."""
    twice: list[str] = field(default_factory=list[str])
    """Places where a step that the last line has is there again, with the same number."""

    def add(self, where: str, line: Mapping[str, Any]) -> None:
        """Take in a line."""
        step = _number(where, line, "step")
        if step is None or not step.is_integer() or step < 0:
            raise BadOption(f"{where}: 'step' must be a whole number, from 0; it is {line.get('step')!r}.{_CURE}")
        if self.steps and step < self.steps[-1]:
            self.falls.append(f"{where}: step {self.steps[-1]:.0f} is followed by step {step:.0f}")
        last = len(self.steps) - 1
        again = any(places[-1:] == [last] and metric in line for metric, (places, _) in self.values.items())
        if again and step == self.steps[-1]:
            self.twice.append(f"{where}: step {step:.0f} comes twice")
        if (since := _number(where, line, "seconds")) is not None:
            if not math.isfinite(since) or since < 0:
                raise BadOption(f"{where}: 'seconds' must be the time since the run began; it is {since!r}.{_CURE}")
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

    def judge_steps(self, path: str | Path) -> None:
        """Note where steps repeat or fall back. Raises BadOption where several runs are written through each other."""
        lines = len(self.steps)
        if self.twice:
            self.notes.append(f"{self.twice[0]}{_in_all(self.twice)}: {_RANKS}")
        if not are_few(len(self.falls), lines):
            raise BadOption(f"{path}: steps fall back {len(self.falls)} times in {lines} lines: {_RANKS}.{_CURE}")
        if self.falls:
            self.notes.append(
                f"{self.falls[0]}{_in_all(self.falls)}: the run went on from an earlier step; what it did twice is"
                " drawn twice, and not joined"
            )


def _in_all(places: Sequence[str]) -> str:
    return f" ({len(places)} such lines)" if len(places) > 1 else ""


_CURE = (
    '\n  Write such lines: {"loss": float(loss), "seconds": time.perf_counter() - begun, **step.metrics()}'
    " on rank 0 (docs/reports.md, Metrics over a run)."
)


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read line by line, each with its place. Leave a few broken ones out, with a note. Raises BadOption for more."""
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
    """Read a number; None where there is none. Raises BadOption for anything else."""
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadOption(f"{where}: {name!r} must be a number; it is {str(value)[:40]!r}.{_CURE}")
    try:
        return float(value)
    except OverflowError:
        raise BadOption(f"{where}: {name!r} is larger than a number of 64 bits.{_CURE}") from None


def _since_begin(path: str, columns: _Columns) -> Sequence[float] | None:
    """Join the clocks of the parts of a run: where one falls back, it goes on from the last time."""
    steps, seconds, notes = columns.steps, columns.seconds, columns.notes
    if len(seconds) < len(steps):
        if seconds:
            raise BadOption(
                f"{path}: 'seconds' is in {count(len(seconds), 'line')} of {len(steps)}: write it in all.{_CURE}"
            )
        notes.append(f"{path}: no line has 'seconds', so nothing of it is drawn over time")
        return None
    falls, since, ended = 0, list[float](), 0.0
    for number, each in enumerate(seconds):
        if number and each < seconds[number - 1]:
            falls, ended = falls + 1, since[-1]
        since.append(ended + each)
    if not are_few(falls, len(seconds)):
        is_interleaved = not are_few(len(columns.twice), len(seconds))
        why = _RANKS if is_interleaved else "it must be the time since the run began, not that of a step"
        raise BadOption(f"{path}: 'seconds' falls back {falls} times in {len(seconds)} lines: {why}.{_CURE}")
    if falls:
        notes.append(f"{path}: 'seconds' begins again {count(falls, 'time')}; parts follow each other without a gap")
    return since
