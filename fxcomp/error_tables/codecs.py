"""Measure what one rank's values lose: to codecs, on runs drawn from them, and by keeping the largest, exactly.

Squares are those of fp32 values of any size, summed while they are read once. Sums of a row are fp32, whose range ends
at squares of 1e38; rows beyond it, or too small for it, are summed in fp64, which takes twenty times as long.
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
"""Values in a run."""

_SMALLEST, _LARGEST = 1e-15, 1e15  # of a norm whose square, and those of its parts, fp32 holds


def row_squares(rows: Tensor) -> Tensor:
    """Return |row|² of each row, in fp64."""
    if rows.numel() == 0:
        return rows.new_zeros(len(rows), dtype=torch.float64)
    norms: Tensor = _linalg.vector_norm(rows, dim=1)
    if not _SMALLEST < float(norms.max()) < _LARGEST:
        norms = _linalg.vector_norm(rows.double(), dim=1)
    return norms.double().square()


def squares(flat: Tensor) -> float:
    """Return |flat|²; not finite where a value is not."""
    whole = len(flat) // RUN * RUN
    parts = [row_squares(flat[:whole].view(-1, RUN)), row_squares(flat[whole:].view(1, -1))]
    return float(torch.cat(parts).sum())


def row_crests(rows: Tensor, of_rows: Tensor) -> Tensor:
    """Return the square of each row's largest value over |row|², which is given; 0 for a row of zeros."""
    largest: Tensor = _linalg.vector_norm(rows, torch.inf, dim=1)
    return torch.where(of_rows > 0, largest.double().square() / of_rows, 0.0)


_SORTED = 1 << 12
"""A sort of so many values takes as long as starting the selections."""


def lost_by_largest(value: Tensor, kept: Sequence[int]) -> list[float]:
    """Return |v|² of what is left when the `kept` largest magnitudes are taken; `kept` rises.

        1/4 of all values  -->  the largest 10 % of all among them  -->  the largest 3 % among these  --> ...

    top-k's own kernel selects. What it leaves out of one selection adds to what the selections before it have left out,
    so no number is the difference of two large ones. Each selection reads what the one before it has kept, so all of
    them together read little more than a gradient once. Few values are sorted instead.
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
    """Select so many of the largest magnitudes; also |v|² of the others."""
    segments = (len(value),)
    topk = TopK(min(1.0, (count - 0.5) / len(value)))  # rounds up to `count`
    payload = torch.empty(topk.payload_elements(segments), dtype=topk.payload_dtype, device=value.device)
    others = torch.zeros_like(value)
    topk.encode(value, others, payload, segments)
    return payload[: 4 * count].clone().view(torch.float32), squares(others)


RUNS = 64
MOST = 1e3
"""The error of values that overflow: no budget pays it."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The values of a gradient that codecs are tried on: runs that are drawn in proportion to their squares.

        run      = 512 neighbouring values, a whole number of each codec's blocks
        drawn    = 64 runs, each with the probability |run|² / |v|²
        error    = mean over the drawn runs of |run - decoded|² / |run|²

    which is |v - decoded|² / |v|² on average, whatever the distribution: a run that matters more is drawn more often,
    and one of zeros never. No gradient makes a run's error exceed the codec's worst case, so the standard error is at
    most the runs' deviation over √64. It is smaller, because runs are drawn evenly from those whose largest value
    stands out little to those where it stands out most, which is what the error of a quantiser depends on. A gradient
    of no more than 64 runs is measured whole.
    """

    values: Tensor
    """Flat: drawn runs, or all values."""
    whole: float
    """|v|² of the gradient."""
    is_sample: bool

    def lost(self, left: Tensor) -> float:
        """Estimate |v - decoded|² of the gradient, from what a codec has left out of these values."""
        if not self.is_sample:
            return min(squares(left), MOST * self.whole)
        of_runs = row_squares(left.view(-1, RUN)) / row_squares(self.values.view(-1, RUN))
        return min(float(of_runs.mean()), MOST) * self.whole


def draw_runs(value: Tensor, whole: float, start: float) -> Drawn:
    """Draw runs of a finite vector, given |v|² > 0, at equal steps of their added squares from `start` in [0, 1) on."""
    everything = Drawn(value, whole, is_sample=False)
    if len(value) <= RUNS * RUN:
        return everything
    rows = value[: len(value) // RUN * RUN].view(-1, RUN)
    of_rows = row_squares(rows)
    if not float(of_rows.sum()) > 0:
        return everything  # all is in the values after the last run
    order = row_crests(rows, of_rows).argsort()
    added = of_rows[order].cumsum(0)
    steps = (torch.arange(RUNS, device=value.device, dtype=torch.float64) + start) / RUNS
    places = torch.searchsorted(added, steps * added[-1], right=True).clamp_max(len(rows) - 1)
    return Drawn(rows[order[places]].flatten(), whole, is_sample=True)


def lost_by_codec(codec: Compressor, drawn: Sequence[Drawn]) -> list[float]:
    """Run a codec on all gradients' drawn values, a segment each, and return what it loses of each gradient."""
    if not drawn:
        return []
    segments = tuple(len(each.values) for each in drawn)
    values = torch.cat([each.values for each in drawn])
    left = torch.zeros_like(values)
    payload = torch.empty(codec.payload_elements(segments), dtype=codec.payload_dtype, device=values.device)
    codec.encode(values, left, payload, segments)
    if payload.is_floating_point():  # what rounds to infinity is in no residual
        left.masked_fill_(~payload.isfinite(), inf)
    return [each.lost(part) for each, part in zip(drawn, torch.split_with_sizes(left, list(segments)), strict=True)]
