"""Compute errors of compressors on one rank's values: estimates from samples for codecs, exact for top-k.

Squares are summed in fp32, or in fp64, 20 times slower, for rows outside fp32's range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, TopK

_linalg: Any = torch.linalg

RUN = 512

_SMALLEST, _LARGEST = 1e-15, 1e15  # bounds of norms whose squares, and partial sums, fp32 holds


def row_squares(rows: Tensor) -> Tensor:
    """Return |row|² of each row, in fp64."""
    if rows.numel() == 0:
        return rows.new_zeros(len(rows), dtype=torch.float64)
    norms: Tensor = _linalg.vector_norm(rows, dim=1)
    if not _SMALLEST < float(norms.max()) < _LARGEST:
        norms = _linalg.vector_norm(rows.double(), dim=1)
    return norms.double().square()


def squares(flat: Tensor) -> float:
    """Return |flat|²; not finite if a value is not finite."""
    whole = len(flat) // RUN * RUN
    parts = [row_squares(flat[:whole].view(-1, RUN)), row_squares(flat[whole:].view(1, -1))]
    return float(torch.cat(parts).sum())


def row_crests(rows: Tensor, of_rows: Tensor) -> Tensor:
    """Return max(row²) / |row|² of each row; 0 for a row of zeros. `of_rows` are |row|²."""
    largest: Tensor = _linalg.vector_norm(rows, torch.inf, dim=1)
    return torch.where(of_rows > 0, largest.double().square() / of_rows, 0.0)


_SORTED = 1 << 12
"""Up to this number of values, one sort is faster than a selection for each k."""


def lost_by_largest(value: Tensor, kept: Sequence[int]) -> list[float]:
    """Return |v|² without the k largest magnitudes, for each k in the ascending `kept`.

        largest 1/4 of all values  -->  largest 10 %, found among these  -->  largest 3 %, found among these  --> ...

    Errors are sums of the omitted squares, not differences of large numbers.
    """
    lost, left, rest = list[float](), 0.0, value
    for number, count in reversed(list(enumerate(kept, 1))):
        if len(rest) <= _SORTED:
            added: Any = rest.double().square().sort().values.cumsum(0)
            rising: list[float] = added.tolist()
            lost += [left + (rising[len(rest) - k - 1] if k < len(rest) else 0.0) for k in reversed(kept[:number])]
            break
        if count < len(rest):
            rest, missed = _largest_of(rest, count)
            left += missed
        lost.append(left)
    return lost[::-1]


def _largest_of(value: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the `count` largest magnitudes, and |v|² of the others."""
    segments = (len(value),)
    topk = TopK(min(1.0, (count - 0.5) / len(value)))  # rounds up to `count`
    payload = torch.empty(topk.payload_elements(segments), dtype=topk.payload_dtype, device=value.device)
    others = torch.zeros_like(value)
    topk.encode(value, others, payload, segments)
    return payload[: 4 * count].clone().view(torch.float32), squares(others)


RUNS = 64
MOST = 1e3
"""Error assigned to values that overflow; above every budget."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Values of a gradient on which codecs are measured: runs drawn in proportion to their squares.

        run      = 512 neighbouring values, a whole number of each codec's blocks
        drawn    = 64 runs, each with the probability |run|² / |v|²
        error    = mean over the drawn runs of |run - decoded|² / |run|²

    The expected value is |v - decoded|² / |v|², for any distribution. Runs are sorted by max(run²) / |run|²,
    which determines a quantiser's error, and are drawn at equal steps of cumulative squares, so the standard error is
    below the standard error of independent draws. A gradient of at most 64 runs is measured whole.
    """

    values: Tensor
    """Drawn runs, or all values; flat."""
    whole: float
    """|v|² of the gradient."""
    is_sample: bool

    def lost(self, left: Tensor) -> float:
        """Estimate |v - decoded|² of the gradient from `left`, the residual of `values`."""
        if not self.is_sample:
            return min(squares(left), MOST * self.whole)
        of_runs = row_squares(left.view(-1, RUN)) / row_squares(self.values.view(-1, RUN))
        return min(float(of_runs.mean()), MOST) * self.whole


def draw_runs(value: Tensor, whole: float, start: float) -> Drawn:
    """Draw runs of a finite nonzero vector at equal steps of cumulative squares, shifted by `start` in [0, 1)."""
    everything = Drawn(value, whole, is_sample=False)
    if len(value) <= RUNS * RUN:
        return everything
    rows = value[: len(value) // RUN * RUN].view(-1, RUN)
    of_rows = row_squares(rows)
    if not float(of_rows.sum()) > 0:
        return everything  # only the values after the last run are nonzero
    order = row_crests(rows, of_rows).argsort()
    added = of_rows[order].cumsum(0)
    steps = (torch.arange(RUNS, device=value.device, dtype=torch.float64) + start) / RUNS
    places = torch.searchsorted(added, steps * added[-1], right=True).clamp_max(len(rows) - 1)
    return Drawn(rows[order[places]].flatten(), whole, is_sample=True)


def lost_by_codec(codec: Compressor, drawn: Sequence[Drawn]) -> list[float]:
    """Return |v - decoded|² of each gradient, estimated from a codec's error on its drawn values."""
    if not drawn:
        return []
    segments = tuple(len(each.values) for each in drawn)
    values = torch.cat([each.values for each in drawn])
    left = torch.zeros_like(values)
    payload = torch.empty(codec.payload_elements(segments), dtype=codec.payload_dtype, device=values.device)
    codec.encode(values, left, payload, segments)
    if payload.is_floating_point():  # the residual lacks values that round to infinity
        left.masked_fill_(~payload.isfinite(), inf)
    return [each.lost(part) for each, part in zip(drawn, torch.split_with_sizes(left, list(segments)), strict=True)]
