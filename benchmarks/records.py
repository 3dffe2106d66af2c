"""Write benchmark records and tables in one format.

    {"made": {"by": "step_time.py", "date": "2026-11-25", "torch": "2.13.0", "processors": 2, ...}, "records": [{...}]}

`made` describes the run; records are flat. The file is rewritten after each record, so an interrupted run keeps its
records.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch

from fxcomp import compat

Record = Mapping[str, Any]

_TIMED = 30
"""Timed steps per contestant on a GPU."""


class Records:
    """Records, saved to a file if given. `made` holds facts about all records."""

    def __init__(self, path: Path | None, **made: object) -> None:
        where = {"torch": torch.__version__, "python": platform.python_version(), "processors": os.cpu_count()}
        load = round(os.getloadavg()[0], 1)
        self.made = {"by": Path(sys.argv[0]).name, "date": time.strftime("%Y-%m-%d"), **where, "load": load, **made}
        self.found: list[dict[str, Any]] = []
        self._path = path

    def add(self, *records: Any) -> None:
        self.found += [asdict(record) if is_dataclass(record) else dict(record) for record in records]  # pyright: ignore
        if self._path is not None:
            lines = ",\n".join(json.dumps(record) for record in self.found)
            compat.write_atomically(self._path, f'{{"made": {json.dumps(self.made)}, "records": [\n{lines}\n]}}\n')


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Results(Records):
    """Records of checks and times; an exception in a check is recorded."""

    def __init__(self, path: Path | None = None, only: str = "", **made: object) -> None:
        super().__init__(path, **made)
        self.only = only

    def check(self, name: str, run: Callable[[], tuple[bool, str]]) -> None:
        if self.only not in name:
            return
        try:
            ok, detail = run()
        except Exception as error:
            traceback.print_exc()
            ok, detail = False, f"{type(error).__name__}: {error}"
        self.add({"check": name, "ok": ok, "detail": detail})
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", flush=True)

    def time(self, contestants: dict[str, Callable[[], object]]) -> None:
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(_TIMED):
            for name, run in contestants.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - start))
        for name, found in times.items():
            ms = spread(found)
            self.add({"name": name, "ms": ms})
            print(f"     {name}: {ms['median']:.2f} ms ({ms['p10']:.2f} to {ms['p90']:.2f})", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Read a file's records; earlier files hold a list or a single record."""
    data = json.loads(path.read_text())
    found = data.get("records", data) if isinstance(data, dict) else data
    return found if isinstance(found, list) else [found]


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table: in `table("name | ms >", rows)` the second column is right-aligned."""
    heads = [each.strip() for each in head.split("|")]
    lines = [[each.removesuffix(">").strip() for each in heads]]
    lines.append(["--:" if each.endswith(">") else "---" for each in heads])
    lines += [[str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p10, p90 = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return {"median": statistics.median(ordered), "p10": p10, "p90": p90, "n": len(ordered)}


def show_progress(note: str) -> None:
    """Show a note on the terminal; an empty note clears it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{note}", end="", file=sys.stderr, flush=True)


def options(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here, as they come")
    return parser
