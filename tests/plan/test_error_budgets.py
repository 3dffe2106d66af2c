"""How much a plan may lose, as users say it."""

import pytest
from helpers.drawn_errors import drawn_table
from helpers.workloads import COSTS, cluster, layers

from fxcomp.error_tables import ASSUMED
from fxcomp.errors import BadOption
from fxcomp.plan.budget import ErrorBudget
from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.modes import Mode, error_limit
from fxcomp.search.choose import uniform

WORKLOAD, WHERE = layers(6), cluster(4, 1, "1gbit")


@pytest.mark.parametrize("text", ["topk(0.01)", "int4", "powersgd(4)", "sign", "bf16", "dense"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_uniform_setting_is_the_error_of_its_plan(text: str, seed: int | None):
    table = ASSUMED if seed is None else drawn_table(WORKLOAD.shapes, seed)
    plan = uniform(text, WORKLOAD, COSTS, WHERE)
    found = ErrorBudget.parse(text).limit_of(WORKLOAD.shapes, WHERE, table)
    assert found == pytest.approx(plan_error(plan, WHERE, table), rel=1e-9)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mode_is_its_limit_until_something_is_measured(mode: Mode):
    budget = ErrorBudget.parse(mode.value)
    assert budget.limit_of(WORKLOAD.shapes, WHERE) == error_limit(mode)
    measured = budget.limit_of(WORKLOAD.shapes, WHERE, drawn_table(WORKLOAD.shapes, 1))
    assert (measured == 0) == (mode is Mode.LOSSLESS)
    assert measured != error_limit(mode) or mode is Mode.LOSSLESS


def test_numbers_and_spaces_are_read():
    assert ErrorBudget.parse("0.05") == ErrorBudget.parse(0.05) == ErrorBudget.parse(" 5e-2 ")
    assert ErrorBudget.parse(0).limit_of(WORKLOAD.shapes, WHERE) == 0.0
    assert ErrorBudget.parse("int4>int4") == ErrorBudget.parse("int4 > int4")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (1.0, "from 0, nothing lost, to below 1"),
        (-0.1, "is no error that a plan may have"),
        (float("nan"), "is no error that a plan may have"),
        ("inf", "is no error that a plan may have"),
        (True, "it is a bool"),
        (None, "it is a NoneType"),
        ("topk", "neither a number, a mode nor a uniform setting"),
        ("int4 > int4 > int4", "one compressor, or two"),
        ("all_reduce@world", "one compressor, or two"),
        ("powersgd(4) > int4", "neither a number, a mode nor a uniform setting"),
        ("", "neither a number, a mode nor a uniform setting"),
    ],
)
def test_what_is_no_budget_is_refused_with_examples(asked: object, words: str):
    with pytest.raises(BadOption, match="error_budget") as refused:
        ErrorBudget.parse(asked)
    assert words in str(refused.value)
    assert '"topk(0.01)"' in str(refused.value)
