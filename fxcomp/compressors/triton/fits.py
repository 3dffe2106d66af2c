"""Fit a distribution to a sample's magnitudes in fp64, for sidco. The formulas are in tail_fits.py."""

from __future__ import annotations

from fxcomp.compressors.triton.language import constant, constexpr, jit, product_of_rows, sum_of, tl

# The same numbers as in tail_fits.py.
LANES = constant(512)
GROUP = constant(512)
FIRST_SHARE = constant(0.25)
LOG_TWO = constant(0.6931471805599453)
HALF_LOG_TWO_PI = constant(0.9189385332046727)
EXPONENTIAL, GAMMA = constant(0), constant(1)


@jit
def _moments_above(sample, size, level):
    """Return the number of values above a level, and the mean and variance of (value - level) over these values."""
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
    mean = sum_of(sums, LANES) / divisor
    return count, mean, sum_of(squares, LANES) / divisor - mean * mean


@jit
def count_reaching(sample, size, bits):
    """Count the sampled magnitudes whose bits are >= `bits`."""
    found = tl.zeros([LANES], tl.int32)
    first = size * 0
    while first < size:
        at = first + tl.arange(0, LANES)
        found += (tl.load(sample + at, at < size, other=-1) >= bits).to(tl.int32)
        first += LANES
    return tl.sum(found, axis=0)


@jit
def _quantile(mean, variance, share, FIT: constexpr):
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
def _log_gamma(x):
    shift = x * 0.0 + 1.0
    while x < 10.0:
        shift *= x
        x += 1.0
    inverse = 1.0 / x
    square = inverse * inverse
    series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0)))
    return (x - 0.5) * tl.log(x) - x + HALF_LOG_TWO_PI + series - tl.log(shift)


@jit
def _upper_gamma(shape, x, log_gamma):
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
def _inverse_gamma(shape, share):
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
def _mantissas(sample, size, at):
    """Return mantissas and exponents of the magnitudes at `at`; 1 and 0 for zeros and padding."""
    bits = tl.maximum(tl.load(sample + at, at < size, other=0), 0)
    wide = bits.to(tl.float32, bitcast=True).to(tl.float64)
    wide = tl.where(wide > 0, wide, 1.0).to(tl.int64, bitcast=True)
    mantissa = ((wide & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return mantissa, (wide >> 52) - 1023


@jit
def _mean_log(sample, size, products, count, WIDTH: constexpr):
    columns = size * 0 + 1
    while columns * GROUP < size:
        columns *= 2
    exponents = tl.zeros([GROUP], tl.int64)
    first = columns * 0
    while first < columns:
        column = first + tl.arange(0, WIDTH)[None, :]
        at = tl.arange(0, GROUP)[:, None] * columns + column
        factors, exponent = _mantissas(sample, tl.where(column < columns, size, 0), at)
        exponents += tl.sum(exponent, axis=1)
        to = first + tl.arange(0, WIDTH)
        tl.store(products + to, tl.log(product_of_rows(factors, GROUP, WIDTH)), to < columns)
        first += WIDTH
    tl.debug_barrier()  # other threads wrote these products
    logs = tl.load(products) * 0.0
    number = columns * 0
    while number < columns:
        logs += tl.load(products + number)
        number += 1
    return (tl.sum(exponents, axis=0).to(tl.float64) * LOG_TWO + logs) / count.to(tl.float64)


@jit
def _gamma_quantile(mean, mean_log, share):
    q = tl.log(mean) - mean_log
    found = -mean * tl.log(share)
    if q >= 1e-4:
        shape = (3.0 - q + tl.sqrt((q - 3.0) * (q - 3.0) + 24.0 * q)) / (12.0 * q)
        found = mean / shape * _inverse_gamma(shape, share)
    return found


@jit
def fitted_level(sample, size, stages, reaching, products, FIT: constexpr, WIDTH: constexpr):
    """Return the magnitude that `reaching` sampled values should reach, and True if a sampled value is not zero."""
    count, mean, variance = _moments_above(sample, size, reaching * 0.0)
    is_fitted = count > 0
    level = reaching * 0.0
    share = reaching / tl.maximum(count, 1).to(tl.float64)
    if is_fitted & (share < 1.0):
        left = tl.where(share < FIRST_SHARE, stages, 1)
        first = tl.where(left == 1, share, FIRST_SHARE)
        if FIT == GAMMA:
            mean_log = _mean_log(sample, size, products, count, WIDTH)
            level = _gamma_quantile(mean, mean_log, first)
        else:
            level = _quantile(mean, variance, first, FIT)
        while left > 1:
            left -= 1
            count, mean, variance = _moments_above(sample, size, level)
            is_on = (count >= 2) & (count.to(tl.float64) > reaching)
            rest = tl.exp(tl.log(reaching / tl.maximum(count, 1).to(tl.float64)) / left.to(tl.float64))
            level = tl.where(is_on, level + _quantile(mean, variance, rest, FIT), level)
            left = tl.where(is_on, left, 1)
    return level, is_fitted
