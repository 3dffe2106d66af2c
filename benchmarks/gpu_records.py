"""Collect what a run on a GPU finds: checks and times, written down as they come."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from fxcomp import compat

TIMED = 30


class Results:
    """Records of checks and times, written to a file as they come; a check that raises is a record too."""

    def __init__(self, path: Path | None = None, only: str = "") -> None:
        self.records: list[dict[str, object]] = []
        self.only = only
        self._path = path

    def add(self, *records: dict[str, object]) -> None:
        self.records += records
        if self._path is not None:
            compat.write_atomically(self._path, json.dumps(self.records, indent=1) + "\n")

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
        """Steps in turns, each until the GPU is done."""
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(TIMED):
            for name, run in contestants.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - start))
        for name, found in times.items():
            ordered = sorted(found)
            low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
            ms = {"median": statistics.median(ordered), "p10": low, "p90": high, "n": len(ordered)}
            self.add({"name": name, "ms": ms})
            print(f"     {name}: {ms['median']:.2f} ms ({low:.2f} to {high:.2f})", flush=True)
