"""Measure compression errors on a step's gradients before any parameter changes. All ranks measure, or none.

    when a gradient is packed     keep it, with a copy of its residual
    before the first update       if all ranks can, measure; then free the gradients

Parameters are bitwise the same with and without the measurement.

Residuals are added in the unit of the rank's gradient. If hosts sum before compression, a rank adds its shard of the
host's residual. Sums over ranks are then right, but sums of squares on one rank are not. Residuals of a dropped plan
are excluded.

Memory: all gradients at once, and a copy of the residuals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.compressors import Compressor
from fxcomp.error_tables import Rows, measure
from fxcomp.error_tables.table import LOW_RANK
from fxcomp.runtime.arena import Arena
from fxcomp.runtime.clock import Clock
from fxcomp.site import Site

MARGIN = 1.1
"""Factor for the rounding of sizes by allocators (assumed)."""

DRAWN_BYTES = 4 * 2 * 64 * 512
"""Bytes of 64 runs of 512 elements, sampled from one gradient, and of their concatenation."""

LAG = 0.8
"""error of powersgd = (error of the best matrix of the same matrix rank) ** LAG. One subspace iteration per step
follows changing gradients late, so powersgd is worse. Fitted to small tasks with four workers, within 6 %
(docs/benchmarks/error_tables.md).
"""

Shapes = Mapping[str, tuple[int, ...]]


class ErrorLook:
    """Measurement in one step, on every rank. `number` is the look's index, and seeds sampling.

    Ranks measure only if `wants` is set and memory suffices on every rank.
    """

    def __init__(
        self,
        family: Sequence[Compressor],
        number: int,
        shapes: Shapes,
        residuals: Arena,
        site: Site,
        *,
        wants: bool = True,
    ):
        self._family, self._number = family, number
        self._shapes, self._residuals, self._site = shapes, residuals, site
        self._clock, self._spans = Clock(site.device), list[tuple[Any, Any]]()
        spare = compat.spare_bytes(site.device)
        self.lacks_room = spare is not None and spare < needed_bytes(shapes)
        self._is_on = wants and not self.lacks_room
        self._seen: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        """Gradients or parts of gradients, by parameter and index of the first element."""
        self._left_out: dict[str, Tensor] = {}
        self.rows: Rows | None = None
        """Errors of the family, the same on all ranks; None until measured."""
        self.is_left_out = False
        """True if the step was skipped."""
        self.some_lack_room = False

    def see(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Keep a gradient, or its part from element `start` on, before compression."""
        if not self._is_on:
            return
        with self._timed():
            try:
                self._keep(name, gradient.detach().flatten(), start)
            except compat.OUT_OF_MEMORY:
                self.lacks_room = True
        if self.lacks_room:
            self._let_go()

    def _keep(self, name: str, flat: Tensor, start: int) -> None:
        self._seen[name][start] = flat
        here = range(start, start + len(flat))
        for piece in self._residuals.slices.get(name, ()):
            if piece.slot == 0 and piece.start in here:
                if name not in self._left_out:
                    self._left_out[name] = torch.zeros(prod(self._shapes[name]), device=flat.device)
                piece.add_to(self._left_out[name], times=self._site.ranks.world_size)

    def _let_go(self) -> None:
        self._is_on = False
        self._seen.clear()
        self._left_out.clear()

    def measure(self, _: Tensor) -> None:
        """Measure the kept gradients if all ranks can. Every rank calls it before its first update."""
        site, is_out = self._site, not self._is_on or any(self._missing(name) for name in self._shapes)
        flags = torch.tensor([float(is_out), float(self.lacks_room)], device=site.device)
        site.sum_over_ranks(flags)
        some_out, self.some_lack_room = (bool(flag > 0) for flag in flags.cpu())
        if not some_out:
            with self._timed():
                gradients = {name: self._whole(name) for name in self._shapes}
                sums, look = site.sum_over_ranks, self._number
                rows = measure(gradients, self._left_out, self._family, sums, rank=site.rank, look=look)
                self.rows = lagging(rows) if self._family is LOW_RANK else rows
        self._let_go()

    def _missing(self, name: str) -> bool:
        return sum(map(len, self._seen[name].values())) != prod(self._shapes[name])

    def _whole(self, name: str) -> Tensor:
        parts = sorted(self._seen.pop(name).items(), key=lambda each: each[0])
        return torch.cat([part for _, part in parts]).view(self._shapes[name])

    @contextmanager
    def _timed(self) -> Generator[None]:
        begin = self._clock.look()
        yield
        self._spans.append((begin, self._clock.look()))

    def took_us(self) -> float:
        """Return the time added to the step, in µs. Waits for the device."""
        compat.synchronize(self._site.device)
        return sum(self._clock.us(begin, end) or 0.0 for begin, end in self._spans)


def needed_bytes(shapes: Shapes) -> int:
    """Return the bytes of gradients, residuals and temporaries."""
    sizes = [prod(shape) for shape in shapes.values()]
    return int(MARGIN * (4 * (2 * sum(sizes) + 4 * max(sizes, default=0)) + DRAWN_BYTES * len(sizes)))


def lagging(rows: Rows) -> Rows:
    """Convert the errors of the best low-rank matrices to the errors of powersgd."""
    return {name: replace(row, errors=tuple(each**LAG for each in row.errors)) for name, row in rows.items()}
