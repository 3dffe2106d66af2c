"""Fits of time against size: what made the samples is found again, nothing ever falls, one bad size bends little."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from fxcomp.cost.fit import fit
from fxcomp.cost.piecewise import Fit, Piece, Sample

SIZES = [2.0**k for k in range(10, 27)]


def line(size: float) -> float:
    return 30.0 + 0.002 * size


def bent(size: float) -> float:
    """A cache of 2^18 elements: three times slower beyond."""
    return 5.0 + 0.001 * min(size, 2**18) + 0.003 * max(0.0, size - 2**18)


def burst(size: float) -> float:
    """A shaped link: the first 64 KiB pass at once."""
    return 20.0 + min(size, 2**16) / 10_000 + max(0.0, size - 2**16) / 12.5


def switched(size: float) -> float:
    """Another algorithm from 100,000 on: a higher start, and a smaller slope."""
    return 40.0 + 0.01 * size if size < 100_000 else 3_000.0 + 0.002 * size


def sampled(law: Callable[[float], float], noise: float = 0.02, repeats: int = 3, seed: int = 0) -> list[Sample]:
    draws = random.Random(seed)
    return [(n, law(n) * (1 + noise * draws.gauss(0, 1))) for n in SIZES for _ in range(repeats)]


@pytest.mark.parametrize("law", [line, bent, burst, switched])
def test_a_law_is_found_again_between_and_beyond_the_sizes_that_were_measured(law: Callable[[float], float]):
    found = fit(sampled(law))
    between = [math.sqrt(a * b) for a, b in pairwise(SIZES) if not a < 100_000 < b]
    for size in [*between, 2.0**28]:
        assert found.at(size) == pytest.approx(law(size), rel=0.1), size
    assert found.residual < 0.03


def test_a_line_is_one_piece_with_an_interval_around_what_made_it():
    found = fit(sampled(line))
    (piece,) = found.pieces
    assert abs(piece.at_zero_us - 30.0) <= piece.at_zero_error < 3.0
    assert abs(piece.us_per_unit - 0.002) <= piece.us_per_unit_error < 0.0001
    assert found.samples == 3 * len(SIZES)
    assert (found.smallest, found.largest) == (SIZES[0], SIZES[-1])


def test_intervals_hold_what_they_are_meant_to_hold():
    held = 0
    for seed in range(200):
        (piece, *_) = fit(sampled(line, noise=0.05, repeats=1, seed=seed), most_pieces=1).pieces
        held += abs(piece.us_per_unit - 0.002) <= piece.us_per_unit_error
    assert 0.88 <= held / 200 <= 0.99  # 95 % of Gaussian errors; robust weights shorten the intervals a little


def test_more_noise_makes_wider_intervals():
    narrow, wide = (fit(sampled(line, noise=noise), most_pieces=1).pieces[0] for noise in (0.01, 0.1))
    assert wide.us_per_unit_error > 3 * narrow.us_per_unit_error


def test_a_switch_of_algorithm_is_a_piece_that_starts_higher_and_a_cache_is_not():
    (at,) = [piece.start for piece in fit(sampled(switched)).pieces if piece.is_switch]
    assert 2**16 <= at <= 2**17
    assert not any(piece.is_switch for piece in fit(sampled(bent)).pieces)
    assert fit(sampled(bent)).pieces[-1].start == pytest.approx(2**18, rel=0.5)


def test_two_pieces_are_not_made_of_noise():
    assert [len(fit(sampled(line, noise=0.05, repeats=1, seed=seed)).pieces) for seed in range(20)].count(1) >= 15


def test_one_bad_sample_of_a_size_changes_nothing_and_a_bad_size_little():
    clean = sampled(line, noise=0.0)
    assert fit([*clean, (SIZES[5], 1e6)]).pieces == fit(clean).pieces
    slow = [(n, 3 * us if n == SIZES[8] else us) for n, us in clean]
    for size in SIZES:
        assert fit(slow).at(size) == pytest.approx(line(size), rel=0.1)


def test_a_fit_never_falls_whatever_the_samples():
    for seed in range(100):
        draws = random.Random(seed)
        sizes = sorted(draws.sample(range(1, 10**6), draws.randint(1, 12)))
        found = fit([(n, draws.uniform(0.1, 1000.0)) for n in sizes])
        times = [found.at(n) for n in sorted([0, *sizes, *range(0, 2 * 10**6, 9973), *found_starts(found)])]
        assert all(later >= earlier - 1e-9 * abs(later) for earlier, later in pairwise(times)), seed
        assert times[0] >= 0


def found_starts(found: Fit) -> list[float]:
    return [start + off for start in (piece.start for piece in found.pieces) for off in (-1e-3, 0.0, 1e-3) if start]


def test_falling_times_are_fitted_by_what_is_flat():
    found = fit([(1000, 3000.0), (4000, 2000.0), (16000, 1000.0)])
    assert found.pieces[0].us_per_unit == 0.0
    assert 1000 <= found.at(10**9) <= 3000


def test_one_size_makes_time_grow_in_proportion():
    found = fit([(1000, 50.0), (1000, 52.0), (1000, 90.0)])
    assert found.at(2000) == pytest.approx(104.0)
    assert found.at(0) == 0.0
    assert found.pieces[0].us_per_unit_error == math.inf
    assert fit([(0, 7.0)]).at(100) == 7.0


def test_beyond_what_was_measured_the_steeper_of_line_and_chord_goes_on():
    flat_end = Fit((Piece(0.0, 0.0, 1.0), Piece(100.0, 100.0, 0.0)), 10.0, 1010.0, 9)
    assert flat_end.at(1010) == 100.0
    assert flat_end.at(2010) == pytest.approx(100.0 + 1000 * 90 / 1000)
    steep_end = Fit((Piece(0.0, 10.0, 0.0), Piece(100.0, -90.0, 1.0)), 10.0, 200.0, 9)
    assert steep_end.at(300) == pytest.approx(210.0)


def test_the_order_of_samples_does_not_matter():
    samples = sampled(switched)
    shuffled = samples[:]
    random.Random(1).shuffle(shuffled)
    assert fit(shuffled) == fit(samples)


def test_noise_is_how_far_samples_of_a_size_lie_apart():
    assert fit(sampled(line, noise=0.0)).noise == 0.0
    assert 0.01 < fit(sampled(line, noise=0.05, repeats=9)).noise < 0.1
