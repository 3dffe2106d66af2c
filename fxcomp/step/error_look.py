"""Take one look at what a running step compresses, and measure what compressors would lose of it.

    look = ErrorLook(shapes, state.residuals, ranks)
    runtime.on_gradient = look.see               while the step's lines pack
    look.table(draw=..., all_reduce=...)         before its updates, where every rank has seen all gradients

A bucket is packed before its compression replaces its residual, so what was left out is copied when a gradient is seen.
Both are in the unit of a rank's gradient. Where hosts add up before they compress, a rank has a shard of its host's
residual, and v is the rank's gradient plus that: sums over the ranks are right, a rank's squares are not. Velocities
and what another plan owes are not in v.

Memory: all gradients, which would else be freed one after the other, and a copy of the residuals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxcomp.error_tables import STANDARD, Columns, Draw, ErrorTable, measure
from fxcomp.error_tables.measure import AllReduce
from fxcomp.runtime.arena import Residuals

_linalg: Any = torch.linalg


class ErrorLook:
    """Keeps a step's gradients with what was left out before, until they are measured.

    Of gradients that are not among `kept` only the squares are added up. Without it all are kept.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        residuals: Residuals,
        ranks: int,
        kept: Collection[str] | None = None,
    ):
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._kept = [name for name in shapes if kept is None or name in kept]
        self._residuals, self._ranks = residuals, ranks
        self._seen: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        """By parameter and start."""
        self._left_out: dict[str, Tensor] = {}
        self._elements = Counter[str]()
        self._norms: list[Tensor] = []

    def see(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Take in a gradient, or the part of one from element `start` on, before it is compressed."""
        flat = gradient.detach().flatten()
        self._elements[name] += len(flat)
        if len(self._kept) < len(self._shapes):
            norm = _linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
            self._norms.append(norm.float())
        if name not in self._kept:
            return
        self._seen[name][start] = flat
        here = range(start, start + len(flat))
        for piece in self._residuals.slices.get(name, ()):
            if piece.slot == 0 and piece.start in here:
                if name not in self._left_out:
                    self._left_out[name] = torch.zeros(prod(self._shapes[name]), device=flat.device)
                piece.add_to(self._left_out[name], times=self._ranks)

    @property
    def is_whole(self) -> bool:
        """Tell that each gradient has been seen, with all of its elements."""
        return all(self._elements[name] == prod(shape) for name, shape in self._shapes.items())

    def table(
        self, columns: Columns = STANDARD, draw: Draw | None = None, all_reduce: AllReduce | None = None
    ) -> ErrorTable:
        """Measure the gradients that were kept, once each has been seen whole; every rank calls it."""
        gradients: dict[str, Tensor] = {}
        for name in self._kept:
            shape = self._shapes[name]
            flat = torch.cat([part for _, part in sorted(self._seen[name].items(), key=lambda each: each[0])])
            assert len(flat) == prod(shape), f"only {len(flat)} elements of {name} have been seen"
            gradients[name] = flat.view(shape)
        return measure(gradients, self._left_out, columns, draw, all_reduce)

    def squares(self, table: ErrorTable, all_reduce: AllReduce) -> float:
        """Return |g|² of all gradients, the mean over the ranks, given the table of those kept; every rank calls it."""
        if not self._norms:
            return sum(row.squares for row in table.rows.values())
        found = torch.stack(self._norms)
        norms = found.double()
        total = torch.where(norms.isfinite(), norms, 0.0).square().sum() / self._ranks
        all_reduce(total)
        return total.item()
