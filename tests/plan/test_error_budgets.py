"""Error budgets, as users say them."""

import pytest
from helpers.drawn_errors import drawn_table
from helpers.workloads import COSTS, cluster, layers

from fxcomp.error_tables import ASSUMED
from fxcomp.errors import BadOption
from fxcomp.plan.budget import like, plan_error, within_budget
from fxcomp.plan.modes import Mode, error_limit
from fxcomp.search.choose import uniform

WORKLOAD, WHERE = layers(6), cluster(4, 1, "1gbit")


@pytest.mark.parametrize("text", ["topk(0.01)", "int4", "powersgd(4)", "sign", "bf16", "dense"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_uniform_setting_is_the_error_of_its_plan(text: str, seed: int | None):
    table = ASSUMED if seed is None else drawn_table(WORKLOAD.shapes, seed)
    plan = uniform(text, WORKLOAD, COSTS, WHERE)
    found = like(text).limit_of(WORKLOAD.shapes, WHERE, table)
    assert found == pytest.approx(plan_error(plan, WHERE, table), rel=1e-9)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mode_is_its_limit_until_something_is_measured(mode: Mode):
    budget = within_budget(mode.value)
    assert budget.limit_of(WORKLOAD.shapes, WHERE) == error_limit(mode)
    measured = budget.limit_of(WORKLOAD.shapes, WHERE, drawn_table(WORKLOAD.shapes, 1))
    assert (measured == 0) == (mode is Mode.LOSSLESS)
    assert measured != error_limit(mode) or mode is Mode.LOSSLESS


def test_numbers_and_spaces_are_read():
    assert within_budget(0).limit_of(WORKLOAD.shapes, WHERE) == 0.0
    assert within_budget(0.05).limit_of(WORKLOAD.shapes, WHERE) == 0.05
    assert like("int4>int4") == like(" int4 > int4 ") == within_budget(like("int4 > int4"))


@pytest.mark.parametrize(
    ("within", "words"),
    [
        (1.0, "from 0, nothing lost, to below 1"),
        (-0.1, "is not an error budget"),
        (float("nan"), "is not an error budget"),
        (float("inf"), "is not an error budget"),
        (True, "it is a bool"),
        (None, "it is a NoneType"),
        ("topk(0.01)", "there is no mode 'topk(0.01)'"),
    ],
)
def test_what_is_no_budget_is_refused_with_examples(within: object, words: str):
    with pytest.raises(BadOption, match="within") as refused:
        within_budget(within)
    assert words in str(refused.value)
    assert 'like("topk(0.01)")' in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("topk", "is no uniform setting"),
        ("int4 > int4 > int4", "one compressor, or two"),
        ("all_reduce@world", "one compressor, or two"),
        ("powersgd(4) > int4", "is no uniform setting"),
        ("", "is no uniform setting"),
        (0.05, "it is a float"),
    ],
)
def test_what_is_no_uniform_setting_is_refused_with_examples(setting: object, words: str):
    with pytest.raises(BadOption, match="like") as refused:
        like(setting)
    assert words in str(refused.value)
    assert 'like("topk(0.01)")' in str(refused.value)
