"""What a mode allows, and how much it may lose."""

import math

import pytest
from workloads import cluster

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadOption
from fxcomp.plan.error_budget import is_bursty, plan_error, strategy_error
from fxcomp.plan.modes import Content, Mode, error_limit, strategies
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy

FLAT, LEVELS, ALONE = cluster(4, 1, "1gbit"), cluster(2, 2, "1gbit"), cluster(1, 1, "1gbit")


def texts(mode: Mode, where: Cluster, content: Content = Content.MATRICES) -> list[str]:
    return [str(strategy) for strategy in strategies(mode, where, content)]


def test_lossless_is_dense_flat_or_by_levels():
    assert texts(Mode.LOSSLESS, FLAT) == ["all_reduce@world"]
    by_levels = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"
    assert texts(Mode.LOSSLESS, LEVELS) == ["all_reduce@world", by_levels]


def test_hosts_with_unequal_numbers_of_ranks_share_no_work():
    uneven = Cluster.parse("3+2", intra=LEVELS.intra, inter=LEVELS.inter)
    assert not any(strategy.is_hierarchical for mode in Mode for strategy in strategies(mode, uneven))
    assert len(strategies(Mode.AGGRESSIVE, uneven)) > 1


@pytest.mark.parametrize("mode", Mode)
def test_one_rank_has_nothing_to_choose(mode: Mode):
    assert strategies(mode, ALONE) == (DENSE,)


@pytest.mark.parametrize("where", [FLAT, LEVELS])
def test_vectors_are_dense_or_bf16_unless_aggressive(where):
    names = {s.compressor.name for s in strategies(Mode.BALANCED, where, Content.VECTORS) if s.compressor}
    assert names == {"bf16"}
    assert strategies(Mode.AGGRESSIVE, where, Content.VECTORS) == strategies(Mode.AGGRESSIVE, where)


@pytest.mark.parametrize("where", [FLAT, LEVELS])
@pytest.mark.parametrize("mode", Mode)
def test_dense_comes_first_and_every_strategy_parses_back(mode: Mode, where):
    options = strategies(mode, where)
    assert options[0] == DENSE
    assert len(set(options)) == len(options)
    assert [Strategy.parse(str(option)) for option in options] == list(options)


def test_a_mode_is_read_by_its_name():
    assert [Mode.parse(mode.value) for mode in Mode] == list(Mode)
    with pytest.raises(
        BadOption, match=r"there is no mode 'balnced'; did you mean 'balanced'\? The modes are lossless,"
    ):
        Mode.parse("balnced")


@pytest.mark.parametrize("where", [FLAT, LEVELS])
@pytest.mark.parametrize("mode", Mode)
def test_every_strategy_of_a_mode_is_within_its_limit(mode: Mode, where: Cluster):
    assert all(strategy_error(strategy, where) <= error_limit(mode) for strategy in strategies(mode, where))
    assert strategy_error(DENSE, where) == 0.0


def test_an_error_is_that_of_the_ranks_whose_payloads_meet():
    shared = parse_compressor("shared_int8")
    flat, by_level = (strategy_error(make(shared), LEVELS) for make in (Strategy.flat, Strategy.hierarchical))
    assert flat == pytest.approx(4 * by_level, rel=0.1)  # half the levels


def test_bursts_are_what_waits_long_for_its_turn():
    def bursty(*texts: str) -> list[bool]:
        return [is_bursty(Strategy.flat(parse_compressor(text)), FLAT) for text in texts]

    assert all(bursty("topk(0.01)", "sidco(0.01)", "powersgd(4)", "randomk(0.01)"))
    assert not any(bursty("bf16", "int8", "int4", "int2", "sign", "shared_int8"))
    assert not any(bursty("randomk(0.01, scaled=true)"))  # its error is larger than all, but nothing waits


def test_a_plan_loses_the_mean_of_its_elements():
    sign = Strategy.flat(parse_compressor("sign"))
    plan = Plan((Bucket(("a",), (300,), DENSE), Bucket(("b",), (100,), sign)))
    assert plan_error(plan, FLAT) == pytest.approx((1 - 2 / math.pi) / 4, rel=0.01)
    assert plan_error(Plan(()), FLAT) == 0.0
