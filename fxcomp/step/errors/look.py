"""Look at a running step's gradients, before any parameter changes. All ranks measure, or none does.

    each gradient, as it is packed   kept, with what was left out
    before the first update          ranks agree that all of them can measure; then they do, and let go of gradients

Lines, updates and random numbers are those of a step without a look, so parameters are the same to the bit.

A bucket is packed before its compression replaces its residual, so what was left out is copied when a gradient is seen.
Both are in the unit of a rank's gradient. Where hosts add up before they compress, a rank has a shard of its host's
residual, and v is the rank's gradient plus that: sums over the ranks are right, a rank's squares are not. What another
plan owes is not in v.

Memory: all gradients, which would else be freed one after the other, and a copy of the residuals.
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
"""Allocators round up (assumed)."""

DRAWN_BYTES = 4 * 2 * 64 * 512
"""The drawn runs of one gradient, and all of them in a row."""

LAG = 0.8
"""powersgd takes one step of subspace iteration a step, which follows changing gradients late: it loses the error of
the best matrix of its rank to this power. Fitted to small tasks with four workers, which are within 6 % of that
(docs/benchmarks/error_tables.md)."""

Shapes = Mapping[str, tuple[int, ...]]


class ErrorLook:
    """One look, in one step; every rank makes one. `number` counts looks, so that each draws other values.

    `wants` says that this rank may look. The others are told, and none does if one may not, or has no room for it.
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
        """This rank has no memory for it."""
        self._is_on = wants and not self.lacks_room
        self._seen: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        """By parameter and start."""
        self._left_out: dict[str, Tensor] = {}
        self.rows: Rows | None = None
        """Errors of the family, the same on all ranks; None until all have measured."""
        self.is_left_out = False
        """The step was left out, so that nothing counts."""
        self.some_lack_room = False

    def see(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Take in a gradient, or the part of one from element `start` on, before it is compressed."""
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
        """Measure what was seen, if all ranks can; every rank calls it before its first update."""
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
        """Return the time that it took beside the step; waits for the device."""
        compat.synchronize(self._site.device)
        return sum(self._clock.us(begin, end) or 0.0 for begin, end in self._spans)


def needed_bytes(shapes: Shapes) -> int:
    """Count what a look holds beside the step: gradients, residuals, and what measuring the largest one takes."""
    sizes = [prod(shape) for shape in shapes.values()]
    return int(MARGIN * (4 * (2 * sum(sizes) + 4 * max(sizes, default=0)) + DRAWN_BYTES * len(sizes)))


def lagging(rows: Rows) -> Rows:
    """Return the errors of powersgd as it runs, of those of the best matrices."""
    return {name: replace(row, errors=tuple(each**LAG for each in row.errors)) for name, row in rows.items()}
