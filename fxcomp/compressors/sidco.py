"""Send the values above a threshold: the quantile of a distribution fitted to sampled magnitudes.

    sample    = runs of 16 values of v, every stride-th run, shifted each step
    quantile  = (1 - k / n) quantile of a distribution fitted to the sample's magnitudes in stages (tail_fits.py)
    threshold = quantile, or the sample's own quantile where the sample contradicts the fit
    decoded   = v where |v| >= threshold, 0 elsewhere

survivors.py defines k and the payload. The parameter `fit` names the distribution: `exponential`, `pareto` (generalised
Pareto), or `gamma` in the first stage and generalised Pareto in later stages.

Check of the fit: of m sampled values, t = m k / n should reach the threshold. If their number differs from t by more
than 5 % and by more than its standard deviation (sqrt(t); 0 if all values are sampled), the threshold becomes the
sample's t-th largest magnitude. The check is needed because error feedback leaves few magnitudes above the last
threshold, which no fitted distribution models. Measured counts: docs/benchmarks/sidco.md.

State, 9 fp32 a segment: the controller of the number of stages. Every five steps (a window) it compares t with the mean
number of sampled values above the quantile. If they differ by more than 20 %, the controller changes the stages by one,
and reverses direction if the last change made the difference larger. If the mean number of values that reach the
threshold is below k / 4 or above 4 k in two consecutive windows, the next five steps take the threshold from a thin
sample, every stride-th value from a random start (as DGC, Lin et al. 2018), and the controller restarts with two
stages. A segment that is zero or not finite leaves the state unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors import randomness, survivors
from fxcomp.compressors.base import Compressed, Compressor
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.survivors import INFINITY_BITS
from fxcomp.compressors.tail_fits import TailFit, fit_threshold
from fxcomp.compressors.topk import counts

# The same numbers as in csrc/sidco.cpp.
RUN = 16
WINDOW = 5
_CALLS = 1 << 20  # the call counter wraps here, so that fp32 represents it exactly
FITS = tuple(fit.name.lower() for fit in TailFit)
_FAR = 1e30  # larger than any measured deviation

_SAMPLE_REACHED = 256
_SMALLEST_SAMPLE = 1 << 15
_LARGEST_SAMPLE = 1 << 17
_THIN_SAMPLE_REACHED = 64


@dataclass(frozen=True, slots=True)
class Controller:
    """State of one segment, fields in the state tensor's order."""

    stages: float = 2.0
    direction: float = 1.0
    calls_in_window: float = 0.0
    fitted: float = 0.0
    """Sum over the window's steps of (sampled values above the quantile) / t."""
    reached: float = 0.0
    """Sum over the window's steps of (values that reached the threshold) / k."""
    deviation: float = _FAR
    """|`fitted` / WINDOW - 1| at the end of the last window."""
    bad_windows: float = 0.0
    resamples: float = 0.0
    calls: float = 0.0

    def after(self, fitted: float, reached: float, most_stages: int) -> Controller:
        """Return the state after one encoding, which adds `fitted` and `reached` to the sums."""
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
    """Return each segment's odd stride between sampled runs, 1 for a complete sample."""
    return tuple(_stride(n, ratio) for n in segments)


def _stride(n: int, ratio: float) -> int:
    largest = max(_LARGEST_SAMPLE, n // 32)
    values = min(max(math.ceil(_SAMPLE_REACHED / ratio), _SMALLEST_SAMPLE), largest)
    return max(1, (n // values - 1) | 1)


@lru_cache(maxsize=4096)
def thin_strides(segments: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    """Return each segment's stride for a thin sample of about max(n / 100, 64 / ratio) values.

    Strides are odd, so that samples of a matrix vary in column.
    """
    return tuple(max(1, (n // max(math.ceil(_THIN_SAMPLE_REACHED / ratio), n // 100) - 1) | 1) for n in segments)


def thin_threshold(piece: Tensor, k: int, stride: int, random: int) -> int:
    """Return the bits of the magnitude that a fraction k / n of the thin sample reaches."""
    sample = piece[min(random % stride, len(piece) - 1) :: stride]
    return survivors.kth_largest(sample, max(1, (2 * k * len(sample) + len(piece)) // (2 * len(piece))))


def most_stages(ratio: float) -> int:
    return max(1, math.ceil(math.log(ratio) / math.log(0.5)))


def sample_of(piece: Tensor, stride: int, calls: int) -> Tensor:
    """Return the sampled magnitudes, 0 for values that are not finite."""
    if stride > 1:
        runs = piece[: len(piece) // RUN * RUN].view(-1, RUN)
        piece = runs[calls % stride :: stride].flatten()
    magnitude = piece.abs()
    return torch.where(magnitude.isfinite(), magnitude, 0.0)


def is_contradicted(reached: int, reaching: float, stride: int) -> bool:
    """Return True if the count `reached` differs from the expected `reaching` by over 5 % and a standard deviation."""
    chance = math.sqrt(reaching) if stride > 1 else 0.0
    return abs(reached - reaching) > max(0.05 * reaching, chance)


def _bounded(value: float, least: int, most: int) -> int:
    """Keep a number of a loaded state, which may be anything, within its range. NaN becomes `least`."""
    return int(min(max(least, value), most))


def _round_to_bits(threshold: float) -> int:
    bits = int(survivors.magnitude_bits(torch.tensor(threshold, dtype=torch.float64).float()))
    return min(max(bits, 1), INFINITY_BITS - 1)


@register
@dataclass(frozen=True, slots=True)
class Sidco(Compressor):
    """About k values in one pass, above a threshold from a fitted distribution."""

    ratio: float
    fit: str = "pareto"

    facts: ClassVar[Facts] = Facts(
        name="sidco",
        summary="values above a threshold from a fitted distribution",
        payload="4 + 4c + P(n, c), c = ⌈1.3⌈ratio·n⌉⌉, P as for topk",
        is_joined=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(
            Parameter("ratio", "share of values to send", 1e-6, 1.0),
            Parameter(
                "fit",
                "the distribution: pareto fits most gradients, gamma those with most values near zero",
                choices=FITS,
            ),
        ),
        state="36",
        use="In place of topk, where its selection costs too much.",
        avoid="Where ratio exceeds 1 / ranks.",
        source="Abdelmoniem et al. 2021, SIDCo; with a sampled check",
    )

    @property
    def tail_fit(self) -> TailFit:
        return TailFit[self.fit.upper()]

    def payload_elements(self, segments: Sequence[int]) -> int:
        return survivors.payload_bytes(segments, self.ratio)

    def state_elements(self, size: int) -> int:
        return STATE_ELEMENTS

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        return torch.tensor(astuple(Controller()), dtype=torch.float32)

    def compress_reference(self, given: EncoderInput) -> Compressed:
        assert given.state is not None, "sidco has a controller"
        ks = counts(given.segments, self.ratio)
        controllers = [Controller(*map(float, row)) for row in given.state.view(-1, STATE_ELEMENTS)]
        choices = self._choices(given, ks, controllers)
        sent, counted = survivors.compress(given, self.ratio, [threshold for threshold, _ in choices])
        new = [
            controller
            if fitted is None or not bool(piece.isfinite().all())
            else controller.after(fitted, reached / k, most_stages(self.ratio))
            for controller, (_, fitted), piece, reached, k in zip(
                controllers, choices, given.pieces, counted, ks, strict=True
            )
        ]
        state = torch.tensor([astuple(controller) for controller in new], dtype=torch.float32).flatten()
        return sent._replace(state=state.to(given.state.device))

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        return survivors.decompress(received, self.ratio)

    def _choices(
        self, given: EncoderInput, ks: Sequence[int], controllers: Sequence[Controller]
    ) -> list[tuple[int, float | None]]:
        both = zip(strides(given.segments, self.ratio), thin_strides(given.segments, self.ratio), strict=True)
        return [
            self._choose(piece, k, controller, stride, thin_stride)
            for piece, k, controller, (stride, thin_stride) in zip(given.pieces, ks, controllers, both, strict=True)
        ]

    def _choose(
        self, piece: Tensor, k: int, controller: Controller, stride: int, thin_stride: int
    ) -> tuple[int, float | None]:
        """Return the bits of a segment's threshold, and (sampled values above the quantile) / t.

        The second value is None if no distribution was fitted, because k or every sampled value is 0.
        """
        calls = _bounded(controller.calls, 0, _CALLS - 1)
        sample = sample_of(piece, stride, calls)
        if k == 0 or not bool((sample > 0).any()):
            return 1, None
        reaching = k * len(sample) / len(piece)
        stages = _bounded(controller.stages, 1, most_stages(self.ratio))
        bits = _round_to_bits(fit_threshold(sample, reaching, stages, self.tail_fit))
        reached = int((survivors.magnitude_bits(sample) >= bits).sum())
        if controller.resamples > 0:
            bits = thin_threshold(piece, k, thin_stride, int(randomness.mix(torch.tensor(calls))))
        elif is_contradicted(reached, reaching, stride):
            bits = survivors.kth_largest(sample, max(1, math.floor(reaching + 0.5)))
        return bits, reached / reaching

    def kernel_arguments(self, what: str, segments: tuple[int, ...]) -> tuple[tuple[int, ...] | float, ...]:
        layout = (segments, counts(segments, self.ratio), survivors.capacities(segments, self.ratio), len(segments))
        if what == "decode":
            return layout
        both = strides(segments, self.ratio), thin_strides(segments, self.ratio)
        return *layout, *both, self.tail_fit.value, most_stages(self.ratio)
