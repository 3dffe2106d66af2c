"""The values above a threshold found in a sample: the bits of `fxcomp/compressors/dgc.py`.

One launch copies the magnitudes of all segments' samples; six find the magnitudes of both ranks; `select.py` sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.dgc import DGC, strides
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton import survivors
from fxcomp.compressors.triton.blocks import COLUMNS, compensated, cut, is_aligned
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.randomness import bits_at, raise_step, stream_of
from fxcomp.compressors.triton.select import DECISION_COLUMNS, TILE, magnitude_of, send, settle

SAMPLE_COLUMNS = constant(4)


@cache
def _samples(segments: tuple[int, ...], ratio: float, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """The tiles of all samples; for each segment first value, n, k and stride; and the values of all samples."""
    steps = strides(segments, ratio)
    sizes = tuple(-(-n // stride) for n, stride in zip(segments, steps, strict=True))
    rows = torch.tensor(list(_rows(segments, counts(segments, ratio), steps)), dtype=torch.int64, device=device)
    return cut(sizes, TILE, 1, device).table, rows.view(-1, 4), sum(sizes)


def _rows(segments: tuple[int, ...], ks: tuple[int, ...], steps: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    start = 0
    for n, k, stride in zip(segments, ks, steps, strict=True):
        yield start, n, k, stride
        start += n


@jit
def _take_sample(
    bucket: Value,
    residual: Value,
    state: Value,
    table: Value,
    rows: Value,
    segments: Value,
    sample: Value,
    decisions: Value,
    TILE: constexpr,
):
    """A tile of a segment's sample, as bits of magnitudes; the segment's first program asks for both ranks."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    size = tl.load(entry + 1).to(tl.int32)
    segment = tl.load(entry + 4)
    number = tl.load(entry + 5) + tl.arange(0, TILE)
    row = rows + segment * SAMPLE_COLUMNS
    n = tl.load(row + 1)
    k = tl.load(row + 2)
    stride = tl.load(row + 3)
    low, high = stream_of(state, segment)
    first = tl.minimum(bits_at(low, high, segment * 0).to(tl.int64) % stride, n - 1)
    place = first + number * stride
    is_there = place < n
    value, _ = compensated(bucket, residual, tl.load(row) + place, is_there)
    at = tl.arange(0, TILE)
    tl.store(sample + tl.load(entry) + at, tl.where(is_there, magnitude_of(value), -1), at < size)

    is_first = tl.load(entry + 5) == 0
    length = (n - first + stride - 1) // stride
    rank = tl.maximum((2 * k * length + n) // (2 * n), 1)
    decision = decisions + segment * DECISION_COLUMNS
    second = decisions + (segments + segment) * DECISION_COLUMNS
    tl.store(decision, (rank <= length).to(tl.int32), is_first)
    tl.store(decision + 2, rank.to(tl.int32), is_first)
    tl.store(second, (2 * rank <= length).to(tl.int32), is_first)
    tl.store(second + 2, (2 * rank).to(tl.int32), is_first)


def sampled_cuts(
    bucket: Tensor, residual: Tensor | None, segments: tuple[int, ...], ratio: float, state: Tensor
) -> Tensor:
    """Two rows of a magnitude a segment, as bits: what the share k / n of the sample reaches, and twice that."""
    table, rows, values = _samples(segments, ratio, bucket.device)
    sample = torch.empty(values, dtype=torch.int32, device=bucket.device)
    decisions = torch.zeros(2 * len(segments), 4, dtype=torch.int32, device=bucket.device)
    arguments = (bucket, residual, state, table, rows, len(segments), sample, decisions)
    launch(_take_sample, len(table), *arguments, TILE=TILE)
    settle(sample, decisions, table, len(segments))
    return decisions[:, 1].clamp_min(1)


def encode(
    compressor: DGC,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    if not is_aligned(payload) or state is None:
        return False
    cuts = sampled_cuts(bucket, residual, segments, compressor.ratio, state)
    send(bucket, residual, payload, survivors.layout(segments, compressor.ratio, bucket.device), cuts)
    raise_step(state)
    return True


def decode(
    compressor: DGC,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return survivors.decode(payloads, ranks, segments, compressor.ratio, out)
