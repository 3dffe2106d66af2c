"""The values above a threshold found in a sample: the bits of `fxcomp/compressors/dgc.py`.

One launch copies the magnitudes of all segments' samples; six find the magnitudes of both ranks; `send.py` sends.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from fxcomp.compressors.dgc import DGC, strides
from fxcomp.compressors.inputs import EncoderInput
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton.language import constant, constexpr, jit, tl
from fxcomp.compressors.triton.layout import layout_of_survivors
from fxcomp.compressors.triton.randomness import bits_at, raise_step, stream_of
from fxcomp.compressors.triton.select import DECISION_COLUMNS, settle
from fxcomp.compressors.triton.send import send
from fxcomp.compressors.triton.sparse import decode_survivors as decode
from fxcomp.compressors.triton.tiles import TILE, Tiles, compensated, cut, magnitude_of, segment_of, tile_of

__all__ = ["decode", "encode"]

SAMPLE_COLUMNS = constant(4)


@cache
def _samples(segments: tuple[int, ...], ratio: float, device: torch.device) -> tuple[Tiles, Tensor]:
    """The tiles of all samples; and for each segment first value, n, k and stride."""
    steps = strides(segments, ratio)
    sizes = tuple(-(-n // stride) for n, stride in zip(segments, steps, strict=True))
    starts = [*accumulate(segments, initial=0)][: len(segments)]
    rows = list(zip(starts, segments, counts(segments, ratio), steps, strict=True))
    return cut(sizes, TILE, device), torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 4)


def encode(compressor: DGC, given: EncoderInput, payload: Tensor) -> None:
    segments, ratio, device = given.segments, compressor.ratio, given.bucket.device
    tiles, rows = _samples(segments, ratio, device)
    sample = torch.empty(len(tiles) * TILE, dtype=torch.int32, device=device)
    decisions = torch.zeros(2 * len(segments), 3, dtype=torch.int32, device=device)
    tiles.launch(_take_sample, given.bucket, given.residual, given.state, rows, len(segments), sample, decisions)
    settle(sample, decisions, tiles, len(segments))
    cuts = decisions[:, 1].clamp_min(1)  # what the share k / n of the sample reaches, and twice that
    send(given, payload, layout_of_survivors(segments, ratio, device), cuts)
    raise_step(given.state)


@jit
def copy_strided(bucket, residual, start, n, place, sample, is_ours):
    """Write the magnitudes of a segment's values at some places as bits, -1 after its end."""
    is_there = is_ours & (place < n)
    value, _ = compensated(bucket, residual, start + place, is_there)
    tl.store(sample, tl.where(is_there, magnitude_of(value), -1), is_ours)


@jit
def rank_in_sample(n, k, first, stride):
    """Return the rank that the share k / n has in a sample, and the sample's length."""
    length = (n - first + stride - 1) // stride
    return tl.maximum((2 * k * length + n) // (2 * n), 1), length


@jit
def _take_sample(table, bucket, residual, state, rows, segments, sample, decisions, SHAPE: constexpr):
    """Copy a tile of a segment's sample; the segment's first program asks for both ranks."""
    at, size, _, _ = tile_of(table, SHAPE)
    segment, in_sample = segment_of(table)
    row = rows + segment * SAMPLE_COLUMNS
    n = tl.load(row + 1)
    stride = tl.load(row + 3)
    low, high = stream_of(state, segment)
    first = tl.minimum(bits_at(low, high, segment * 0).to(tl.int64) % stride, n - 1)
    number = tl.arange(0, SHAPE[1])
    place = first + (in_sample + number) * stride
    copy_strided(bucket, residual, tl.load(row), n, place, sample + at + number, number < size)

    is_first = in_sample == 0
    rank, length = rank_in_sample(n, tl.load(row + 2), first, stride)
    decision = decisions + segment * DECISION_COLUMNS
    second = decisions + (segments + segment) * DECISION_COLUMNS
    tl.store(decision, (rank <= length).to(tl.int32), is_first)
    tl.store(decision + 2, rank.to(tl.int32), is_first)
    tl.store(second, (2 * rank <= length).to(tl.int32), is_first)
    tl.store(second + 2, (2 * rank).to(tl.int32), is_first)
