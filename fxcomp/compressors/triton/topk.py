"""The k values of largest magnitude, bit-identical to `fxcomp/compressors/topk.py`.

    sample      the upper 11 bits of a sample's magnitudes give a cut that slightly more than k values should reach
    count       one pass over the bucket counts the values that reach the cut
    histogram   if fewer than k reach it, the same bits of all magnitudes give the cut

`send.py` computes the same payload from any cut that at least k values reach.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.topk import TopK, counts
from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.send import BIN_COUNT, BINS, DECISION_COLUMNS, DIGITS, pick, send
from fxcomp.compressors.triton.sparse import decode_sparse, layout_of_largest
from fxcomp.compressors.triton.tiles import TILE, compensated, cut, lies_well, magnitude_of, segment_of, tile_of

_STRETCH = 1 << 14  # values per program in passes over the bucket  # assumed
_SAMPLE = 1 << 14  # values per segment  # assumed
AT_ONCE = constant(TILE)
LEADING = constant(DIGITS[0][0])  # lowest of the leading bits


@cache
def _ranks(segments: tuple[int, ...], ratio: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return open decisions (`send.py`) for samples and for segments, and the table of samples.

    A sample's rank is raised by four standard deviations of a Poisson variable.
    Table columns: first value, stride, length.
    """
    sampled: list[tuple[int, int, int]] = []
    whole: list[tuple[int, int, int]] = []
    table: list[tuple[int, int, int]] = []
    start = 0
    for n, k in zip(segments, counts(segments, ratio), strict=True):
        stride = max(1, n // _SAMPLE)
        length = n // stride
        share = k * length / max(n, 1)
        rank = k if stride == 1 else min(length, math.ceil(share + 4 * math.sqrt(share) + 4))
        sampled.append((int(k > 0), 0, rank))
        whole.append((int(k > 0), 0, k))
        table.append((start, stride, length))
        start += n
    made = (torch.tensor(rows, dtype=torch.int32).view(-1, 3) for rows in (sampled, whole))
    return *(each.to(device) for each in made), torch.tensor(table, dtype=torch.int64, device=device).view(-1, 3)  # pyright: ignore[reportReturnType]


def encode(compressor: TopK, given: EncoderInput, payload: Tensor) -> None:
    segments, ratio, device, count = given.segments, compressor.ratio, given.bucket.device, len(given.segments)
    sampled, whole, table = _ranks(segments, ratio, device)
    guesses, decisions, values = sampled.clone(), whole.clone(), (given.bucket, given.residual)
    histograms = torch.zeros(2, count, BIN_COUNT, dtype=torch.int32, device=device)
    reached = torch.zeros(count, dtype=torch.int32, device=device)
    programs = -(-min(max(segments, default=0), 2 * _SAMPLE) // TILE)
    launch(_sample, count, table, *values, histograms[0], rows=programs)
    launch(pick, count, guesses, histograms[0], SHIFT=DIGITS[0][0], COPIES=1)
    stretches = replace(cut(segments, _STRETCH, device), warps=4)
    stretches.launch(_count, *values, guesses, reached)
    stretches.launch(_histogram, *values, decisions, reached, histograms[1])
    launch(_keep, count, guesses, decisions, reached)
    launch(pick, count, decisions, histograms[1], SHIFT=DIGITS[0][0], COPIES=1)
    cuts = decisions[:, 1].expand(2, -1).contiguous()
    send(given, payload, layout_of_largest(segments, ratio, device), cuts)


def decode(compressor: TopK, received: DecoderInput, out: Tensor) -> None:
    decode_sparse(received, out, layout_of_largest(received.segments, compressor.ratio, out.device))


@jit
def _sample(table, bucket, residual, histograms):
    entry = table + tl.program_id(0) * 3
    number = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_there = number < tl.load(entry + 2)
    value, _ = compensated(bucket, residual, tl.load(entry) + number * tl.load(entry + 1), is_there)
    digit = magnitude_of(value) >> LEADING
    tl.atomic_add(histograms + tl.program_id(0) * BINS + digit, 1, mask=is_there, sem="relaxed")


@jit
def _stretch_of(table, ALIGNMENT: constexpr):
    start, size, _, _ = tile_of(table, ALIGNMENT)
    segment, _ = segment_of(table)
    return start, size, segment


@jit
def _count(table, bucket, residual, guesses, reached, SHAPE: constexpr):
    if lies_well(table, SHAPE):
        _count_stretch(table, bucket, residual, guesses, reached, SHAPE[4])
    else:
        _count_stretch(table, bucket, residual, guesses, reached, SHAPE[3])


@jit
def _count_stretch(table, bucket, residual, guesses, reached, ALIGNMENT: constexpr):
    start, size, segment = _stretch_of(table, ALIGNMENT)
    least = tl.load(guesses + segment * DECISION_COLUMNS + 1)
    found = tl.zeros([AT_ONCE], tl.int32)
    first = size * 0
    while first < size:
        place = first + tl.arange(0, AT_ONCE)
        is_there = place < size
        value, _ = compensated(bucket, residual, start + place, is_there)
        found += (is_there & (magnitude_of(value) >= least)).to(tl.int32)
        first += AT_ONCE
    tl.atomic_add(reached + segment, tl.sum(found, axis=0), sem="relaxed")


@jit
def _histogram(table, bucket, residual, decisions, reached, histograms, SHAPE: constexpr):
    if lies_well(table, SHAPE):
        _histogram_of_stretch(table, bucket, residual, decisions, reached, histograms, SHAPE[4])
    else:
        _histogram_of_stretch(table, bucket, residual, decisions, reached, histograms, SHAPE[3])


@jit
def _histogram_of_stretch(table, bucket, residual, decisions, reached, histograms, ALIGNMENT: constexpr):
    start, size, segment = _stretch_of(table, ALIGNMENT)
    is_guessed = tl.load(reached + segment) >= tl.load(decisions + segment * DECISION_COLUMNS + 2)
    size = tl.where(is_guessed, 0, size)
    found = tl.zeros([BINS], tl.int32)
    first = size * 0
    while first < size:
        place = first + tl.arange(0, AT_ONCE)
        is_there = place < size
        value, _ = compensated(bucket, residual, start + place, is_there)
        found += tl.histogram(magnitude_of(value) >> LEADING, BINS, mask=is_there)
        first += AT_ONCE
    tl.atomic_add(histograms + segment * BINS + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@jit
def _keep(guesses, decisions, reached):
    """Use the sample's cut as a segment's decision if at least k values reach the cut."""
    decision = decisions + tl.program_id(0) * DECISION_COLUMNS
    is_guessed = tl.load(reached + tl.program_id(0)) >= tl.load(decision + 2)
    tl.store(decision + 1, tl.load(guesses + tl.program_id(0) * DECISION_COLUMNS + 1), is_guessed)
    tl.store(decision, 0, is_guessed)
