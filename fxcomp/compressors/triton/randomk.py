"""Values at places that all ranks draw alike: the bits of `fxcomp/compressors/randomk.py`.

Encoding is three launches. The first draws the places, sends their values, and sets aside what their residual will be;
the second goes over the bucket once and writes the residual of all other values; the third puts the rest into its
place. Only the second touches memory for each value. Decoding clears the mean and draws the places again.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.randomk import RandomK
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.randomness import bits_at, raise_step, stream_of
from fxcomp.compressors.triton.tiles import (
    INFINITY,
    TILE,
    compensated,
    cut,
    is_finite,
    magnitude_of,
    places,
    segment_of,
    tile_of,
)

RUN = constant(16)
RUNS = 64  # of a program: 1024 values, 8 a thread  # assumed
RUN_COLUMNS = constant(6)


@cache
def _runs(segments: tuple[int, ...], ratio: float, device: torch.device) -> Tensor:
    """For each program of 64 runs: segment, n, k, first value, first payload element, first run."""
    rows: list[tuple[int, ...]] = []
    start = section = 0
    for segment, (n, k) in enumerate(zip(segments, counts(segments, ratio), strict=True)):
        rows += [(segment, n, k, start, section, run) for run in range(0, -(-k // 16), RUNS)]
        start += n
        section += k + (k > 0)
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 6)


@cache
def _sections(segments: tuple[int, ...], ratio: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each segment the payload element of its flag, and n / k."""
    ks = counts(segments, ratio)
    flags = [sum(k + (k > 0) for k in ks[: segment + 1]) - 1 for segment in range(len(ks))]
    factors = [n / max(k, 1) for n, k in zip(segments, ks, strict=True)]
    return torch.tensor(flags, device=device), torch.tensor(factors, dtype=torch.float32, device=device)


def encode(compressor: RandomK, given: EncoderInput, payload: Tensor) -> None:
    segments, ratio, state = given.segments, compressor.ratio, given.state
    runs = _runs(segments, ratio, given.bucket.device)
    flags, factors = _sections(segments, ratio, given.bucket.device)
    spare = None if given.residual is None else torch.empty_like(payload)
    arguments = (given.bucket, given.residual, payload, spare, state, runs)
    launch(_send, len(runs), *arguments, factors if compressor.scaled else None, RUNS=RUNS)
    cut(segments, TILE, given.bucket.device).launch(_go_over, given.bucket, given.residual, payload, flags)
    if given.residual is not None:
        launch(_put_back, len(runs), given.residual, payload, spare, state, runs, RUNS=RUNS)
    raise_step(state)


def decode(compressor: RandomK, received: DecoderInput, out: Tensor) -> None:
    runs = _runs(received.segments, compressor.ratio, out.device)
    out.zero_()
    arguments = (received.payloads, out, received.state, runs, len(received.payloads) // received.ranks)
    launch(_decode, len(runs), *arguments, RANKS=received.ranks, RUNS=RUNS)


@jit
def _drawn(state, table, STEPS_BACK: constexpr, RUNS: constexpr):
    """Draw this program's values; return segment, k, its first value and payload element, numbers and places."""
    entry = table + tl.program_id(0).to(tl.int64) * RUN_COLUMNS
    segment = tl.load(entry)
    n = tl.load(entry + 1)
    k = tl.load(entry + 2)
    low, high = stream_of(state, segment, STEPS_BACK)
    run = tl.load(entry + 5) + tl.arange(0, RUNS)
    first = tl.minimum(run * RUN, k)
    last = tl.minimum(first + RUN, k)
    begin = first * n // k
    room = last * n // k - begin - (last - first) + 1
    begin += (bits_at(low, high, run).to(tl.int64) * room) >> 32
    turn_low = bits_at(low, high, 0xFFFFFFFE + run * 0).to(tl.int64)
    turn_high = bits_at(low, high, 0xFFFFFFFF + run * 0).to(tl.int64)
    begin += (turn_high * n + ((turn_low * n) >> 32)) >> 32
    number = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    place = begin[:, None] + tl.arange(0, RUN)[None, :]
    place = tl.where(place >= n, place - n, place)
    return segment, k, tl.load(entry + 3), tl.load(entry + 4), number, place, number < k


@jit
def _send(bucket, residual, payload, spare, state, table, factors, RUNS: constexpr):
    """Write the values and a flag of 0, and set aside the residuals of both."""
    segment, k, start, section, number, place, is_there = _drawn(state, table, 0, RUNS)
    value, old = compensated(bucket, residual, start + place, is_there)
    sent = value
    if factors is not None:
        sent = value * tl.load(factors + segment)
    tl.store(payload + section + number, sent, is_there)
    is_first = tl.load(table + tl.program_id(0).to(tl.int64) * RUN_COLUMNS + 5) == 0
    tl.store(payload + section + k, 0.0, is_first)
    if residual is not None:
        tl.store(spare + section + number, tl.where(is_finite(sent), value - sent, old), is_there)
        tl.store(spare + section + k, tl.load(residual + start), is_first)


@jit
def _go_over(table, bucket, residual, payload, flags, SHAPE: constexpr):
    """Write the residual as if nothing were sent; the segment's flag is NaN where something is not finite."""
    start, size, _, _ = tile_of(table, SHAPE)
    segment, _ = segment_of(table)
    place, is_there = places(size, SHAPE)
    value, old = compensated(bucket, residual, start + place, is_there)
    magnitude = magnitude_of(value)
    if residual is not None:
        tl.store(residual + start + place, tl.where(magnitude < INFINITY, value, old), is_there)
    is_sound = tl.max(tl.max(magnitude, axis=1), axis=0) < INFINITY
    tl.store(payload + tl.load(flags + segment), float("nan"), is_sound == 0)


@jit
def _put_back(residual, payload, spare, state, table, RUNS: constexpr):
    """Put what was set aside into the residual: of what was sent, and of the first value if something is not finite."""
    _, k, start, section, number, place, is_there = _drawn(state, table, 0, RUNS)
    is_sound = tl.load(payload + section + k) == 0.0
    left_out = tl.load(spare + section + number, is_there, other=0.0)
    first = tl.load(spare + section + k)
    left_out = tl.where(place > 0, left_out, tl.where(is_sound, left_out, first))
    tl.store(residual + start + place, left_out, is_there)
    tl.store(residual + start, first, is_sound == 0)


@jit
def _decode(payloads, out, state, table, payload_elements, RANKS: constexpr, RUNS: constexpr):
    _, k, start, section, number, place, is_there = _drawn(state, table, 1, RUNS)
    total = tl.load(payloads + section + number, is_there, other=0.0)
    flag = magnitude_of(tl.load(payloads + section + k))
    for _ in range(1, RANKS):
        payloads += payload_elements
        total += tl.load(payloads + section + number, is_there, other=0.0)
        flag = tl.maximum(flag, magnitude_of(tl.load(payloads + section + k)))
    is_sound = flag < INFINITY
    mean = total * (1.0 / RANKS)
    mean = tl.where(place > 0, mean, tl.where(is_sound, mean, float("nan")))
    tl.store(out + start + place, mean, is_there)
    tl.store(out + start, float("nan"), is_sound == 0)
