"""Find the magnitude of a given rank among many, on the device: three digits of it, 11, 10 and 10 bits.

Each digit comes from a histogram of the magnitudes that begin with the digits known so far. What is sought stands in a
row of `decisions`: is it open, the bits known so far, the rank among what has these bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.tiles import Tiles, segment_of, tile_of

BINS = 2048
DIGITS = ((20, 31), (10, 20), (0, 10))  # the bits of a magnitude, and what lies above them
DECISION_COLUMNS = constant(3)


@jit
def pick(decisions, histograms, SHIFT: constexpr, BINS: constexpr):
    """Append the next digit to an open decision: the last bin, from the largest on, that holds the rank."""
    decision = decisions + tl.program_id(0) * DECISION_COLUMNS
    is_open = tl.load(decision) != 0
    known = tl.load(decision + 1)
    rank = tl.load(decision + 2)
    digit = tl.arange(0, BINS)
    found = tl.load(histograms + tl.program_id(0) * BINS + digit)
    up_to = tl.cumsum(found, axis=0)
    above = tl.sum(found, axis=0) - up_to
    is_it = (above < rank) & (rank <= above + found)
    tl.store(decision + 1, known | (tl.sum(tl.where(is_it, digit, 0), axis=0) << SHIFT), is_open)
    tl.store(decision + 2, rank - tl.sum(tl.where(is_it, above, 0), axis=0), is_open)


@jit
def add_to_histogram(histogram, magnitude, is_there, known, SHIFT: constexpr, ABOVE: constexpr, BINS: constexpr):
    """Count the digits of magnitudes that begin with what is known."""
    is_ours = is_there & ((magnitude >> ABOVE) == (known >> ABOVE))
    digit = (magnitude >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
    found = tl.histogram(tl.where(is_ours, digit, 0), BINS, mask=is_ours)
    tl.atomic_add(histogram + tl.arange(0, BINS), found, mask=found > 0)


@jit
def _histogram(
    table,
    sample,
    decisions,
    histograms,
    segments,
    SHIFT: constexpr,
    ABOVE: constexpr,
    BINS: constexpr,
    SHAPE: constexpr,
):
    """Of a tile of a sample's magnitudes, -1 where there is none, for one of the decisions on its segment."""
    TILE: constexpr = SHAPE[1]
    start, size, _, _ = tile_of(table, SHAPE)
    segment, _ = segment_of(table)
    which = segment + tl.program_id(1) * segments
    decision = decisions + which * DECISION_COLUMNS
    place = tl.arange(0, TILE)
    is_there = (place < size) & (tl.load(decision) != 0)
    magnitude = tl.load(sample + start + place, is_there, other=-1)
    histogram = histograms + which * BINS
    add_to_histogram(histogram, magnitude, magnitude >= 0, tl.load(decision + 1), SHIFT, ABOVE, BINS)


def settle(sample: Tensor, decisions: Tensor, tiles: Tiles, segments: int) -> None:
    """Find the magnitude of each open decision; there may be several rows of one a segment."""
    for shift, above in DIGITS:
        histograms = torch.zeros(len(decisions), BINS, dtype=torch.int32, device=sample.device)
        constants = {"SHIFT": shift, "ABOVE": above, "BINS": BINS}
        rows = len(decisions) // max(segments, 1)
        tiles.launch(_histogram, sample, decisions, histograms, segments, rows=rows, **constants)
        launch(pick, len(decisions), decisions, histograms, SHIFT=shift, BINS=BINS)
