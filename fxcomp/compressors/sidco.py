"""Send the values above a threshold that follows from a distribution fitted to the magnitudes, in one full pass.

    sample    = runs of 16 values of v, every stride-th of them, other ones each step
    fit       = a distribution of the sample's magnitudes; its (1 - k / n) quantile, in stages
    threshold = fit, or the sample's own quantile where the sample contradicts the fit
    decoded   = v where |v| >= threshold, 0 elsewhere

Payload: fxcomp/compressors/survivors.py. Three compressors differ in the distribution: `sidco_e` exponential,
`sidco_gp` gamma and then generalised Pareto, `sidco` generalised Pareto.

A fit to all magnitudes says little about the largest, so it is repeated: the first stage keeps a quarter, each later
one fits what exceeds the threshold before. A stage aims at the k-th magnitude from what the stages before kept by the
sample's count, so their errors do not add up. With mean m, variance s^2 of the exceedances and the share p to keep:

    exponential         m ln(1/p)
    generalised Pareto  (s/x) (p^-x - 1), x = (1 - m^2/s^2) / 2, s = m (m^2/s^2 + 1) / 2; exponential where s^2 = 0
    gamma               the exact inverse, shape c from q = ln m - mean(ln): (3 - q + sqrt((q-3)^2 + 24q)) / 12q

Zeros and what is not finite stay out of the fit; the share to keep counts for the rest.

The check: t = k / n of the sample should reach the threshold. If the number that does is off by more than 5 %, and by
more than chance explains (sqrt(t), its standard deviation; 0 where the sample is everything), the threshold is the t-th
largest magnitude of the sample instead. Error feedback cuts off the distribution at the last threshold, which no fit
follows; the check makes up for it from the first step on. The sample has 256 / ratio values or somewhat more, at least
32768, and at most the larger of 131072 and n / 32: at t = 256 chance puts the count off by 6 %, at t = 128 by 9 %.
docs/benchmarks/sidco.md has what is sent of several distributions and in training.

What is left out is as with topk: 0.92 of the squared norm at 1 % of Gaussian values, 0.84 for Laplace.

State, 9 fp32 a segment: the controller. Every five steps it compares the mean of what the fits alone would have
selected with the target; if it is off by more than 20 %, one stage more or less, and the other way round from then on
if the last change made it worse. If twice in a row less than a quarter or more than four times of k reached the
threshold, the sample misleads: five steps use dgc's sample, and two stages are the start again. A step where something
is not finite leaves the state alone, as one of zeros does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors import kernels, randomness, survivors
from fxcomp.compressors.base import Compressed, Compressor
from fxcomp.compressors.blocks import split
from fxcomp.compressors.dgc import sampled_cut
from fxcomp.compressors.dgc import strides as dgc_strides
from fxcomp.compressors.facts import Bias, Case, Facts, Feedback, Parameter
from fxcomp.compressors.registration import register
from fxcomp.compressors.survivors import INFINITY_BITS, Cut
from fxcomp.compressors.topk import counts

# The same numbers as in csrc/sidco.cpp.
RUN = 16
FIRST_SHARE = 0.25
WINDOW = 5
_CALLS = 1 << 20  # the counter of calls starts again here, so that fp32 holds it
_FAR = 1e30  # as the deviation before the first window: nothing is worse
_LANES = 512
_GROUP = 512  # so many mantissas multiply to less than the largest double

_LOG_TWO = 0.6931471805599453
_HALF_LOG_TWO_PI = 0.9189385332046727

_SAMPLE_REACHED = 256
_SMALLEST_SAMPLE = 1 << 15
_LARGEST_SAMPLE = 1 << 17


class Fit(Enum):
    """The distribution of magnitudes; from the second stage on gamma's is generalised Pareto."""

    EXPONENTIAL = 0
    GAMMA = 1
    PARETO = 2


class Moments(NamedTuple):
    """Of what exceeds a level, above that level."""

    above: int
    mean: float
    variance: float


@dataclass(frozen=True, slots=True)
class Controller:
    """The state of one segment, as it lies in memory."""

    stages: float = 2.0
    direction: float = 1.0
    calls_in_window: float = 0.0
    fitted: float = 0.0
    """The sum over the window of what the fits alone would have selected, relative to k."""
    reached: float = 0.0
    """The sum over the window of what reached the thresholds, relative to k."""
    deviation: float = _FAR
    """Of the mean of `fitted` from 1 in the window before."""
    bad_windows: float = 0.0
    resamples: float = 0.0
    calls: float = 0.0

    def after(self, fitted: float, reached: float, most_stages: int) -> Controller:
        """The state after a call, in fp64; it is stored as fp32."""
        now = replace(
            self,
            calls=(self.calls + 1) % _CALLS,
            calls_in_window=self.calls_in_window + 1,
            fitted=self.fitted + fitted,
            reached=self.reached + reached,
        )
        return now if now.calls_in_window < WINDOW else now._after_window(most_stages)

    def _after_window(self, most_stages: int) -> Controller:
        mean_fitted, mean_reached = self.fitted / WINDOW, self.reached / WINDOW
        new = replace(self, calls_in_window=0.0, fitted=0.0, reached=0.0, resamples=0.0)
        is_bad = mean_reached < 0.25 or mean_reached > 4.0
        if is_bad and self.bad_windows >= 1:
            return replace(new, stages=2.0, direction=1.0, deviation=_FAR, bad_windows=0.0, resamples=1.0)
        deviation = abs(mean_fitted - 1.0)
        direction = -self.direction if deviation > self.deviation else self.direction
        if deviation <= 0.2:
            return replace(new, bad_windows=float(is_bad), deviation=deviation)
        stages = self.stages + (direction if mean_fitted < 1.0 else -direction)
        return replace(
            new,
            stages=min(max(stages, 1.0), float(most_stages)),
            direction=direction,
            deviation=deviation,
            bad_windows=float(is_bad),
        )


STATE_ELEMENTS = len(fields(Controller))


@lru_cache(maxsize=4096)
def strides(segments: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    """Between the sampled runs; odd, 1 where everything is the sample."""
    return tuple(_stride(n, ratio) for n in segments)


def _stride(n: int, ratio: float) -> int:
    largest = max(_LARGEST_SAMPLE, n // 32)
    values = min(max(math.ceil(_SAMPLE_REACHED / ratio), _SMALLEST_SAMPLE), largest)
    return max(1, (n // values - 1) | 1)


def most_stages(ratio: float) -> int:
    """Each keeps half of the one before, at least."""
    return max(1, math.ceil(math.log(ratio) / math.log(0.5)))


def sample_of(piece: Tensor, stride: int, calls: int) -> Tensor:
    """Magnitudes of the sampled runs, 0 for what is not finite."""
    if stride > 1:
        runs = piece[: len(piece) // RUN * RUN].view(-1, RUN)
        piece = runs[calls % stride :: stride].flatten()
    magnitude = piece.abs()
    return torch.where(magnitude.isfinite(), magnitude, 0.0)


def fit_threshold(sample: Tensor, reaching: float, stages: int, fit: Fit) -> float:
    """The magnitude that about `reaching` values of the sample reach, from so many fits; not all are 0."""
    magnitudes = sample.double()
    moments = moments_above(magnitudes, 0.0)
    share = reaching / moments.above
    if share >= 1.0:
        return 0.0
    left = stages if share < FIRST_SHARE else 1
    first = share if left == 1 else FIRST_SHARE
    level = gamma_quantile(magnitudes, moments, first) if fit is Fit.GAMMA else quantile(moments, first, fit)
    while left > 1:
        left -= 1
        moments = moments_above(magnitudes, level)
        if moments.above < 2 or moments.above <= reaching:
            break
        share = math.exp(math.log(reaching / moments.above) / left)
        level += quantile(moments, share, fit)
    return level


def quantile(moments: Moments, share: float, fit: Fit) -> float:
    """What a share of the exceedances exceeds."""
    mean, variance = moments.mean, moments.variance
    log_share = math.log(share)
    if fit is Fit.EXPONENTIAL or variance <= 1e-12 * mean * mean:
        return -mean * log_share
    relative = mean * mean / variance
    shape = 0.5 * (1.0 - relative)
    scale = 0.5 * mean * (relative + 1.0)
    if abs(shape) < 1e-6:
        return -scale * log_share
    return scale / shape * (math.exp(-shape * log_share) - 1.0)


def gamma_quantile(magnitudes: Tensor, moments: Moments, share: float) -> float:
    """What a share of all magnitudes exceeds if they follow a gamma distribution."""
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
    """Of those that are not zero: exponents add up exactly, and mantissas are multiplied, 512 at a time."""
    magnitudes = pad(magnitudes, (0, _power_of_two(len(magnitudes)) - len(magnitudes)))
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
    """In 512 strided lanes that then fold in halves: an order that any vector width can follow."""
    lanes = values.new_zeros(_LANES)
    for row in pad(values, (0, -len(values) % _LANES)).view(-1, _LANES):
        lanes = lanes + row
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def inverse_gamma(shape: float, share: float) -> float:
    """x such that gamma(shape, 1) exceeds it with probability `share`: Newton's steps between bounds that close in."""
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
    """The regularised upper incomplete gamma function, x > 0."""
    front = math.exp(shape * math.log(x) - x - log_gamma)
    if x < shape + 1.0:  # a power series of the lower one
        term = 1.0 / shape
        total = term
        for i in range(1, 1000):
            term *= x / (shape + i)
            total += term
            if term < total * 1e-16:
                break
        return 1.0 - front * total
    b = x + 1.0 - shape  # a continued fraction, from the front (Lentz)
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
    """Stirling's series, after raising x to 10 or more; good to 1e-13."""
    shift = 1.0
    while x < 10.0:
        shift *= x
        x += 1.0
    inverse = 1.0 / x
    square = inverse * inverse
    series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0)))
    return (x - 0.5) * math.log(x) - x + _HALF_LOG_TWO_PI + series - math.log(shift)


def choose_cut(
    piece: Tensor, k: int, controller: Controller, fit: Fit, stride: int, dgc_stride: int
) -> tuple[Cut, float | None]:
    """The threshold, and what the fit alone would have selected of the sample relative to the target."""
    calls = int(controller.calls)
    sample = sample_of(piece, stride, calls)
    if not bool((sample > 0).any()):
        return Cut(1, 1), None
    reaching = k * len(sample) / len(piece)
    bits = _round_to_bits(fit_threshold(sample, reaching, int(controller.stages), fit))
    reached = int((survivors.magnitude_bits(sample) >= bits).sum())
    if controller.resamples > 0:
        cut = sampled_cut(piece, k, dgc_stride, int(randomness.mix(torch.tensor(calls))))
        return Cut(cut.bits, cut.bits), reached / reaching
    if is_contradicted(reached, reaching, stride):
        bits = survivors.kth_largest(sample, max(1, math.floor(reaching + 0.5)))
    return Cut(bits, bits), reached / reaching


def is_contradicted(reached: int, reaching: float, stride: int) -> bool:
    """The sample holds so many values above the threshold that chance does not explain it."""
    chance = math.sqrt(reaching) if stride > 1 else 0.0
    return abs(reached - reaching) > max(0.05 * reaching, chance)


def _round_to_bits(threshold: float) -> int:
    """As fp32; at least the smallest above zero, at most the largest that is finite."""
    bits = int(survivors.magnitude_bits(torch.tensor(threshold, dtype=torch.float64).float()))
    return min(max(bits, 1), INFINITY_BITS - 1)


class _Sidco(Compressor):
    """What the three have in common."""

    __slots__ = ()

    ratio: float
    fit: ClassVar[Fit]

    def payload_elements(self, segments: Sequence[int]) -> int:
        return survivors.payload_bytes(segments, self.ratio)

    def state_elements(self, size: int) -> int:
        return STATE_ELEMENTS

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        return _stored(Controller())

    def compress_reference(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> Compressed:
        assert state is not None, "sidco has a controller"
        value = bucket if residual is None else bucket + residual
        segments = tuple(segments)
        ks = counts(segments, self.ratio)
        pieces = split(value, segments)
        controllers = [Controller(*map(float, row)) for row in state.view(-1, STATE_ELEMENTS)]
        chosen = [
            choose_cut(piece, k, controller, self.fit, stride, dgc_stride) if k > 0 else (Cut(1, 1), None)
            for piece, k, controller, stride, dgc_stride in zip(
                pieces, ks, controllers, strides(segments, self.ratio), dgc_strides(segments, self.ratio), strict=True
            )
        ]
        sent = survivors.compress(bucket, residual, segments, self.ratio, [cut for cut, _ in chosen])
        new = [
            controller
            if fitted is None or not bool(piece.isfinite().all())
            else controller.after(fitted, reached / k, most_stages(self.ratio))
            for controller, (_, fitted), piece, reached, k in zip(
                controllers, chosen, pieces, sent.reached, ks, strict=True
            )
        ]
        new_state = torch.cat([state.new_empty(0), *(_stored(controller).to(state.device) for controller in new)])
        return Compressed(sent.payload, sent.residual, new_state)

    def decompress_reference(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> Tensor:
        return survivors.decompress(payloads, ranks, segments, self.ratio)

    def encode_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        segments = tuple(segments)
        ks, slots = counts(segments, self.ratio), survivors.capacities(segments, self.ratio)
        kernels.run(
            "fxcomp_sidco_encode",
            *(bucket, residual, payload, segments, ks, slots, len(ks)),
            *(strides(segments, self.ratio), dgc_strides(segments, self.ratio)),
            *(self.fit.value, most_stages(self.ratio), state),
        )
        return True

    def decode_on_cpu(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        out: Tensor,
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> bool:
        return survivors.decode_on_cpu(payloads, ranks, segments, self.ratio, out)


def _stored(controller: Controller) -> Tensor:
    values: list[float] = [getattr(controller, name) for name in (field.name for field in fields(Controller))]
    return torch.tensor(values, dtype=torch.float32)


def _facts(name: str, summary: str, use: str, avoid: str, case: Case = Case.SYSTEM) -> Facts:
    return Facts(
        name=name,
        summary=summary,
        payload="4 + 4c + P(n, c), c = ⌈1.3⌈ratio·n⌉⌉, P as for topk",
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        sends_values=True,
        parameters=(Parameter("ratio", "share of values to send", 1e-6, 1.0),),
        state="36",
        use=use,
        avoid=avoid,
        source="Abdelmoniem et al. 2021, SIDCo; with a sampled check",
        case=case,
    )


@register
@dataclass(frozen=True, slots=True)
class Sidco(_Sidco):
    """About k values for one pass, from generalised Pareto fits."""

    ratio: float

    fit: ClassVar[Fit] = Fit.PARETO
    facts: ClassVar[Facts] = _facts(
        "sidco",
        "the values above a threshold from generalised Pareto fits",
        "As topk, where its selection costs too much: the best fit for most gradients.",
        "Where ratio is above one over the number of ranks.",
        Case.MODE,
    )


@register
@dataclass(frozen=True, slots=True)
class SidcoE(_Sidco):
    """About k values for one pass, from exponential fits."""

    ratio: float

    fit: ClassVar[Fit] = Fit.EXPONENTIAL
    facts: ClassVar[Facts] = _facts(
        "sidco_e",
        "the values above a threshold from exponential fits",
        "As sidco, where magnitudes are known to be exponential.",
        "Where tails are heavier or lighter than exponential: the check does the work then, and sidco needs it less.",
    )


@register
@dataclass(frozen=True, slots=True)
class SidcoGP(_Sidco):
    """About k values for one pass, from a gamma and then generalised Pareto fits."""

    ratio: float

    fit: ClassVar[Fit] = Fit.GAMMA
    facts: ClassVar[Facts] = _facts(
        "sidco_gp",
        "the values above a threshold from a gamma fit, then generalised Pareto",
        "As sidco, where most values are close to zero, yet not zero.",
        "Where sidco does as well: the gamma fit costs more.",
    )
