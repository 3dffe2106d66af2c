"""Fit a distribution to magnitudes, and compute the magnitude that a small fraction of them exceeds.

A fit to all magnitudes describes the largest poorly, so fits are repeated in stages. The first stage keeps a quarter of
the values, and each later stage fits the values above the last threshold. Targets use the actual counts of earlier
stages, so errors do not add up. Let m and s^2 be the mean and variance of the excess over the last threshold, and p the
fraction to keep. Then the next threshold exceeds the last by:

    exponential         m ln(1/p)
    generalised Pareto  (a/x) (p^-x - 1), x = (1 - m^2/s^2) / 2, a = m (m^2/s^2 + 1) / 2; exponential where s^2 = 0
    gamma               the exact quantile, with shape (3 - q + sqrt((q-3)^2 + 24q)) / 12q, q = ln m - mean(ln |v|)

Zeros and values that are not finite are excluded. csrc/sidco.cpp is the kernels' copy, with the same order of sums.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

FIRST_SHARE = 0.25
_LANES = 512
_GROUP = 512  # mantissas whose product is finite
_LOG_TWO = 0.6931471805599453
_HALF_LOG_TWO_PI = 0.9189385332046727


class TailFit(Enum):
    """Distribution of magnitudes. GAMMA uses generalised Pareto from the second stage on."""

    EXPONENTIAL = 0
    GAMMA = 1
    PARETO = 2


class Moments(NamedTuple):
    """Number of values above a level, and mean and variance of (value - level) over these values."""

    above: int
    mean: float
    variance: float


def fit_threshold(sample: Tensor, reaching: float, stages: int, fit: TailFit) -> float:
    """Return the magnitude that about `reaching` values of the sample reach, from `stages` fits.

    The sample must contain a nonzero value.
    """
    magnitudes = sample.double()
    moments = moments_above(magnitudes, 0.0)
    share = reaching / moments.above
    if share >= 1.0:
        return 0.0
    left = stages if share < FIRST_SHARE else 1
    first = share if left == 1 else FIRST_SHARE
    level = gamma_quantile(magnitudes, moments, first) if fit is TailFit.GAMMA else quantile(moments, first, fit)
    while left > 1:
        left -= 1
        moments = moments_above(magnitudes, level)
        if moments.above < 2 or moments.above <= reaching:
            break
        share = math.exp(math.log(reaching / moments.above) / left)
        level += quantile(moments, share, fit)
    return level


def quantile(moments: Moments, share: float, fit: TailFit) -> float:
    """Return the excess that a fraction `share` of the excesses reaches."""
    mean, variance = moments.mean, moments.variance
    log_share = math.log(share)
    if fit is TailFit.EXPONENTIAL or variance <= 1e-12 * mean * mean:
        return -mean * log_share
    relative = mean * mean / variance
    shape = 0.5 * (1.0 - relative)
    scale = 0.5 * mean * (relative + 1.0)
    if abs(shape) < 1e-6:
        return -scale * log_share
    return scale / shape * (math.exp(-shape * log_share) - 1.0)


def gamma_quantile(magnitudes: Tensor, moments: Moments, share: float) -> float:
    """Return the magnitude exceeded with probability `share` in a gamma distribution fitted to nonzero magnitudes."""
    q = math.log(moments.mean) - mean_log(magnitudes, moments.above)
    if q < 1e-4:
        return -moments.mean * math.log(share)
    shape = (3.0 - q + math.sqrt((q - 3.0) * (q - 3.0) + 24.0 * q)) / (12.0 * q)
    return moments.mean / shape * inverse_gamma(shape, share)


def moments_above(magnitudes: Tensor, level: float) -> Moments:
    is_above = magnitudes > level
    count = int(is_above.sum())
    if count == 0:
        return Moments(0, 0.0, 0.0)
    excess = torch.where(is_above, magnitudes - level, 0.0)
    mean = _sum(excess) / count
    square = _sum(excess * excess) / count
    return Moments(count, mean, square - mean * mean)


def mean_log(magnitudes: Tensor, count: int) -> float:
    """Return the mean logarithm of the nonzero magnitudes.

    Exponents are added; logarithms are taken of products of 512 mantissas.
    """
    power_of_two = 1 << max(0, len(magnitudes) - 1).bit_length()
    magnitudes = pad(magnitudes, (0, power_of_two - len(magnitudes)))
    bits = torch.where(magnitudes > 0, magnitudes, 1.0).view(torch.int64)
    exponents = int(((bits >> 52) - 1023).sum())
    mantissas = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    down_to = max(1, len(mantissas) // _GROUP)
    while len(mantissas) > down_to:
        half = len(mantissas) // 2
        mantissas = mantissas[:half] * mantissas[half:]
    logs = 0.0
    for product in mantissas:
        logs += math.log(float(product))
    return (exponents * _LOG_TWO + logs) / count


def _sum(values: Tensor) -> float:
    """Add every 512th value to one of 512 sums, then repeatedly add the upper half of sums to the lower."""
    lanes = values.new_zeros(_LANES)
    for row in pad(values, (0, -len(values) % _LANES)).view(-1, _LANES):
        lanes = lanes + row
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def inverse_gamma(shape: float, share: float) -> float:
    """Return x that a gamma(shape, 1) variable exceeds with probability `share`, by Newton's method."""
    log_gamma = _log_gamma(shape)
    low, high = 0.0, shape + 10.0
    while _upper_gamma(shape, high, log_gamma) > share:
        low = high
        high *= 2.0
    x = math.exp((math.log(1.0 - share) + log_gamma + math.log(shape)) / shape)  # exact as x goes to 0
    if not low < x < high:
        x = 0.5 * (low + high)
    for _ in range(200):
        error = _upper_gamma(shape, x, log_gamma) - share
        if error > 0.0:
            low = x
        else:
            high = x
        density = math.exp((shape - 1.0) * math.log(x) - x - log_gamma)
        new = x + error / density if density > 1e-300 else low
        if not low < new < high:
            new = 0.5 * (low + high)
        if abs(new - x) <= 1e-10 * x:
            return new
        x = new
    return x


def _upper_gamma(shape: float, x: float, log_gamma: float) -> float:
    """Regularised upper incomplete gamma function, x > 0."""
    front = math.exp(shape * math.log(x) - x - log_gamma)
    if x < shape + 1.0:  # power series of the lower function
        term = 1.0 / shape
        total = term
        for i in range(1, 1000):
            term *= x / (shape + i)
            total += term
            if term < total * 1e-16:
                break
        return 1.0 - front * total
    b = x + 1.0 - shape  # continued fraction (Lentz)
    c = 1e300
    d = 1.0 / b
    total = d
    for i in range(1, 1000):
        factor = -i * (i - shape)
        b += 2.0
        d = 1.0 / (factor * d + b)
        c = b + factor / c
        change = c * d
        total *= change
        if abs(change - 1.0) < 1e-15:
            break
    return front * total


def _log_gamma(x: float) -> float:
    """Return ln Γ(x), accurate to 1e-13. An x below 10 is shifted, for Stirling's series."""
    shift = 1.0
    while x < 10.0:
        shift *= x
        x += 1.0
    inverse = 1.0 / x
    square = inverse * inverse
    series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0)))
    return (x - 0.5) * math.log(x) - x + _HALF_LOG_TWO_PI + series - math.log(shift)
