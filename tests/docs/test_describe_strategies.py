"""docs/strategies.md is made by the grammar and the meaning of strategies."""

from pathlib import Path

import pytest
from describe_strategies import BROKEN, STEPS, describe
from draw_strategies import cluster_of, picture, traffic_of
from strategy_shapes import CHAPTERS

from fxcomp.plan.interpret import Collective
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import DENSE, Strategy

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
SHAPES = [Strategy.parse(shape.strategy) for chapter in CHAPTERS for shape in chapter.shapes]


def test_the_page_is_made_from_the_grammar(request: pytest.FixtureRequest) -> None:
    text = describe()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run pytest --update-golden, and read what it writes"


def test_every_collective_of_strategies_is_explained_and_drawn() -> None:
    kinds = {kind.value for kind in CollectiveKind if kind is not CollectiveKind.POINT_TO_POINT}
    assert {step.removesuffix("@world") for step in STEPS if step.endswith("@world")} == kinds
    assert {step.kind.value for shape in SHAPES for step in shape.steps if isinstance(step, Collective)} == kinds


def test_a_rule_is_broken_once() -> None:
    assert len(set(BROKEN)) == len(BROKEN)
    assert len(set(SHAPES)) == len(SHAPES)


def test_a_ring_sends_nearly_twice_the_bucket() -> None:
    assert traffic_of(DENSE, cluster_of("4x1")) == [(1.5, 1.5)]
    assert traffic_of(DENSE, cluster_of("1x4")) == [(1.5, 0.0)]


def test_two_shots_send_two_thirds_of_a_payload_each_on_three_ranks() -> None:
    strategy = Strategy.parse(
        "compress(bf16) > all_to_all@world > decompress > compress(bf16) > all_gather@world > decompress"
    )
    for rank, uplink in traffic_of(strategy, cluster_of("3x1")):
        assert rank == uplink == pytest.approx(2 / 3 / 2, rel=1e-3)


def test_by_level_the_uplink_carries_the_bucket_once() -> None:
    (_, (_, between), _) = traffic_of(Strategy.hierarchical(None), cluster_of("2x2"))
    assert between == 1.0


def test_a_picture_names_whose_gradients_each_rank_holds() -> None:
    drawn = picture(Strategy.hierarchical(None), cluster_of("2x2")).splitlines()
    row = next(line for line in drawn if line.startswith("reduce_scatter@intra  "))
    assert row.split()[1:-2] == ["ab", "██··", "ab", "··██", "cd", "██··", "cd", "··██"]
