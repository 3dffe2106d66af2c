"""Collect what a run on a GPU finds: checks and times, written down as they come."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from records import Records, spread

TIMED = 30


class Results(Records):
    """Records of checks and times; a check that raises is a record too."""

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
            ms = spread(found)
            self.add({"name": name, "ms": ms})
            print(f"     {name}: {ms['median']:.2f} ms ({ms['p10']:.2f} to {ms['p90']:.2f})", flush=True)
