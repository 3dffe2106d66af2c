"""A compressor's loss of Gaussian values is the formula's where one is known, and the same everywhere."""

import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch

from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.compressors.examples import examples
from fxcomp.compressors.gaussian_error import SHAPE, gaussian_error
from fxcomp.testing.rounds import average, replicas_of
from fxcomp.testing.samples import gaussian


def largest(ratio: float) -> float:
    """Return the rest of a Gaussian without its largest |g|: 1 - (δ + 2 t φ(t)), with P(|g| > t) = δ."""
    normal = NormalDist()
    threshold = -normal.inv_cdf(ratio / 2)
    return 1 - (ratio + 2 * threshold * normal.pdf(threshold))


ANALYTIC = {
    "sign": 1 - 2 / math.pi,
    **{f"topk({ratio})": largest(ratio) for ratio in (0.5, 0.1, 0.01, 0.001)},
    **{f"sidco({ratio})": largest(ratio) for ratio in (0.1, 0.01)},
    "randomk(0.1)": 0.9,
}


@pytest.mark.parametrize("text", ANALYTIC)
def test_errors_are_those_of_the_formulas(text: str) -> None:
    assert gaussian_error(parse_compressor(text)) == pytest.approx(ANALYTIC[text], abs=0.006)


@pytest.mark.parametrize(("text", "factor"), [("randomk(0.01, scaled=true)", 99.0)])
def test_an_unbiased_error_may_exceed_what_it_is_given(text: str, factor: float) -> None:
    assert gaussian_error(parse_compressor(text)) == pytest.approx(factor, rel=0.1)


def test_what_keeps_everything_loses_nothing() -> None:
    assert gaussian_error(parse_compressor("topk(1.0)")) == 0.0


@pytest.mark.parametrize(("ranks", "levels"), [(1, 127), (4, 31), (16, 7)])
def test_fewer_levels_among_more_ranks_lose_more(ranks: int, levels: int) -> None:
    assert gaussian_error(parse_compressor("shared_int8"), ranks) == pytest.approx(1.8 / levels**2, rel=0.1)


@pytest.mark.parametrize("rank", [4, 16])
def test_low_rank_loses_of_a_matrix_with_singular_values_one_over_k_what_is_behind_its_rank(rank: int) -> None:
    squares = [1 / k**2 for k in range(1, min(SHAPE) + 1)]
    best = sum(squares[rank:]) / sum(squares)
    error = gaussian_error(parse_compressor(f"powersgd({rank})"))
    assert best * (1 - 1e-5) <= error <= 1.15 * best


OF_ANY_VALUES = [c for c in examples() if not c.facts.needs_whole_parameters and not c.facts.is_exact]


def test_exact_compressors_lose_nothing() -> None:
    assert {gaussian_error(compressor) for compressor in examples() if compressor.facts.is_exact} == {0.0}


@pytest.mark.parametrize("compressor", OF_ANY_VALUES, ids=str)
def test_every_compressor_loses_of_these_values_what_it_loses_of_drawn_ones(compressor: Compressor) -> None:
    values, segments = gaussian(math.prod(SHAPE), seed=3), (math.prod(SHAPE),)
    replicas = replicas_of(compressor.bound_to([SHAPE], 1), segments, feedback=False)
    lost = values - average(compressor, [values], replicas, segments, [SHAPE])
    drawn = (lost.square().sum() / values.square().sum()).item()
    assert gaussian_error(compressor) == pytest.approx(drawn, rel=0.1, abs=1e-9)


def errors() -> list[tuple[str, str]]:
    return [(str(c), gaussian_error(c, ranks).hex()) for c in examples() for ranks in (1, 3)]


PRINT_ALL = """
import sys, torch
torch.set_num_threads(2)
sys.path[:0] = sys.argv[1:]
from test_gaussian_error import errors
print(errors())
"""


@pytest.mark.slow
def test_every_processor_and_any_number_of_threads_finds_the_same_bits() -> None:
    """With and without vector instructions."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", PRINT_ALL, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{errors()}\n"


def test_the_measurement_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    gaussian_error(parse_compressor("int8(block=96)"))
    assert torch.equal(before, torch.get_rng_state())
