"""Run a step with a look at its gradients, before any parameter changes. All ranks measure, or none does.

    each gradient, as it is packed   kept, with what was left out
    before the first update          ranks agree that all of them can measure; then they do, and let go of gradients
    after the last line              nothing counts if the step was left out

Lines, updates and random numbers are those of a step without a look, so parameters are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.codegen.program import Program
from fxcomp.error_tables import Columns, Draw, ErrorTable, scaled
from fxcomp.runtime.arena import Residuals
from fxcomp.runtime.clock import clock_of
from fxcomp.runtime.runtime import Runtime
from fxcomp.site import Site
from fxcomp.step.error_look import ErrorLook

MARGIN = 1.1
"""Allocators round up (assumed)."""

DRAWN_BYTES = 4 * 2 * 64 * 512
"""The drawn runs of one gradient, of two lengths."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Aim:
    """What a look is at; `number` counts looks, so that each draws other values."""

    columns: Columns
    names: tuple[str, ...]
    number: int


class StepLook:
    """One look, at one step; every rank makes one.

    `wants` says that this rank may look. The others are told, and none does if one may not, or has no room for it.
    """

    def __init__(self, aim: Aim, shapes: Shapes, residuals: Residuals, site: Site, *, wants: bool = True):
        self._site, self._aim = site, aim
        spare = compat.spare_bytes(site.device)
        self._lacks_room = spare is not None and spare < needed_bytes(shapes, aim.names)
        is_on = wants and not self._lacks_room
        self._look = ErrorLook(shapes, residuals, site.ranks.world_size, aim.names) if is_on else None
        self._clock = clock_of(site.device)
        self._spans: list[tuple[Any, Any]] = []
        self.table: ErrorTable | None = None
        """What was measured, the same on all ranks, with shares of all squares; None if nothing was, or counts."""
        self.was_taken = False
        """All ranks have measured, whether it counts or not."""
        self.some_lack_room = False

    def run(self, _: int, program: Program, runtime: Runtime, arguments: Sequence[Any]) -> Any:
        """Run the emitted step."""
        runtime.on_gradient, runtime.on_update = self._see, self._measure
        try:
            result = program.run(runtime, arguments)
        finally:
            runtime.on_gradient = runtime.on_update = None
            self._look = None
        if runtime.counters.skipped:
            self.table = None
        return result

    def took_us(self) -> float:
        """Return the time of keeping and measuring; waits for the device."""
        compat.synchronize(self._site.device)
        return sum(self._clock.us(begin, end) or 0.0 for begin, end in self._spans)

    def _see(self, name: str, gradient: Tensor, start: int) -> None:
        begin, look = self._clock.look(), self._look
        if look is not None:
            self._look = None
            with suppress(*compat.OUT_OF_MEMORY):
                look.see(name, gradient, start)
                self._look = look
            self._lacks_room = self._look is None
        self._spans.append((begin, self._clock.look()))

    def _measure(self, _: Tensor) -> None:
        look, self._look = self._look, None
        is_out = look is None or not look.is_whole
        flags = torch.tensor([float(is_out), float(self._lacks_room)], device=self._site.device)
        self._site.sum_over_ranks(flags)
        some_out, self.some_lack_room = (bool(flag > 0) for flag in flags.cpu())
        if look is None or some_out:
            return
        begin = self._clock.look()
        all_reduce = self._site.sum_over_ranks
        table = look.table(self._aim.columns, Draw(self._site.rank, self._aim.number), all_reduce)
        squares = look.squares(table, all_reduce)
        self.table = scaled(table, 1 / squares if squares > 0 else 0.0)
        self.was_taken = True
        self._spans.append((begin, self._clock.look()))


def needed_bytes(shapes: Shapes, names: Sequence[str]) -> int:
    """Count what a look holds beside the step: gradients, residuals, and what measuring the largest one takes."""
    sizes = [prod(shapes[name]) for name in names]
    return int(MARGIN * (4 * (2 * sum(sizes) + 4 * max(sizes, default=0)) + DRAWN_BYTES * len(sizes)))
