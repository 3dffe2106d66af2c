"""The k values of largest magnitude: the bits of `fxcomp/compressors/topk.py`.

A histogram of the upper 11 bits of all magnitudes gives a cut that k values reach, and few more; `select.py` does the
rest with these. So the bucket is read twice whole, and what reaches the cut some times more. Decoding first writes the
places of all ranks into lists: the ones of the bit strings are counted, and where each stands tells its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.places import bytes_of, form_of
from fxcomp.compressors.topk import TopK, counts
from fxcomp.compressors.triton.blocks import COLUMNS, compensated, cut, is_aligned
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.select import (
    BINS,
    SEGMENT_COLUMNS,
    TILE,
    Layout,
    Section,
    add_up,
    first_and_last_tiles,
    layout_of,
    magnitude_of,
    pick,
    send,
)

_STRETCH = 1 << 16  # values of a program of the histogram, which then adds 2048 bins to the segment's  # assumed
_SHIFT = 20  # below the upper 11 bits
_BIT_BYTES = 512  # of a program that reads places: 4096 bits, 32 a thread  # assumed
BIT_COLUMNS = constant(3)


@cache
def _layout(segments: tuple[int, ...], ratio: float, device: torch.device) -> Layout:
    sections: list[Section] = []
    end = list_at = 0
    ks, tiles = counts(segments, ratio), first_and_last_tiles(segments)
    for size, k, (first, last) in zip(segments, ks, tiles, strict=True):
        form, places_at = form_of(size, k), end + 4 * k
        sections.append(Section(size, k, k, first, last, end, places_at, list_at, form, places_at + k * form // 8))
        list_at += k
        end = places_at + -(-bytes_of(size, k) // 4) * 4
    return layout_of(sections, segments, device, is_compact=True)


@cache
def _bit_strings(segments: tuple[int, ...], ratio: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each program that reads places: segment, first byte and bytes in the bit string; and each segment's first."""
    rows = list(_rows(segments, ratio))
    first_rows = [sum(row[0] < segment for row in rows) for segment in range(len(segments))]
    table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 3)
    return table, torch.tensor(first_rows, device=device)


def _rows(segments: tuple[int, ...], ratio: float) -> Iterator[tuple[int, int, int]]:
    for segment, (n, k) in enumerate(zip(segments, counts(segments, ratio), strict=True)):
        in_string = bytes_of(n, k) - k * form_of(n, k) // 8
        for first in range(0, in_string, _BIT_BYTES):
            yield segment, first, min(in_string - first, _BIT_BYTES)


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


@jit
def _ones(payload: Value, sections: Value, table: Value, BYTES: constexpr):
    """A program's part of a bit string as ones and zeros, its segment's row, and its first bit's number."""
    entry = table + tl.program_id(0).to(tl.int64) * BIT_COLUMNS
    segment = tl.load(entry)
    section = sections + segment * SEGMENT_COLUMNS
    first = tl.load(entry + 1)
    at = tl.arange(0, BYTES)
    is_there = at < tl.load(entry + 2)
    byte = tl.load(payload + tl.load(section + 9) + first + at, is_there, other=0).to(tl.int32)
    ones = tl.reshape((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1, [BYTES * 8])
    return ones, segment, section, 8 * first


@jit
def _count_ones(payloads: Value, sections: Value, table: Value, counts: Value, payload_bytes: Value, BYTES: constexpr):
    programs = tl.num_programs(0)
    rank = tl.program_id(1).to(tl.int64)
    ones, _, _, _ = _ones(payloads + rank * payload_bytes, sections, table, BYTES)
    tl.store(counts + rank * programs + tl.program_id(0), tl.sum(ones, axis=0))


@jit
def _read_places(
    payloads: Value,
    sections: Value,
    table: Value,
    first_rows: Value,
    counts: Value,
    ends: Value,
    lists: Value,
    payload_bytes: Value,
    list_elements: Value,
    BYTES: constexpr,
):
    rank = tl.program_id(1).to(tl.int64)
    payload = payloads + rank * payload_bytes
    ones, segment, section, first_bit = _ones(payload, sections, table, BYTES)
    row = rank * tl.num_programs(0)
    this = row + tl.program_id(0)
    base = row + tl.load(first_rows + segment)
    before = tl.load(ends + this) - tl.load(counts + this) - (tl.load(ends + base) - tl.load(counts + base))
    number = before + tl.cumsum(ones, axis=0) - 1
    k = tl.load(section + 1)
    form = tl.load(section + 8)
    bit = first_bit + tl.arange(0, BYTES * 8)
    is_one = (ones > 0) & (number < k)
    low_at = payload + tl.load(section + 6) + number * (form // 8)
    low = tl.load(low_at, is_one & (form > 0), other=0).to(tl.int64)
    low += tl.load(low_at + 1, is_one & (form > 8), other=0).to(tl.int64) << 8
    place = tl.where(form > 0, ((bit - number) << form) + low, bit)
    at = lists + rank * list_elements + tl.load(section + 7)
    tl.store(at + number, place.to(tl.int32), is_one)


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
    if not is_aligned(payloads):
        return False
    layout = _layout(segments, compressor.ratio, out.device)
    table, first_rows = _bit_strings(segments, compressor.ratio, out.device)
    all_k, payload_bytes = sum(counts(segments, compressor.ratio)), len(payloads) // ranks
    found = torch.empty(ranks, len(table), dtype=torch.int32, device=out.device)
    arguments = (payloads, layout.sections, table, found, payload_bytes)
    launch(_count_ones, len(table), *arguments, rows=ranks, BYTES=_BIT_BYTES)
    lists = torch.empty(ranks * all_k, dtype=torch.int32, device=out.device)
    arguments = (payloads, layout.sections, table, first_rows, found, found.cumsum(dim=1), lists)
    launch(_read_places, len(table), *arguments, payload_bytes, all_k, rows=ranks, BYTES=_BIT_BYTES)
    add_up(payloads, lists, ranks, layout, out)
    return True
