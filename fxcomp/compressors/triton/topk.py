"""The k values of largest magnitude: the bits of `fxcomp/compressors/topk.py`.

A histogram of the upper 11 bits of all magnitudes gives a cut that k values reach, and few more; `send.py` does the
rest with these. So the bucket is read twice whole, and what reaches the cut some times more.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.topk import TopK, counts
from fxcomp.compressors.triton.language import constexpr, jit, launch, tl
from fxcomp.compressors.triton.send import BINS, DIGITS, pick, send
from fxcomp.compressors.triton.sparse import decode_sparse, layout_of_largest
from fxcomp.compressors.triton.tiles import COLUMNS, TILE, compensated, cut, magnitude_of

_STRETCH = 1 << 16  # values of a program of the histogram, which then adds 2048 bins to the segment's  # assumed


@cache
def _first_decisions(segments: tuple[int, ...], ratio: float, device: torch.device) -> Tensor:
    rows = [(int(k > 0), 0, k) for k in counts(segments, ratio)]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 3)


def encode(compressor: TopK, given: EncoderInput, payload: Tensor) -> None:
    segments, ratio, device = given.segments, compressor.ratio, given.bucket.device
    stretches = cut(segments, _STRETCH, device).table
    decisions = _first_decisions(segments, ratio, device).clone()
    histograms = torch.zeros(len(segments), BINS, dtype=torch.int32, device=device)
    constants = {"SHIFT": DIGITS[0][0], "BINS": BINS}
    launch(_histogram, len(stretches), stretches, given.bucket, given.residual, histograms, **constants, TILE=TILE)
    launch(pick, len(segments), decisions, histograms, **constants)
    cuts = decisions[:, 1].expand(2, -1).contiguous()
    send(given, payload, layout_of_largest(segments, ratio, device), cuts)


def decode(compressor: TopK, received: DecoderInput, out: Tensor) -> None:
    decode_sparse(received, out, layout_of_largest(received.segments, compressor.ratio, out.device))


@jit
def _histogram(table, bucket, residual, histograms, SHIFT: constexpr, BINS: constexpr, TILE: constexpr):
    """Count the upper bits of a stretch's magnitudes."""
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
