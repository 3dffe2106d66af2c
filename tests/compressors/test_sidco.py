"""The fitted thresholds: formulas, the controller, and what is selected. docs/benchmarks/sidco.md has all of it."""

import math
import statistics
from dataclasses import astuple, replace

import pytest
import torch
from helpers import distributions
from helpers.compressor_cases import WITH_KERNELS
from tasks import make_task
from torch import Tensor

from fxcomp.compressors import Compressor, EncoderInput, Sidco
from fxcomp.compressors.sidco import Controller, is_contradicted, most_stages, sample_of, strides
from fxcomp.compressors.tail_fits import TailFit, fit_threshold, inverse_gamma, mean_log
from fxcomp.compressors.topk import counts

N = 1 << 18


def _threshold(samples: Tensor, ratio: float, stages: int, fit: TailFit) -> float:
    """Return how many values a fit to all of them selects, relative to the target."""
    level = fit_threshold(samples.abs(), ratio * len(samples), stages, fit)
    return (samples.abs() >= level).sum().item() / (ratio * len(samples))


@pytest.mark.parametrize(
    ("distribution", "fit", "stages", "at_10", "at_1"),
    [
        ("Laplace", TailFit.EXPONENTIAL, 1, 1.0, 1.0),
        ("Laplace", TailFit.PARETO, 1, 1.0, 1.0),
        ("Laplace", TailFit.PARETO, 2, 1.0, 1.0),
        ("Laplace", TailFit.GAMMA, 2, 1.0, 1.0),
        ("Pareto .2", TailFit.PARETO, 1, 1.0, 1.0),
        ("Pareto .2", TailFit.PARETO, 2, 1.0, 1.0),
        ("gamma ½", TailFit.GAMMA, 1, 1.0, 0.97),
        ("Gaussian", TailFit.EXPONENTIAL, 1, 0.66, 0.02),
    ],
)
def test_fits_select_what_is_known_of_them(
    distribution: str, fit: TailFit, stages: int, at_10: float, at_1: float
) -> None:
    samples = distributions.draw(distribution, 1 << 20, seed=3)
    assert _threshold(samples, 0.1, stages, fit) == pytest.approx(at_10, abs=0.03)
    assert _threshold(samples, 0.01, stages, fit) == pytest.approx(at_1, abs=0.05)


@pytest.mark.parametrize("ratio", [0.01, 0.001])
@pytest.mark.parametrize("distribution", distributions.DISTRIBUTIONS)
@pytest.mark.one_in(3)
def test_about_k_values_are_sent_from_the_first_call_on(distribution: str, ratio: float) -> None:
    samples = [distributions.draw(distribution, N, seed) for seed in range(12)]
    for compressor in (Sidco(ratio, "exponential"), Sidco(ratio, "gamma"), Sidco(ratio)):
        first, *later = distributions.shares_sent(compressor, ratio, samples)
        assert 0.8 < first < 1.2, f"{compressor}: the first call sends {first:.2f} of the target"
        settled = statistics.mean(later[9:])
        assert 0.8 < settled < 1.2, f"{compressor}: settled at {settled:.2f} of the target"


def test_in_training_about_k_values_are_sent_by_every_segment() -> None:
    task, compressor = make_task("charlm"), Sidco(0.01)
    segments, weights, residual = task.segments, task.start.clone(), torch.zeros(sum(task.segments))
    state = torch.cat([compressor.fresh_state(n, index, 0) for index, n in enumerate(segments)])
    payload = torch.empty(compressor.payload_elements(segments), dtype=torch.uint8)
    sent = torch.zeros(len(segments))
    for step in range(110):
        gradient = torch.stack(task.gradients(weights, step)).mean(dim=0)
        compressor.encode(gradient, residual, payload, segments, state)
        sent += torch.tensor(distributions.values_sent(payload, segments, 0.01)) * (step >= 100)
        compressor.decode(payload, 1, segments, gradient)
        weights -= task.rates["sgd"] * gradient
    wanted = 10 * torch.tensor(counts(segments, 0.01))
    assert ((sent / wanted - 1).abs() < 0.2).all()


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 3.0, 60.0])
@pytest.mark.parametrize("share", [0.9, 0.25, 0.01, 1e-6])
def test_the_inverse_of_the_incomplete_gamma_function_is_exact(shape: float, share: float) -> None:
    x = inverse_gamma(shape, share)
    upper = torch.special.gammaincc(torch.tensor(shape, dtype=torch.float64), torch.tensor(x, dtype=torch.float64))
    assert upper.item() == pytest.approx(share, rel=1e-8)


def test_the_mean_logarithm_is_that_of_what_is_not_zero() -> None:
    magnitudes = torch.tensor([0.0, 1e-44, 3.0, 1e38, 0.7, 0.0, 12.0]).double()
    expected = magnitudes[magnitudes > 0].log().mean().item()
    assert mean_log(magnitudes, 5) == pytest.approx(expected, rel=1e-12)


def test_a_quarter_or_more_takes_one_stage() -> None:
    samples = distributions.draw("Laplace", 10_000, 0).abs()
    level = fit_threshold(samples, 3000, 5, TailFit.EXPONENTIAL)
    assert level == pytest.approx(samples.mean().item() * math.log(1 / 0.3), rel=1e-6)


@pytest.mark.parametrize("compressor", [Sidco(0.01), Sidco(0.01, "exponential"), Sidco(0.01, "gamma")], ids=str)
@pytest.mark.parametrize(
    ("bucket", "sent"),
    [
        (torch.zeros(1000), 0),
        (torch.full((1000,), -2.0), 13),
        (torch.cat([torch.zeros(995), torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])]), 5),
        (torch.arange(50.0), 1),
        (torch.cat([torch.full((5,), torch.nan), torch.randn(995)]), 13),
        (torch.full((1000,), torch.inf), 13),
    ],
    ids=["zeros", "constant", "few that are not zero", "less than one", "some nan", "all inf"],
)
def test_edges_send_something_of_the_right_size(compressor: Compressor, bucket: Tensor, sent: int) -> None:
    n = len(bucket)
    payload = torch.empty(compressor.payload_elements((n,)), dtype=torch.uint8)
    compressor.encode(bucket, None, payload, (n,), compressor.fresh_state(n, 0, 0))
    assert int(payload[:4].view(torch.int32)) == pytest.approx(sent, abs=5 if sent > 5 else 0)


def test_samples_are_other_runs_each_step_and_of_few_values() -> None:
    (stride,) = strides((1 << 22,), 0.01)
    places = torch.arange(1 << 22).float() + 1
    first, second = sample_of(places, stride, 0), sample_of(places, stride, 1)
    assert stride % 2 == 1
    assert 25_600 <= len(first) <= 2 * 32_768
    assert not set(first.tolist()) & set(second.tolist())


def test_chance_does_not_contradict_a_fit() -> None:
    assert not is_contradicted(109, 100.0, stride=3)
    assert is_contradicted(120, 100.0, stride=3)
    assert is_contradicted(110, 100.0, stride=1)


def _after_window(controller: Controller, fitted: float, reached: float, most: int = 7) -> Controller:
    for _ in range(5):
        controller = controller.after(fitted, reached, most)
    return controller


def test_too_few_call_for_one_stage_more_and_too_many_for_one_less() -> None:
    assert _after_window(Controller(), 0.5, 1.0).stages == 3
    assert _after_window(Controller(), 1.5, 1.0).stages == 1
    assert _after_window(Controller(), 1.1, 1.0).stages == 2
    assert _after_window(Controller(stages=7.0), 0.5, 1.0).stages == 7
    assert most_stages(0.001) == 10


def test_a_change_that_made_it_worse_turns_the_direction() -> None:
    worse = _after_window(_after_window(Controller(), 0.7, 1.0), 0.5, 1.0)
    assert (worse.stages, worse.direction) == (2, -1)


def test_two_bad_windows_call_for_a_fresh_sample_and_a_fresh_start() -> None:
    once = _after_window(Controller(stages=5.0), 1.0, 0.1)
    twice = _after_window(once, 1.0, 0.1)
    assert (once.resamples, once.stages) == (0, 5)
    assert (twice.resamples, twice.stages) == (1, 2)
    assert _after_window(twice, 1.0, 1.0).resamples == 0


@WITH_KERNELS
@pytest.mark.parametrize("compressor", [Sidco(0.005), Sidco(0.005, "exponential"), Sidco(0.005, "gamma")], ids=str)
def test_the_kernel_follows_the_reference_through_windows_and_resampling(compressor: Compressor) -> None:
    segments = (200_000, 3000)
    resampling = Controller(**{**_as_dict(Controller()), "resamples": 1.0, "calls_in_window": 3.0, "stages": 3.0})
    state = torch.tensor([*_as_dict(Controller()).values(), *_as_dict(resampling).values()])
    residual = torch.zeros(203_000)
    for seed in range(12):
        gradient = distributions.draw("Pareto .45", 203_000, seed)
        expected = compressor.compress_reference(EncoderInput(gradient, residual, segments, state))
        payload = torch.empty(compressor.payload_elements(segments), dtype=torch.uint8)
        compressor.encode(gradient, residual, payload, segments, state)
        assert torch.equal(payload, expected.payload)
        assert torch.equal(residual, expected.residual)
        assert torch.equal(state, expected.state)


def _as_dict(controller: Controller) -> dict[str, float]:
    return {name: getattr(replace(controller), name) for name in Controller.__dataclass_fields__}


@WITH_KERNELS
@pytest.mark.parametrize("field", ["stages", "calls"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -7.0, 1e30])
def test_a_loaded_state_of_any_numbers_moves_no_sample_outside_the_bucket(field: str, value: float) -> None:
    """`calls` shifts the sample, and `stages` counts a loop: a damaged checkpoint crashed here, or never returned."""
    compressor, n = Sidco(0.1), 600_000
    assert strides((n,), 0.1) > (1,)
    state = torch.tensor(astuple(replace(Controller(), **{field: value})))
    bucket = distributions.draw("Laplace", n, seed=1)
    payload = torch.empty(compressor.payload_elements((n,)), dtype=torch.uint8)
    expected = compressor.compress_reference(EncoderInput(bucket, None, (n,), state.clone()))
    compressor.encode(bucket, None, payload, (n,), state)
    assert torch.equal(payload, expected.payload)
