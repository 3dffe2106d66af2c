"""Raise an error where code calls a function, at one call after the other.

Only calls out of files that talk to other ranks count, and of calls that repeat from one line to one function only the
first few: what a function computes by itself fails like the call of it.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

import fxcomp
from fxcomp.ranks import Ranks

PACKAGE = str(Path(fxcomp.__file__).parent)
DISTRIBUTED = str(Path(dist.__file__).parent)

TALKING = (
    *("frontends/compile_step", "frontends/torch_compile", "frontends/compiled_model", "pipeline", "ranks", "site"),
    *("planning/decide", "planning/timed_steps", "planning/earlier_jobs", "step/first_steps"),
    *("step/compiled_step", "step/schedule", "step/drift", "step/plan_in_force", "step/executor", "step/programs"),
    *("step/execution", "step/errors/error_looks"),
    *("state/gradient_state", "state/inputs", "state/saved_state"),
    *(
        "runtime/agree",
        "runtime/runtime",
        "runtime/transport",
        "runtime/group",
        "runtime/arena",
        "runtime/compressor_states",
    ),
)
BEGINS = inspect.unwrap(Ranks.together).__code__
CALLERS = {str((Path(PACKAGE) / f"{name}.py").resolve(strict=True)) for name in TALKING}

REPEATS = 2
"""So many calls of a function from one line count."""


class Injected(BaseException):
    """Stand for running out of memory or an interrupt: no Exception."""


def calls_of(work: Callable[[], Any], raises_at: int | None = None) -> tuple[Any, list[str]]:
    """Return what `work` returned and the calls that it made; raise Injected at the call of that number.

    Calls count once the rank has begun something together with the others: before, it has not come at all.
    """
    seen: Counter[tuple[str, int, Any]] = Counter()
    calls: list[str] = []
    has_begun = False

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_begun
        caller, code = frame.f_back, frame.f_code
        if event != "call" or caller is None:
            return
        if not has_begun:
            has_begun = code is BEGINS
            return
        if caller.f_code.co_filename not in CALLERS:
            return
        if not code.co_filename.startswith((PACKAGE, DISTRIBUTED)):
            return
        edge = caller.f_code.co_filename, caller.f_lineno, code
        seen[edge] += 1
        if seen[edge] > REPEATS:
            return
        file, line, name = Path(edge[0]).stem, edge[1], code.co_name
        calls.append(f"{file}:{line} {name}")
        if len(calls) - 1 == raises_at:
            raise Injected(f"at {calls[-1]}")

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        return work(), calls
    finally:
        sys.settrace(before)
