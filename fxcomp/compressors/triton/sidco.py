"""The values above a threshold that follows from a fitted distribution: the bits of `fxcomp/compressors/sidco.py`.

    take      copy the magnitudes of all segments' samples
    fit       a program a segment: moments, quantiles, stages and the check, in fp64 with the reference's sums
    resample  dgc's sample, of segments whose own sample misleads
    settle    the largest of a sample (`select.py`), where the sample contradicts the fit or was taken again
    send      the pass over the bucket (`select.py`)
    control   the controllers' next state

A GPU's log and exp may differ from a processor's in the last of 53 bits. A threshold is rounded to 24, so about one in
10^8 thresholds differs by that rounding; each rank selects for itself, so nothing depends on it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.dgc import strides as dgc_strides
from fxcomp.compressors.sidco import RUN, Sidco, SidcoE, SidcoGP, most_stages, strides
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton import survivors
from fxcomp.compressors.triton.blocks import COLUMNS, INFINITY, compensated, cut, is_aligned
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.randomness import mix
from fxcomp.compressors.triton.select import DECISION_COLUMNS, TALLY_COLUMNS, TILE, magnitude_of, send, settle

# The same numbers as in sidco.py.
LANES = constant(512)
GROUP = constant(512)
FIRST_SHARE = constant(0.25)
WINDOW = constant(5)
CALLS = constant(1 << 20)
FAR = constant(1e30)
LOG_TWO = constant(0.6931471805599453)
HALF_LOG_TWO_PI = constant(0.9189385332046727)
EXPONENTIAL, GAMMA = constant(0), constant(1)
RUN_LENGTH = constant(RUN)

ROW_COLUMNS = constant(7)
STATE_COLUMNS = constant(9)
_COLUMNS = 8  # of 512 mantissas that a program multiplies at once: 32 a thread  # assumed


@cache
def _samples(segments: tuple[int, ...], ratio: float, device: torch.device) -> tuple[Tensor, Tensor, int, int, int]:
    """The tiles of both samples of all segments, dgc's behind; for each segment first value, n, k, both strides, first
    value of the sample and first of its products; how many tiles are of the first sample; all values, all products."""
    steps, other_steps = strides(segments, ratio), dgc_strides(segments, ratio)
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
    table = cut((*sizes, *other_sizes), TILE, 1, device).table
    first = len(cut(tuple(sizes), TILE, 1, device).table)
    on_device = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 7)
    return table, on_device, first, sum(sizes) + sum(other_sizes), products


@jit
def _row(rows: Value, segment: Value):
    row = rows + segment * ROW_COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@jit
def _taken(n: Value, stride: Value, calls: Value):
    """How many values the sample of this call has."""
    runs = (n // RUN_LENGTH - calls % stride + stride - 1) // stride
    return tl.where(stride > 1, RUN_LENGTH * runs, n)


@jit
def _take(bucket: Value, residual: Value, state: Value, table: Value, rows: Value, sample: Value, TILE: constexpr):
    """Magnitudes as bits, 0 for what is not finite, -1 behind the end."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    segment = tl.load(entry + 4)
    start, n, _, stride, _ = _row(rows, segment)
    calls = tl.load(state + segment * STATE_COLUMNS + 8).to(tl.int64)
    number = tl.load(entry + 5) + tl.arange(0, TILE)
    run = calls % stride + (number // RUN_LENGTH) * stride
    place = tl.where(stride > 1, RUN_LENGTH * run + number % RUN_LENGTH, number)
    is_there = number < _taken(n, stride, calls)
    value, _ = compensated(bucket, residual, start + place, is_there)
    magnitude = magnitude_of(value)
    magnitude = tl.where(is_there, tl.where(magnitude < INFINITY, magnitude, 0), -1)
    at = tl.arange(0, TILE)
    tl.store(sample + tl.load(entry) + at, magnitude, at < tl.load(entry + 1))


@jit
def _half(lanes: Value, HALF: constexpr):
    low, high = tl.split(tl.permute(tl.reshape(lanes, [2, HALF]), (1, 0)))
    return low + high


@jit
def _folded(lanes: Value):
    """The sum of 512 lanes, in halves."""
    lanes = _half(_half(_half(lanes, 256), 128), 64)
    lanes = _half(_half(_half(lanes, 32), 16), 8)
    return tl.sum(_half(_half(_half(lanes, 4), 2), 1), axis=0)


@jit
def _moments_above(sample: Value, size: Value, level: Value):
    """Count, mean and variance of what exceeds a level, above that level."""
    sums = tl.zeros([LANES], tl.float64)
    squares = tl.zeros([LANES], tl.float64)
    found = tl.zeros([LANES], tl.int32)
    first = size * 0
    while first < size:
        at = first + tl.arange(0, LANES)
        bits = tl.maximum(tl.load(sample + at, at < size, other=0), 0)
        magnitude = bits.to(tl.float32, bitcast=True).to(tl.float64)
        is_above = magnitude > level
        above = tl.where(is_above, magnitude - level, 0.0)
        sums += above
        squares += above * above
        found += is_above.to(tl.int32)
        first += LANES
    count = tl.sum(found, axis=0)
    divisor = tl.maximum(count, 1).to(tl.float64)
    mean = _folded(sums) / divisor
    return count, mean, _folded(squares) / divisor - mean * mean


@jit
def _count_reaching(sample: Value, size: Value, bits: Value):
    found = tl.zeros([LANES], tl.int32)
    first = size * 0
    while first < size:
        at = first + tl.arange(0, LANES)
        found += (tl.load(sample + at, at < size, other=-1) >= bits).to(tl.int32)
        first += LANES
    return tl.sum(found, axis=0)


@jit
def _quantile(mean: Value, variance: Value, share: Value, FIT: constexpr):
    """What a share of the exceedances exceeds."""
    log_share = tl.log(share)
    exponential = -mean * log_share
    if FIT == EXPONENTIAL:
        return exponential
    is_narrow = variance <= 1e-12 * mean * mean
    relative = mean * mean / tl.where(is_narrow, 1.0, variance)
    shape = 0.5 * (1.0 - relative)
    scale = 0.5 * mean * (relative + 1.0)
    is_flat = tl.abs(shape) < 1e-6
    pareto = scale / tl.where(is_flat, 1.0, shape) * (tl.exp(-shape * log_share) - 1.0)
    return tl.where(is_narrow, exponential, tl.where(is_flat, -scale * log_share, pareto))


@jit
def _log_gamma(x: Value):
    shift = x * 0.0 + 1.0
    while x < 10.0:
        shift *= x
        x += 1.0
    inverse = 1.0 / x
    square = inverse * inverse
    series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0)))
    return (x - 0.5) * tl.log(x) - x + HALF_LOG_TWO_PI + series - tl.log(shift)


@jit
def _upper_gamma(shape: Value, x: Value, log_gamma: Value):
    front = tl.exp(shape * tl.log(x) - x - log_gamma)
    is_low = x < shape + 1.0
    term = 1.0 / shape
    series = term
    i = term * 0.0 + 1.0
    last = tl.where(is_low, 1000.0, i)
    while i < last:
        term *= x / (shape + i)
        series += term
        i += 1.0
        last = tl.where(term < series * 1e-16, 0.0, last)
    b = x + 1.0 - shape
    c = x * 0.0 + 1e300
    d = 1.0 / b
    fraction = d
    i = x * 0.0 + 1.0
    last = tl.where(is_low, i, 1000.0)
    while i < last:
        factor = -i * (i - shape)
        b += 2.0
        d = 1.0 / (factor * d + b)
        c = b + factor / c
        change = c * d
        fraction *= change
        i += 1.0
        last = tl.where(tl.abs(change - 1.0) < 1e-15, 0.0, last)
    return tl.where(is_low, 1.0 - front * series, front * fraction)


@jit
def _inverse_gamma(shape: Value, share: Value):
    log_gamma = _log_gamma(shape)
    low = shape * 0.0
    high = shape + 10.0
    excess = _upper_gamma(shape, high, log_gamma) - share
    while excess > 0.0:
        low = high
        high *= 2.0
        excess = _upper_gamma(shape, high, log_gamma) - share
    x = tl.exp((tl.log(1.0 - share) + log_gamma + tl.log(shape)) / shape)
    x = tl.where((low < x) & (x < high), x, 0.5 * (low + high))
    left = 200
    while left > 0:
        error = _upper_gamma(shape, x, log_gamma) - share
        low = tl.where(error > 0.0, x, low)
        high = tl.where(error > 0.0, high, x)
        density = tl.exp((shape - 1.0) * tl.log(x) - x - log_gamma)
        is_dense = density > 1e-300
        new = tl.where(is_dense, x + error / tl.where(is_dense, density, 1.0), low)
        new = tl.where((low < new) & (new < high), new, 0.5 * (low + high))
        left = tl.where(tl.abs(new - x) <= 1e-10 * x, 0, left - 1)
        x = new
    return x


@jit
def _mantissas(sample: Value, size: Value, at: Value):
    """In [1, 2), 1 for a zero and behind the end; and the exponents."""
    bits = tl.maximum(tl.load(sample + at, at < size, other=0), 0)
    wide = bits.to(tl.float32, bitcast=True).to(tl.float64)
    wide = tl.where(wide > 0, wide, 1.0).to(tl.int64, bitcast=True)
    mantissa = ((wide & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return mantissa, (wide >> 52) - 1023


@jit
def _product_of_halves(factors: Value, HALF: constexpr, WIDTH: constexpr):
    low, high = tl.split(tl.permute(tl.reshape(factors, [2, HALF, WIDTH]), (1, 2, 0)))
    return low * high


@jit
def _mean_log(sample: Value, size: Value, products: Value, count: Value, WIDTH: constexpr):
    """Exponents add up exactly; the mantissas are multiplied, 512 at a time, and the products' logs added in order."""
    columns = size * 0 + 1
    while columns * GROUP < size:
        columns *= 2
    exponents = tl.zeros([GROUP], tl.int64)
    first = size * 0
    while first < columns:
        column = first + tl.arange(0, WIDTH)[None, :]
        at = tl.arange(0, GROUP)[:, None] * columns + column
        factors, exponent = _mantissas(sample, tl.where(column < columns, size, 0), at)
        exponents += tl.sum(exponent, axis=1)
        factors = _product_of_halves(factors, 256, WIDTH)
        factors = _product_of_halves(factors, 128, WIDTH)
        factors = _product_of_halves(factors, 64, WIDTH)
        factors = _product_of_halves(factors, 32, WIDTH)
        factors = _product_of_halves(factors, 16, WIDTH)
        factors = _product_of_halves(factors, 8, WIDTH)
        factors = _product_of_halves(factors, 4, WIDTH)
        factors = _product_of_halves(factors, 2, WIDTH)
        factors = tl.reshape(_product_of_halves(factors, 1, WIDTH), [WIDTH])
        to = first + tl.arange(0, WIDTH)
        tl.store(products + to, tl.log(factors), to < columns)
        first += WIDTH
    tl.debug_barrier()  # other threads wrote what this one adds
    logs = tl.load(products) * 0.0
    first = size * 0
    while first < columns:
        logs += tl.load(products + first)
        first += 1
    return (tl.sum(exponents, axis=0).to(tl.float64) * LOG_TWO + logs) / count.to(tl.float64)


@jit
def _gamma_quantile(mean: Value, mean_log: Value, share: Value):
    q = tl.log(mean) - mean_log
    found = -mean * tl.log(share)
    if q >= 1e-4:
        shape = (3.0 - q + tl.sqrt((q - 3.0) * (q - 3.0) + 24.0 * q)) / (12.0 * q)
        found = mean / shape * _inverse_gamma(shape, share)
    return found


@jit
def _fit(
    state: Value,
    rows: Value,
    segments: Value,
    sample: Value,
    products: Value,
    decisions: Value,
    fitted: Value,
    FIT: constexpr,
    WIDTH: constexpr,
):
    """A segment's threshold, or the rank that is to be found in one of its samples."""
    segment = tl.program_id(0)
    _, n, k, stride, other_stride = _row(rows, segment)
    row = rows + segment * ROW_COLUMNS
    ours = sample + tl.load(row + 5)
    controller = state + segment * STATE_COLUMNS
    calls = tl.load(controller + 8).to(tl.int64)
    size = _taken(n, stride, calls).to(tl.int32)
    reaching = k.to(tl.float64) * size.to(tl.float64) / tl.maximum(n, 1).to(tl.float64)
    count, mean, variance = _moments_above(ours, size, reaching * 0.0)
    decision = decisions + segment * DECISION_COLUMNS
    other = decisions + (segments + segment) * DECISION_COLUMNS
    tl.store(decision, 0)
    tl.store(decision + 1, 1)
    tl.store(decision + 2, 0)
    tl.store(other, 0)
    tl.store(other + 1, 0)
    tl.store(other + 2, 0)
    tl.store(fitted + segment, reaching * 0.0 - 1.0)
    if count > 0:
        share = reaching / count.to(tl.float64)
        level = reaching * 0.0
        if share < 1.0:
            left = tl.where(share < FIRST_SHARE, tl.load(controller).to(tl.int32), 1)
            first = tl.where(left == 1, share, FIRST_SHARE)
            if FIT == GAMMA:
                mean_log = _mean_log(ours, size, products + tl.load(row + 6), count, WIDTH)
                level = _gamma_quantile(mean, mean_log, first)
            else:
                level = _quantile(mean, variance, first, FIT)
            while left > 1:
                left -= 1
                count, mean, variance = _moments_above(ours, size, level)
                is_on = (count >= 2) & (count.to(tl.float64) > reaching)
                rest = tl.exp(tl.log(reaching / tl.maximum(count, 1).to(tl.float64)) / left.to(tl.float64))
                level = tl.where(is_on, level + _quantile(mean, variance, rest, FIT), level)
                left = tl.where(is_on, left, 1)
        bits = level.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bits = tl.minimum(tl.maximum(bits, 1), INFINITY - 1)
        reached = _count_reaching(ours, size, bits).to(tl.float64)
        tl.store(fitted + segment, reached / reaching)

        is_misled = tl.load(controller + 7) > 0.0
        start = mix(calls.to(tl.uint32)).to(tl.int64) % other_stride
        start = tl.minimum(start, n - 1)
        length = (n - start + other_stride - 1) // other_stride
        other_rank = tl.maximum((2 * k * length + n) // (2 * n), 1)
        tl.store(other, is_misled.to(tl.int32))
        tl.store(other + 2, other_rank.to(tl.int32))

        chance = tl.where(stride > 1, tl.sqrt(reaching), 0.0)
        is_contradicted = tl.abs(reached - reaching) > tl.maximum(reaching * 0.05, chance)
        rank = tl.maximum((reaching + 0.5).to(tl.int32), 1)
        tl.store(decision, is_contradicted.to(tl.int32))
        tl.store(decision + 1, tl.where(is_contradicted, 0, bits))
        tl.store(decision + 2, rank)


@jit
def _resample(
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
    """dgc's sample, where it is asked for."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    which = tl.load(entry + 4)
    segment = which - segments
    start, n, _, _, stride = _row(rows, segment)
    calls = tl.load(state + segment * STATE_COLUMNS + 8).to(tl.int64)
    first = tl.minimum(mix(calls.to(tl.uint32)).to(tl.int64) % stride, n - 1)
    is_open = tl.load(decisions + which * DECISION_COLUMNS) != 0
    place = first + (tl.load(entry + 5) + tl.arange(0, TILE)) * stride
    is_there = (place < n) & is_open
    value, _ = compensated(bucket, residual, start + place, is_there)
    at = tl.arange(0, TILE)
    is_ours = (at < tl.load(entry + 1)) & is_open
    tl.store(sample + tl.load(entry) + at, tl.where(is_there, magnitude_of(value), -1), is_ours)


@jit
def _control(state: Value, rows: Value, fitted: Value, tally: Value, MOST_STAGES: constexpr):
    """The state after a call, in fp64; unchanged where nothing was fitted or something is not finite."""
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


def encode(
    compressor: Sidco | SidcoE | SidcoGP,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    if not is_aligned(payload) or state is None:
        return False
    device, ratio, count = bucket.device, compressor.ratio, len(segments)
    table, rows, first, values, products = _samples(segments, ratio, device)
    sample = torch.empty(values, dtype=torch.int32, device=device)
    decisions = torch.empty(2 * count, 4, dtype=torch.int32, device=device)
    fitted = torch.empty(count, dtype=torch.float64, device=device)
    logs = torch.empty(products, dtype=torch.float64, device=device)
    launch(_take, first, bucket, residual, state, table, rows, sample, TILE=TILE)
    arguments = (state, rows, count, sample, logs, decisions, fitted)
    launch(_fit, count, *arguments, FIT=compressor.fit.value, WIDTH=_COLUMNS)
    arguments = (bucket, residual, state, table[first:], rows, count, sample, decisions)
    launch(_resample, len(table) - first, *arguments, TILE=TILE)
    settle(sample, decisions, table, 2 * count)
    known = decisions[:, 1].view(2, count)
    chosen = torch.where(decisions[count:, 0] > 0, known[1], known[0]).clamp_min(1)
    cuts = chosen.expand(2, count).contiguous()
    tally = send(bucket, residual, payload, survivors.layout(segments, ratio, device), cuts)
    launch(_control, count, state, rows, fitted, tally, MOST_STAGES=float(most_stages(ratio)))
    return True


def decode(
    compressor: Sidco | SidcoE | SidcoGP,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return survivors.decode(payloads, ranks, segments, compressor.ratio, out)
