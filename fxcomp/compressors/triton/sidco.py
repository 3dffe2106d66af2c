"""Values above a threshold from a fitted distribution, bit-identical to `fxcomp/compressors/sidco.py`.

    take      copy the magnitudes of all segments' samples
    fit       a program per segment: fit the threshold (`fits.py`), and check it on the sample
    resample  take the thin sample, if thresholds from the usual sample were far off
    settle    find the t-th largest value (`send.py`) of a thin sample, or of a usual sample that contradicts the fit
    send      the pass over the bucket (`send.py`)
    control   compute the controllers' next state

For m sampled values, t = m k / n. Exception: a GPU's log and exp may differ from a CPU's in the last of 53 bits, which
changes about one threshold in 10^8. Ranks need not agree on thresholds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.inputs import EncoderInput
from fxcomp.compressors.sidco import RUN, Sidco, most_stages, strides, thin_strides
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton.fits import count_reaching, fitted_level
from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, mix, tl
from fxcomp.compressors.triton.send import DECISION_COLUMNS, TALLY_COLUMNS, send, settle
from fxcomp.compressors.triton.sparse import decode_survivors as decode
from fxcomp.compressors.triton.sparse import layout_of_survivors
from fxcomp.compressors.triton.tiles import INFINITY, TILE, Tiles, compensated, cut, magnitude_of, segment_of, tile_of

__all__ = ["decode", "encode"]

# The same numbers as in sidco.py.
WINDOW = constant(5)
CALLS = constant(1 << 20)
FAR = constant(1e30)
RUN_LENGTH = constant(RUN)

ROW_COLUMNS = constant(7)
STATE_COLUMNS = constant(9)
_COLUMNS = 8  # columns of 512 mantissas multiplied at once: 32 per thread  # assumed


@cache
def _samples(segments: tuple[int, ...], ratio: float, device: torch.device) -> tuple[Tiles, int, Tensor, int]:
    """Return tiles, the number of tiles of the usual sample, a table of segments, and the number of mantissa products.

    The usual sample's tiles precede the thin sample's. Table columns: first value, n, k, stride of the usual sample,
    stride of the thin sample, first sampled value, first product.
    """
    steps, other_steps = strides(segments, ratio), thin_strides(segments, ratio)
    sizes = [RUN * -(-(n // RUN) // step) if step > 1 else n for n, step in zip(segments, steps, strict=True)]
    other_sizes = [-(-n // step) for n, step in zip(segments, other_steps, strict=True)]
    rows: list[tuple[int, ...]] = []
    start = sample = products = 0
    columns = (segments, counts(segments, ratio), steps, other_steps, sizes)
    for n, k, step, other_step, size in zip(*columns, strict=True):
        rows.append((start, n, k, step, other_step, sample, products))
        start += n
        sample += size
        products += max(1, (1 << max(0, size - 1).bit_length()) // 512)
    tiles = cut((*sizes, *other_sizes), TILE, device)
    first = sum(-(-size // TILE) for size in sizes)
    return tiles, first, torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 7), products


def encode(compressor: Sidco, given: EncoderInput, payload: Tensor) -> None:
    device, ratio, count, values = (
        given.bucket.device,
        compressor.ratio,
        len(given.segments),
        (given.bucket, given.residual),
    )
    tiles, first, rows, products = _samples(given.segments, ratio, device)
    sample = torch.empty(len(tiles) * TILE, dtype=torch.int32, device=device)
    decisions = torch.zeros(2 * count, 3, dtype=torch.int32, device=device)
    fitted = torch.empty(count, dtype=torch.float64, device=device)
    logs = torch.empty(products, dtype=torch.float64, device=device)
    replace(tiles, table=tiles.table[:first]).launch(_take, *values, given.state, rows, sample)
    arguments = (given.state, rows, count, sample, logs, decisions, fitted)
    most = float(most_stages(ratio))
    launch(_fit, count, *arguments, FIT=compressor.tail_fit.value, WIDTH=_COLUMNS, MOST_STAGES=most)
    others = replace(tiles, table=tiles.table[first:])
    others.launch(_resample, *values, given.state, rows, count, sample, decisions)
    settle(sample, decisions, tiles, 2 * count)
    known = decisions[:, 1].view(2, count)
    chosen = torch.where(decisions[count:, 0] > 0, known[1], known[0]).clamp_min(1)
    cuts = chosen.expand(2, count).contiguous()
    tally = send(given, payload, layout_of_survivors(given.segments, ratio, device), cuts)
    launch(_control, count, given.state, rows, fitted, tally, MOST_STAGES=most)


@jit
def _row(rows, segment):
    row = rows + segment * ROW_COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@jit
def _calls(state, segment):
    return tl.minimum(tl.maximum(tl.load(state + segment * STATE_COLUMNS + 8), 0.0), CALLS - 1.0).to(tl.int64)


@jit
def _taken(n, stride, calls):
    runs = (n // RUN_LENGTH - calls % stride + stride - 1) // stride
    return tl.where(stride > 1, RUN_LENGTH * runs, n)


@jit
def _take(table, bucket, residual, state, rows, sample, SHAPE: constexpr):
    """Copy the bits of sampled magnitudes: 0 for values that are not finite, -1 as padding."""
    at, size, _, _ = tile_of(table, SHAPE[3])
    segment, in_sample = segment_of(table)
    start, n, _, stride, _ = _row(rows, segment)
    calls = _calls(state, segment)
    offset = tl.arange(0, SHAPE[1])
    number = in_sample + offset
    run = calls % stride + (number // RUN_LENGTH) * stride
    place = tl.where(stride > 1, RUN_LENGTH * run + number % RUN_LENGTH, number)
    is_there = number < _taken(n, stride, calls)
    value, _ = compensated(bucket, residual, start + place, is_there)
    magnitude = magnitude_of(value)
    magnitude = tl.where(is_there, tl.where(magnitude < INFINITY, magnitude, 0), -1)
    tl.store(sample + at + offset, magnitude, offset < size)


@jit
def _resampled_from(n, stride, calls):
    return tl.minimum(mix(calls.to(tl.uint32)).to(tl.int64) % stride, n - 1)


@jit
def _fit(
    state, rows, segments, sample, products, decisions, fitted, FIT: constexpr, WIDTH: constexpr, MOST_STAGES: constexpr
):
    """Compute a segment's threshold, or open a decision if the t-th largest value of a sample replaces it."""
    segment = tl.program_id(0)
    _, n, k, stride, other_stride = _row(rows, segment)
    row = rows + segment * ROW_COLUMNS
    ours = sample + tl.load(row + 5)
    controller = state + segment * STATE_COLUMNS
    calls = _calls(state, segment)
    size = _taken(n, stride, calls).to(tl.int32)
    reaching = k.to(tl.float64) * size.to(tl.float64) / tl.maximum(n, 1).to(tl.float64)
    stages = tl.minimum(tl.maximum(tl.load(controller), 1.0), MOST_STAGES).to(tl.int32)
    level, is_fitted = fitted_level(ours, size, stages, reaching, products + tl.load(row + 6), FIT, WIDTH)
    share = reaching * 0.0 - 1.0
    if is_fitted:
        bits = level.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bits = tl.minimum(tl.maximum(bits, 1), INFINITY - 1)
        reached = count_reaching(ours, size, bits).to(tl.float64)
        share = reached / reaching

        other = decisions + (segments + segment) * DECISION_COLUMNS
        is_misled = tl.load(controller + 7) > 0.0
        other_rank, _ = _rank_in_sample(n, k, _resampled_from(n, other_stride, calls), other_stride)
        tl.store(other, is_misled.to(tl.int32))
        tl.store(other + 2, other_rank.to(tl.int32))

        decision = decisions + segment * DECISION_COLUMNS
        chance = tl.where(stride > 1, tl.sqrt(reaching), 0.0)
        is_contradicted = tl.abs(reached - reaching) > tl.maximum(reaching * 0.05, chance)
        tl.store(decision, is_contradicted.to(tl.int32))
        tl.store(decision + 1, tl.where(is_contradicted, 0, bits))
        tl.store(decision + 2, tl.maximum((reaching + 0.5).to(tl.int32), 1))
    tl.store(fitted + segment, share)


@jit
def _resample(table, bucket, residual, state, rows, segments, sample, decisions, SHAPE: constexpr):
    at, size, _, _ = tile_of(table, SHAPE[3])
    which, in_sample = segment_of(table)
    start, n, _, _, stride = _row(rows, which - segments)
    is_open = tl.load(decisions + which * DECISION_COLUMNS) != 0
    first = _resampled_from(n, stride, _calls(state, which - segments))
    number = tl.arange(0, SHAPE[1])
    place = first + (in_sample + number) * stride
    _copy_strided(bucket, residual, start, n, place, sample + at + number, (number < size) & is_open)


@jit
def _control(state, rows, fitted, tally, MOST_STAGES: constexpr):
    """Update a controller's state, unless no distribution was fitted or a value is not finite."""
    segment = tl.program_id(0)
    _, _, k, _, _ = _row(rows, segment)
    counted = tally + segment * TALLY_COLUMNS
    new = tl.load(fitted + segment)
    controller = state + segment * STATE_COLUMNS
    stages = tl.load(controller).to(tl.float64)
    direction = tl.load(controller + 1).to(tl.float64)
    calls_in_window = tl.load(controller + 2).to(tl.float64) + 1.0
    sum_fitted = tl.load(controller + 3).to(tl.float64) + new
    reached = tl.load(counted).to(tl.float64) / tl.maximum(k, 1).to(tl.float64)
    sum_reached = tl.load(controller + 4).to(tl.float64) + reached
    old_deviation = tl.load(controller + 5).to(tl.float64)
    bad_windows = tl.load(controller + 6).to(tl.float64)
    resamples = tl.load(controller + 7).to(tl.float64)
    calls = tl.load(controller + 8).to(tl.float64) + 1.0
    calls = tl.where(calls < CALLS, calls, calls - CALLS)

    is_end = calls_in_window >= WINDOW
    mean_fitted = sum_fitted / WINDOW
    mean_reached = sum_reached / WINDOW
    is_bad = (mean_reached < 0.25) | (mean_reached > 4.0)
    restarts = is_bad & (bad_windows >= 1.0)
    deviation = tl.abs(mean_fitted - 1.0)
    is_far = deviation > 0.2
    turned = tl.where(deviation > old_deviation, -direction, direction)
    moved = stages + tl.where(mean_fitted < 1.0, turned, -turned)
    moved = tl.minimum(tl.maximum(moved, 1.0), MOST_STAGES)
    stages = tl.where(is_end, tl.where(restarts, 2.0, tl.where(is_far, moved, stages)), stages)
    direction = tl.where(is_end, tl.where(restarts, 1.0, tl.where(is_far, turned, direction)), direction)
    old_deviation = tl.where(is_end, tl.where(restarts, FAR, deviation), old_deviation)
    bad_windows = tl.where(is_end, tl.where(is_bad & (restarts == 0), 1.0, 0.0), bad_windows)
    resamples = tl.where(is_end, tl.where(restarts, 1.0, 0.0), resamples)

    is_on = (new >= 0.0) & (tl.load(counted + 2) == 0)
    tl.store(controller, stages.to(tl.float32), is_on)
    tl.store(controller + 1, direction.to(tl.float32), is_on)
    tl.store(controller + 2, tl.where(is_end, 0.0, calls_in_window).to(tl.float32), is_on)
    tl.store(controller + 3, tl.where(is_end, 0.0, sum_fitted).to(tl.float32), is_on)
    tl.store(controller + 4, tl.where(is_end, 0.0, sum_reached).to(tl.float32), is_on)
    tl.store(controller + 5, old_deviation.to(tl.float32), is_on)
    tl.store(controller + 6, bad_windows.to(tl.float32), is_on)
    tl.store(controller + 7, resamples.to(tl.float32), is_on)
    tl.store(controller + 8, calls.to(tl.float32), is_on)


@jit
def _copy_strided(bucket, residual, start, n, place, sample, is_ours):
    """Copy the magnitudes at a segment's indices `place`, as bits, into `sample`.

    Indices after the segment's end give -1.
    """
    is_there = is_ours & (place < n)
    value, _ = compensated(bucket, residual, start + place, is_there)
    tl.store(sample, tl.where(is_there, magnitude_of(value), -1), is_ours)


@jit
def _rank_in_sample(n, k, first, stride):
    """Return t, at least 1, and the length of the thin sample."""
    length = (n - first + stride - 1) // stride
    return tl.maximum((2 * k * length + n) // (2 * n), 1), length
