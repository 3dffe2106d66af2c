"""docs/how_fxcomp_decides.md is made by the code that decides."""

from pathlib import Path

import pytest
from decision_example import CLUSTER, COSTS, MODE, WORKLOAD
from describe_decisions import UNIFORM, describe, timeline_of
from describe_race import right_costs, run_race, step_ms

from fxcomp.plan.budget import plan_error
from fxcomp.plan.modes import error_limit
from fxcomp.search.choose import choose, predict_us, uniform

PAGE = Path(__file__).parents[2] / "docs" / "how_fxcomp_decides.md"


def test_the_page_is_made_by_the_decision(request: pytest.FixtureRequest) -> None:
    text = describe()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run pytest --update-golden, and read what it writes"


def test_the_example_shows_a_choice_between_dense_and_four_bits_that_beats_every_uniform_plan() -> None:
    choice = choose(WORKLOAD, COSTS, CLUSTER, MODE)
    assert choice.plan == choice.fastest
    compressors = {str(bucket.strategy.compressor) for bucket in choice.plan.buckets}
    assert len(compressors) > 1
    for name in ("dense", *UNIFORM):
        assert choice.step_us < predict_us(WORKLOAD, uniform(name, WORKLOAD, COSTS, CLUSTER), COSTS, CLUSTER)
    assert plan_error(choice.plan, CLUSTER) < error_limit(MODE)
    assert timeline_of(choice.plan).exposed_us < timeline_of(choice.dense).exposed_us


def test_the_race_ends_on_the_plan_that_is_fastest_by_the_right_costs() -> None:
    choice = choose(WORKLOAD, COSTS, CLUSTER, MODE)
    turns, raced = run_race(choice)
    fastest = min(choice.runners, key=lambda runner: step_ms(runner, right_costs()))
    assert raced.stays.plan == fastest.plan != choice.plan
    assert turns[0].runner.plan == choice.plan
