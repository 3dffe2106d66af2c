"""The k values of largest magnitude: the bits of `fxcomp/compressors/topk.py`.

A histogram of the upper 11 bits of all magnitudes gives a cut that k values reach, and few more; `select.py` does the
rest with these. So the bucket is read twice whole, and what reaches the cut some times more.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.topk import TopK, counts
from fxcomp.compressors.triton import sparse
from fxcomp.compressors.triton.blocks import COLUMNS, compensated, cut, is_aligned
from fxcomp.compressors.triton.language import Value, constexpr, jit, launch, tl
from fxcomp.compressors.triton.select import (
    BINS,
    TILE,
    Layout,
    layout_of,
    magnitude_of,
    pick,
    send,
)

_STRETCH = 1 << 16  # values of a program of the histogram, which then adds 2048 bins to the segment's  # assumed
_SHIFT = 20  # below the upper 11 bits


def _layout(segments: tuple[int, ...], ratio: float, device: torch.device) -> Layout:
    ks = counts(segments, ratio)
    return layout_of(segments, ks, ks, device, has_counts=False)


@cache
def _first_decisions(segments: tuple[int, ...], ratio: float, device: torch.device) -> Tensor:
    rows = [(int(k > 0), 0, k, 0) for k in counts(segments, ratio)]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 4)


@jit
def _histogram(
    bucket: Value,
    residual: Value,
    table: Value,
    histograms: Value,
    SHIFT: constexpr,
    BINS: constexpr,
    TILE: constexpr,
):
    """Of the upper bits of a stretch's magnitudes."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    start = tl.load(entry)
    size = tl.load(entry + 1).to(tl.int32)
    found = tl.zeros([BINS], tl.int32)
    first = size * 0
    while first < size:
        place = first + tl.arange(0, TILE)
        is_there = place < size
        value, _ = compensated(bucket, residual, start + place, is_there)
        found += tl.histogram(magnitude_of(value) >> SHIFT, BINS, mask=is_there)
        first += TILE
    tl.atomic_add(histograms + tl.load(entry + 4) * BINS + tl.arange(0, BINS), found, mask=found > 0)


def encode(
    compressor: TopK,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    if not is_aligned(payload):
        return False
    device, ratio = bucket.device, compressor.ratio
    stretches = cut(segments, _STRETCH, 1, device).table
    decisions = _first_decisions(segments, ratio, device).clone()
    histograms = torch.zeros(len(segments), BINS, dtype=torch.int32, device=device)
    arguments = (bucket, residual, stretches, histograms)
    launch(_histogram, len(stretches), *arguments, SHIFT=_SHIFT, BINS=BINS, TILE=TILE)
    launch(pick, len(segments), decisions, histograms, SHIFT=_SHIFT, BINS=BINS)
    cuts = decisions[:, 1].expand(2, -1).contiguous()
    send(bucket, residual, payload, _layout(segments, ratio, device), cuts)
    return True


def decode(
    compressor: TopK,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    layout = _layout(segments, compressor.ratio, out.device)
    return sparse.decode(payloads, ranks, segments, counts(segments, compressor.ratio), layout, out)
