"""Measure what codecs lose: run them on runs of values that are drawn in proportion to their squares.

    run      = 512 neighbouring values, or a whole number of the codec's blocks
    drawn    = 64 runs, each with the probability |run|² / |v|²
    error    = mean over the drawn runs of |run - decoded|² / |run|²

which is |v - decoded|² / |v|² on average, whatever the distribution: a run that matters more is drawn more often, and
one of zeros never. No gradient makes a run's error exceed the codec's worst case, so the standard error is at most the
runs' deviation over √64. It is smaller, because runs are drawn evenly from those whose largest value stands out little
to those where it stands out most, which is what the error of a quantiser depends on. A gradient of no more than 64 runs
is measured whole. One draw stands for the expectation of codecs
that round at random: it averages over thousands of values.

All gradients go through a codec in one call, a segment each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from fxcomp.compressors import Compressor
from fxcomp.error_tables.norms import row_crests, row_squares, squares

RUN = 512
RUNS = 64
MOST = 1e3
"""The error of values that overflow: no budget pays it."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The values of a gradient that codecs are tried on."""

    values: Tensor
    """Flat: drawn runs, or all values."""
    run: int
    """The length of a run; 0 if these are all values."""
    whole: float
    """|v|² of the gradient."""

    def lost(self, left: Tensor) -> float:
        """Estimate |v - decoded|² of the gradient, from what a codec has left out of these values."""
        if not self.run:
            return min(squares(left), MOST * self.whole)
        of_runs = row_squares(left.view(-1, self.run)) / row_squares(self.values.view(-1, self.run))
        return min(float(of_runs.mean()), MOST) * self.whole


def runs_of(codecs: Iterable[Compressor]) -> dict[int, list[Compressor]]:
    """Sort codecs by the length of runs that their blocks fill."""
    found: dict[int, list[Compressor]] = {}
    for codec in codecs:
        run = RUN if RUN % codec.grain == 0 else -(-RUN // codec.grain) * codec.grain
        found.setdefault(run, []).append(codec)
    return found


def draw_runs(value: Tensor, run: int, whole: float, start: float) -> Drawn:
    """Draw runs of a finite vector, given |v|² > 0, at equal steps of their added squares from `start` in [0, 1) on."""
    if len(value) <= RUNS * run:
        return Drawn(value, 0, whole)
    rows = value[: len(value) // run * run].view(-1, run)
    of_rows = row_squares(rows)
    if not float(of_rows.sum()) > 0:
        return Drawn(value, 0, whole)  # all is in the values behind the last run
    order = row_crests(rows, of_rows).argsort()
    added = of_rows[order].cumsum(0)
    steps = (torch.arange(RUNS, device=value.device, dtype=torch.float64) + start) / RUNS
    places = torch.searchsorted(added, steps * added[-1], right=True).clamp_max(len(rows) - 1)
    return Drawn(rows[order[places]].flatten(), run, whole)


def lost_by_codec(codec: Compressor, drawn: Sequence[Drawn], key: int) -> list[float]:
    """Run a codec on all gradients' drawn values, and return what it loses of each gradient."""
    if not drawn:
        return []
    segments = tuple(len(each.values) for each in drawn)
    values = torch.cat([each.values for each in drawn])
    left = torch.zeros_like(values)
    payload = torch.empty(codec.payload_elements(segments), dtype=codec.payload_dtype, device=values.device)
    state = None
    if codec.has_state:
        states = [codec.of_segment(index).fresh_state(size, key + index, 0) for index, size in enumerate(segments)]
        state = torch.cat(states).to(values.device)
    codec.encode(values, left, payload, segments, state)
    if payload.is_floating_point():  # what rounds to infinity is in no residual
        left.masked_fill_(~payload.isfinite(), inf)
    ends = list(accumulate(segments))
    return [each.lost(left[end - len(each.values) : end]) for each, end in zip(drawn, ends, strict=True)]
