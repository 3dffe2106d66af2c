"""What a mode allows, and how much it may lose."""

import random

import pytest
from workloads import cluster

from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadOption
from fxcomp.search.budget import compressor_error, error_limit, plan_error, strategy_error
from fxcomp.search.space import Mode, strategies
from fxcomp.strategy import DENSE, Bucket, Plan, Strategy

FLAT, LEVELS, ALONE = cluster(4, 1, "1gbit"), cluster(2, 2, "1gbit"), cluster(1, 1, "1gbit")


def texts(mode: Mode, where, is_vector: bool = False) -> list[str]:
    return [str(strategy) for strategy in strategies(mode, where, is_vector)]


def test_lossless_is_dense_flat_or_by_levels():
    assert texts(Mode.LOSSLESS, FLAT) == ["all_reduce@world"]
    by_levels = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"
    assert texts(Mode.LOSSLESS, LEVELS) == ["all_reduce@world", by_levels]


@pytest.mark.parametrize("mode", Mode)
def test_one_rank_has_nothing_to_choose(mode: Mode):
    assert strategies(mode, ALONE, False) == (DENSE,)


@pytest.mark.parametrize("where", [FLAT, LEVELS])
def test_vectors_are_dense_or_bf16_unless_aggressive(where):
    names = {s.compressor.name for s in strategies(Mode.BALANCED, where, True) if s.compressor}
    assert names == {"bf16"}
    assert strategies(Mode.AGGRESSIVE, where, True) == strategies(Mode.AGGRESSIVE, where, False)


@pytest.mark.parametrize("where", [FLAT, LEVELS])
@pytest.mark.parametrize("mode", Mode)
def test_dense_comes_first_and_every_strategy_parses_back(mode: Mode, where):
    options = strategies(mode, where, False)
    assert options[0] == DENSE
    assert len(set(options)) == len(options)
    assert [Strategy.parse(str(option)) for option in options] == list(options)


def test_a_mode_is_read_by_its_name():
    assert [Mode.parse(mode.value) for mode in Mode] == list(Mode)
    with pytest.raises(
        BadOption, match=r"there is no mode 'balnced'; did you mean 'balanced'\? The modes are lossless,"
    ):
        Mode.parse("balnced")


def test_errors_follow_the_table_and_the_gaussian():
    texts = ("bf16", "int8", "int4", "sign", "topk(0.01)", "topk(0.001)")
    errors = [compressor_error(parse_compressor(text)) for text in texts]
    assert errors == sorted(errors)
    assert errors[4] == pytest.approx(0.9155, abs=1e-3)  # the measured 0.92 and 0.99
    assert errors[5] == pytest.approx(0.987, abs=2e-3)
    assert compressor_error(parse_compressor("topk(1.0)")) == 0.0


@pytest.mark.parametrize("mode", Mode)
def test_every_strategy_of_a_mode_is_within_its_limit(mode: Mode):
    assert all(strategy_error(strategy) <= error_limit(mode) for strategy in strategies(mode, LEVELS, False))


def test_a_plan_loses_the_mean_of_its_elements():
    sign = Strategy.flat(parse_compressor("sign"))
    plan = Plan((Bucket(("a",), (300,), DENSE), Bucket(("b",), (100,), sign)))
    assert plan_error(plan) == pytest.approx(0.36 / 4)
    assert plan_error(Plan(())) == 0.0


def test_a_topk_of_gaussian_values_loses_what_the_formula_says():
    chance = random.Random(0)
    squares = sorted(chance.gauss(0, 1) ** 2 for _ in range(20_000))
    kept = sum(squares[-2000:]) / sum(squares)
    assert compressor_error(parse_compressor("topk(0.1)")) == pytest.approx(1 - kept, abs=0.02)
