"""Mutate the files that fxcomp reads, and report mutations that are neither refused by name nor usable.

    python benchmarks/hostile_files.py --json hostile.json           # all kinds, in full
    python benchmarks/hostile_files.py --kinds plan log --share 0.1
    python benchmarks/hostile_files.py --kinds plan --only 1234      # one mutation, with its traceback

Half of the mutations change bytes; half change the object in the file and seal it again. A mutation depends on its kind
and number alone. A finding is an error other than FxcompError, a wrong result, more than `SLOW_S` seconds of processor
time, or memory above ten times the file and 50 MB.
"""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from hostile.kinds import CachedTables, Clusters, CostTables, ErrorTables, Kind, Logs, Plans, Reports
from hostile.states import Folders, States
from records import Records, options, show_progress, table

from fxcomp.errors import FxcompError

KINDS: tuple[type[Kind], ...] = (Plans, CostTables, States, Folders, CachedTables, Clusters, ErrorTables, Logs, Reports)

SLOW_S, HANGS_S = 2.0, 20.0
FULL_SHARE = 0.01
"""Share of the accepted mutations that are used in full, besides the first of each kind of change."""

_BYTES, _TIMES = 50e6, 10
_ADDRESSES = 6 << 30
"""Address space that a mutation may add to this process's, in bytes: more raises MemoryError."""


class Hang(BaseException):
    """A mutation takes too long."""


@dataclass
class Finding:
    kind: str
    number: int
    error: str
    where: str
    change: str
    more: int = 0
    """Number of further mutations with the same error at the same place."""


@dataclass
class Tally:
    """Outcomes of one kind's mutations."""

    kind: str
    mutations: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    accepted: int = 0
    used_in_full: int = 0
    unfit: int = 0
    """Accepted, and then refused by name in use."""
    seconds: float = 0.0
    slowest_s: float = 0.0
    most_mb: float = 0.0
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict[tuple[str, str], Finding])

    def record(self) -> dict[str, Any]:
        facts = {**asdict(self), "refused": dict(self.refused.most_common())}
        numbers = {name: round(getattr(self, name), 2) for name in ("seconds", "slowest_s", "most_mb")}
        return {**facts, **numbers, "findings": sum(1 + found.more for found in self.findings.values())}


class Trial:
    """Reads and uses mutations of one kind."""

    def __init__(self, kind: Kind, folder: Path, *, in_full: bool = True) -> None:
        self.kind, self.tally, self._in_full = kind, Tally(kind.name), in_full
        self._path = folder / f"file{kind.suffix}"
        self._seen: set[str] = set()
        for sample in kind.samples if in_full else ():  # are valid; and the first use fills caches
            self._path.write_bytes(kind.write(sample))
            kind.use(kind.read(self._path), fully=True)

    def run(self, number: int) -> BaseException | None:
        """Run one mutation; return the error of a finding."""
        kind, tally = self.kind, self.tally
        draw = random.Random(f"{kind.name} {number}")
        raw, change = kind.mutation(draw)
        self._path.write_bytes(raw)
        error, began, before = None, time.process_time(), _new_peak()
        signal.setitimer(signal.ITIMER_REAL, HANGS_S)
        try:
            self._try(change, draw)
        except Exception as found:
            error = found
        except Hang as found:
            error = found
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        took, grew = time.process_time() - began, _status("VmHWM") - before
        tally.mutations += 1
        tally.slowest_s, tally.most_mb = max(tally.slowest_s, took), max(tally.most_mb, grew / 1e6)
        if error is None and took > SLOW_S:
            error = Hang(f"it takes more than {SLOW_S:g} s")
        if error is None and grew > _BYTES + _TIMES * len(raw):
            error = MemoryError("it takes more than ten times the file and 50 MB")
        if error is not None:
            self._note(number, error, change)
        return error

    def _try(self, change: str, draw: random.Random) -> None:
        kind, tally = self.kind, self.tally
        try:
            read = kind.read(self._path)
        except FxcompError as refusal:
            str(refusal).encode("utf-8", "surrogatepass")
            tally.refused[type(refusal).__name__] += 1
            return
        tally.accepted += 1
        fully = self._in_full and (change not in self._seen or draw.random() < FULL_SHARE)
        self._seen.add(change)
        tally.used_in_full += fully
        try:
            kind.use(read, fully=fully)
        except FxcompError:
            tally.unfit += 1

    def _note(self, number: int, error: BaseException, change: str) -> None:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "/fxcomp/" in each.filename]
        last = frames[-1] if frames else None
        where = f"fxcomp/{last.filename.rpartition('/fxcomp/')[2]}:{last.name}" if last else ""
        what = f"{type(error).__name__}: {str(error)[:80]}"
        key = (type(error).__name__, where or what)
        if key in self.tally.findings:
            self.tally.findings[key].more += 1
        else:
            self.tally.findings[key] = Finding(self.kind.name, number, what, where, change[:120])


def _new_peak() -> float:
    """Reset the largest resident memory of this process to the current one, and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmHWM")


def _status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(1024.0 * int(line.split()[1]) for line in file if line.startswith(name))


def _hang(*_: Any) -> None:
    raise Hang(f"it takes more than {HANGS_S:g} s")


def guard() -> None:
    """Limit this process's address space, and let a signal end what hangs."""
    limit = int(_status("VmSize")) + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _hang)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", RuntimeWarning)
    torch.set_num_threads(1)


def _row(tally: Tally) -> tuple[object, ...]:
    counts = tally.mutations, tally.record()["findings"], len(tally.findings), sum(tally.refused.values())
    times = f"{tally.seconds:.0f}", f"{tally.slowest_s:.2f}", f"{tally.most_mb:.0f}"
    return (tally.kind, *counts, tally.accepted, tally.used_in_full, *times)


def one(kind: Kind, number: int, folder: Path) -> int:
    trial = Trial(kind, folder)
    raw, change = kind.mutation(random.Random(f"{kind.name} {number}"))
    print(change, repr(raw[:3000]), sep="\n")
    error = trial.run(number)
    traceback.print_exception(error)
    print(trial.tally.record())
    return int(error is not None)


def main() -> int:
    parser = options(__doc__)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--kinds", nargs="*", choices=names, default=names, help="of files")
    parser.add_argument("--share", type=float, default=1.0, help="share of the mutations to run")
    parser.add_argument("--only", type=int, help="run the mutation with this number, of each kind")
    arguments = parser.parse_args()
    guard()
    faulthandler.enable()
    records, tallies = Records(arguments.json), list[Tally]()
    with tempfile.TemporaryDirectory() as folder:
        for kind in (kind() for kind in KINDS if kind.name in arguments.kinds):
            if arguments.only is not None:
                return one(kind, arguments.only, Path(folder))
            trial, began = Trial(kind, Path(folder)), time.perf_counter()
            for number in range(round(kind.mutations * arguments.share)):
                trial.run(number)
                if number % 200 == 0:
                    show_progress(f"{kind.name}: {number}, {len(trial.tally.findings)} findings")
            trial.tally.seconds = time.perf_counter() - began
            show_progress("")
            tallies.append(trial.tally)
            records.add(
                trial.tally.record(), *({"finding": kind.name, **asdict(f)} for f in trial.tally.findings.values())
            )
            for found in trial.tally.findings.values():
                print(json.dumps(asdict(found)), flush=True)
    heads = "kind | mutations > | findings > | places > | refused > | accepted > | in full > | s > | slowest s > | MB >"
    print(table(heads, map(_row, tallies)))
    return int(any(tally.findings for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
