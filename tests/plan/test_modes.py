"""A mode allows certain compressors, and a limited loss."""

import math
from functools import partial

import fxcomp_more  # noqa: F401  registers its compressors
import numpy as np
import pytest
from helpers.workloads import cluster

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import parse_compressor
from fxcomp.error_tables import ErrorRow, ErrorTable
from fxcomp.error_tables.table import COLUMNS
from fxcomp.errors import BadOption
from fxcomp.plan.budget import is_bursty, plan_error, strategy_error, strategy_errors, within_budget
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.modes import ENTRIES, Content, Mode, compressors_of, error_limit, strategies
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy

FLAT, LEVELS, ALONE = cluster(4, 1, "1gbit"), cluster(2, 2, "1gbit"), cluster(1, 1, "1gbit")


def texts(mode: Mode, where: Cluster, content: Content = Content.MATRICES) -> list[str]:
    return [str(strategy) for strategy in strategies(mode, where, content)]


def test_lossless_is_dense_flat_or_by_levels():
    assert texts(Mode.LOSSLESS, FLAT) == ["all_reduce@world"]
    by_levels = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"
    assert texts(Mode.LOSSLESS, LEVELS) == ["all_reduce@world", by_levels]


def test_where_hosts_differ_their_first_ranks_stand_for_them():
    uneven = Cluster.parse("3+2", intra=LEVELS.intra, inter=LEVELS.inter)
    assert texts(Mode.LOSSLESS, uneven) == ["all_reduce@world", "reduce@intra > all_reduce@inter > broadcast@intra"]
    for mode in Mode:
        for strategy in strategies(mode, uneven):
            Plan((Bucket(("a",), (300,), strategy),)).check_fits(uneven)


def test_racks_are_gone_through_where_there_are_several():
    racks = Cluster.parse("2x2x2", intra=LEVELS.intra, inter=LEVELS.inter)
    assert texts(Mode.LOSSLESS, racks)[1:] == [
        "reduce_scatter@intra > all_reduce@inter > all_gather@intra",
        "reduce_scatter@intra > reduce_scatter@rack > all_reduce@racks > all_gather@rack > all_gather@intra",
    ]


@pytest.mark.parametrize(
    ("where", "levels"),
    [(cluster(2, 1, "1gbit"), []), (cluster(3, 1, "1gbit"), ["world"]), (LEVELS, ["world"]),
     (cluster(3, 2, "1gbit"), ["world", "inter"])],
    ids=lambda value: getattr(value, "shape", ""),
)  # fmt: skip
def test_two_shots_are_offered_from_three_ranks_on(where: Cluster, levels: list[str]):
    """Between two ranks the second shot sends what one shot sends, after one more message."""
    dealt = [
        step.level.value
        for strategy in strategies(Mode.BALANCED, where)
        for step in strategy.collectives
        if step.kind is CollectiveKind.ALL_TO_ALL
    ]
    assert list(dict.fromkeys(dealt)) == levels


def test_lossy_offers_low_rank_and_a_bucket_of_both_is_as_careful_as_its_vectors_need():
    def named(mode: Mode, content: Content) -> set[str]:
        return {c.name for strategy in strategies(mode, FLAT, content) for c in strategy.compressors}

    assert "powersgd" in named(Mode.LOSSY, Content.MATRICES)
    assert named(Mode.BALANCED, Content.MATRICES) == {"bf16", "int8", "int4"}
    assert named(Mode.BALANCED, Content.MIXED) == {"bf16", "int8"}
    assert named(Mode.BALANCED, Content.VECTORS) == {"bf16"}


def test_what_a_mode_offers_is_said_with_its_reason():
    for mode, entries in ENTRIES.items():
        offered = compressors_of(mode)
        for entry in entries:
            assert entry.reason
            assert parse_compressor(entry.first) in offered
            assert entry.second is None or parse_compressor(entry.second) in offered
    assert set(ENTRIES[Mode.BALANCED]) <= set(ENTRIES[Mode.LOSSY])


@pytest.mark.parametrize("where", [FLAT, LEVELS, ALONE])
@pytest.mark.parametrize("content", Content)
def test_aggressive_offers_gradients_what_balanced_does(where: Cluster, content: Content):
    assert strategies(Mode.AGGRESSIVE, where, content) == strategies(Mode.BALANCED, where, content)
    assert error_limit(Mode.AGGRESSIVE) == error_limit(Mode.BALANCED) < error_limit(Mode.LOSSY)
    aggressive, balanced = (within_budget(name) for name in ("aggressive", "balanced"))
    assert aggressive.strategies(where) == balanced.strategies(where), "what a measured limit is counted by"


@pytest.mark.parametrize("mode", Mode)
def test_one_rank_has_nothing_to_choose(mode: Mode):
    assert strategies(mode, ALONE) == (DENSE,)


@pytest.mark.parametrize("where", [FLAT, LEVELS])
def test_vectors_are_dense_or_bf16_unless_lossy(where):
    names = {s.compressor.name for s in strategies(Mode.BALANCED, where, Content.VECTORS) if s.compressor}
    assert names == {"bf16"}
    assert strategies(Mode.LOSSY, where, Content.VECTORS) == strategies(Mode.LOSSY, where)


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

    assert all(bursty("topk(0.01)", "sidco(0.01)"))
    assert not any(bursty("bf16", "int8", "int4", "int2", "sign", "powersgd(4)"))
    assert not any(bursty("int2(stochastic=true)"))  # its error is large, but nothing waits


def test_the_errors_of_two_shots_add_up():
    int4, int8, topk = map(parse_compressor, ("int4", "int8", "topk(0.01)"))
    one, two = (strategy_error(Strategy.flat(each), FLAT) for each in (int4, int8))
    assert strategy_error(Strategy.two_shots(int4, int8), FLAT) == pytest.approx((1 + one) * (1 + two) - 1)
    kept = 1 - strategy_error(Strategy.flat(topk), FLAT)
    assert strategy_error(Strategy.two_shots(topk, topk), FLAT) == pytest.approx(1 - kept * kept)
    assert strategy_error(Strategy.two_shots(topk, int4), FLAT) == pytest.approx(1 - kept * (1 - one))


def test_a_compression_that_loses_more_than_all_makes_no_gain_of_the_next_one():
    sign, int4 = parse_compressor("sign"), parse_compressor("int4")
    for error in (1.0, 1.5, 1e3):
        one = strategy_error(Strategy.flat(sign), FLAT, lambda *_, error=error: error)
        two = strategy_error(Strategy.two_shots(sign, int4), FLAT, lambda *_, error=error: error)
        many = strategy_errors(Strategy.two_shots(sign, int4), FLAT, lambda *_, error=error: np.array([error, 0.5]))
        assert one == error
        assert two >= one
        assert many[0] == two


def test_a_plan_loses_the_mean_of_its_elements():
    sign = Strategy.flat(parse_compressor("sign"))
    plan = Plan((Bucket(("a",), (300,), DENSE), Bucket(("b",), (100,), sign)))
    assert plan_error(plan, FLAT) == pytest.approx((1 - 2 / math.pi) / 4, rel=0.01)
    assert plan_error(Plan(()), FLAT) == 0.0


@pytest.mark.parametrize("shape", ["2x3x1", "2x2x1", "2x2x2"])
def test_every_strategy_fits_racks_of_any_hosts(shape: str):
    racks = Cluster.parse(shape, intra=LEVELS.intra, inter=LEVELS.inter)
    for mode in Mode:
        offered = strategies(mode, racks)
        assert any("racks" in str(strategy) for strategy in offered)
        for strategy in offered:
            Plan((Bucket(("a",), (300,), strategy),)).check_fits(racks)


INT4, TOPK = parse_compressor("int4"), parse_compressor("topk(0.01)")


def measured(elements: int, squares: float, topk: float, int4: float) -> ErrorRow:
    """A row with errors of these two; nothing reads the others."""
    errors = {TOPK: topk, INT4: int4}
    return ErrorRow((elements,), squares, tuple(errors.get(each, 1.0) for each in COLUMNS), 1)


MEASURED = ErrorTable({"large": measured(1000, 9.0, 0.5, 0.02), "small": measured(3000, 1.0, 0.9, 0.2)})


def test_a_measured_strategy_composes_its_shots_as_an_assumed_one_does():
    error_of = partial(MEASURED.error_of, "large")
    assert strategy_error(Strategy.flat(INT4), FLAT, error_of) == pytest.approx(0.02)
    assert strategy_error(Strategy.two_shots(INT4, INT4), FLAT, error_of) == pytest.approx(1.02**2 - 1)
    assert strategy_error(Strategy.two_shots(TOPK, INT4), FLAT, error_of) == pytest.approx(1 - 0.5 * (1 - 0.02))
    assert strategy_error(DENSE, FLAT, error_of) == 0.0


def test_a_measured_plan_weighs_gradients_by_their_squares():
    flat = Strategy.flat(INT4)
    plan = Plan((Bucket(("large", "small"), (1000, 3000), flat),))
    assert plan_error(plan, FLAT, MEASURED) == pytest.approx((9 * 0.02 + 1 * 0.2) / 10)
    assert plan_error(plan, FLAT) == strategy_error(flat, FLAT)


def test_parts_of_a_gradient_share_its_squares_by_their_elements():
    parts = [Bucket(("large",), (400,), DENSE), Bucket(("large", "small"), (600, 3000), Strategy.flat(INT4), (400, 0))]
    assert plan_error(Plan(tuple(parts)), FLAT, MEASURED) == pytest.approx((9 * 0.6 * 0.02 + 1 * 0.2) / 10)


def test_a_gradient_that_the_table_lacks_weighs_as_its_elements_do_elsewhere():
    plan = Plan((Bucket(("large", "small"), (1000, 3000), DENSE), Bucket(("other",), (4000,), Strategy.flat(INT4))))
    assert plan_error(plan, FLAT, MEASURED) == pytest.approx(strategy_error(Strategy.flat(INT4), FLAT) / 2)
