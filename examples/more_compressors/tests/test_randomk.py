"""Which places randomk draws, and what its mean is."""

import pytest
import torch
from fxcomp_more import RandomK
from fxcomp_more.randomk import draw_places
from torch import Tensor

from fxcomp.compressors import Bias, Feedback, randomness
from fxcomp.testing.result_checks import relative_error
from fxcomp.testing.rounds import average, replicas_of
from fxcomp.testing.samples import gaussian

SIZES = [
    (1, 1),
    (2, 1),
    (7, 7),
    (16, 16),
    (17, 16),
    (18, 17),
    (33, 31),
    (100, 1),
    (1000, 17),
    (5000, 4999),
    (70_001, 701),
]


def _draw(n: int, k: int, step: int, key: object = "key") -> Tensor:
    state = torch.tensor([randomness.key_of(key), step], dtype=torch.int64)
    return draw_places(randomness.stream_of(state, 0), n, k)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_k_different_places_are_drawn(n: int, k: int) -> None:
    for step in range(20):
        places = _draw(n, k, step)
        assert len(places.unique()) == len(places) == k
        assert places.min() >= 0
        assert places.max() < n


@pytest.mark.parametrize(("n", "k"), [(50, 1), (50, 20), (60, 33), (57, 56)])
def test_every_place_is_as_likely_as_any_other(n: int, k: int) -> None:
    """A right drawing fails with probability below 1e-6: n binomial counts, each beyond 5.7 deviations in 1.2e-8."""
    draws = 1500
    seen = torch.stack([torch.bincount(_draw(n, k, step), minlength=n) for step in range(draws)]).sum(dim=0)
    share = k / n
    deviation = (draws * share * (1 - share)) ** 0.5
    assert ((seen - draws * share) / deviation).abs().max() < 5.7


def test_places_come_in_runs_of_sixteen() -> None:
    places = _draw(100_000, 1600, 3)
    runs = places.view(100, 16)
    is_whole = runs[:, -1] - runs[:, 0] == 15
    assert is_whole.sum() >= 99  # one may lie across the end of the segment


def test_ranks_draw_alike_and_steps_and_parameters_do_not() -> None:
    compressor = RandomK(0.01)
    assert torch.equal(compressor.fresh_state(1000, 5, rank=0), compressor.fresh_state(1000, 5, rank=3))
    assert not torch.equal(_draw(10_000, 100, 0), _draw(10_000, 100, 1))
    assert not torch.equal(_draw(10_000, 100, 0), _draw(10_000, 100, 0, "other"))


def test_the_mean_over_ranks_is_exact_at_the_places_drawn() -> None:
    compressor, segments = RandomK(0.1), (5000, 70)
    gradients = [gaussian(5070, seed) for seed in range(3)]
    replicas = replicas_of(compressor, segments, 3, feedback=False)
    mean = average(compressor, gradients, replicas, segments)
    is_sent = mean != 0
    assert is_sent.sum() == 500 + 7
    torch.testing.assert_close(mean[is_sent], torch.stack(gradients).mean(dim=0)[is_sent])


def test_unscaled_it_needs_feedback_and_scaled_it_must_not_have_it() -> None:
    assert (RandomK(0.1).bias, RandomK(0.1).feedback) == (Bias.BIASED, Feedback.REQUIRED)
    assert (RandomK(0.1, scaled=True).bias, RandomK(0.1, scaled=True).feedback) == (Bias.UNBIASED, Feedback.FORBIDDEN)
    assert str(RandomK(0.1, scaled=True)) == "randomk(0.1, scaled=true)"


@pytest.mark.parametrize("ratio", [0.5, 0.1])
def test_on_average_it_loses_one_minus_the_ratio_or_its_inverse_minus_one(ratio: float) -> None:
    values = gaussian(20_000)
    assert relative_error(RandomK(ratio), values, draws=40) == pytest.approx(1 - ratio, rel=0.03)
    assert relative_error(RandomK(ratio, scaled=True), values, draws=40) == pytest.approx(1 / ratio - 1, rel=0.1)


def test_under_feedback_where_it_is_forbidden_the_residual_is_still_what_was_left_out() -> None:
    compressor, bucket = RandomK(0.25, scaled=True), gaussian(1000)
    replicas = replicas_of(compressor, (1000,), feedback=True)
    decoded = average(compressor, [bucket], replicas, (1000,))
    assert replicas[0].residual is not None
    torch.testing.assert_close(decoded + replicas[0].residual, bucket)
