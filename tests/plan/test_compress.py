"""Values of `compress=`, and those that cannot go together."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxcomp.compressors import Sign
from fxcomp.errors import BadOption, BadPlan, FxcompError
from fxcomp.plan.budget import ErrorBudget, like
from fxcomp.plan.compress import Compress, Warmup
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import Strategy

STRATEGY = "compress(int4)@gpu > all_gather@world > decompress@gpu"


@pytest.mark.parametrize("mode", list(Mode))
def test_the_name_of_a_mode_is_a_mode(mode: Mode):
    compress = Compress.of(mode.value)
    assert (compress.mode, compress.plan, compress.budget) == (mode, None, None)


@pytest.mark.parametrize("given", ["int8", "dense", "topk(0.01)", STRATEGY, "plan.json", Path("plan"), Plan(())])
def test_anything_else_names_a_plan(given: Any):
    assert Compress.of(given) == Compress(plan=given)


def test_a_compress_is_itself():
    compress = Compress(within=0.05, measured=True, warmup=Warmup(dense_steps=3))
    assert Compress.of(compress) is compress


@pytest.mark.parametrize(
    ("within", "measured", "budget"),
    [
        ("balanced", False, None),
        ("balanced", True, ErrorBudget("balanced")),
        (0.05, False, ErrorBudget("0.05")),
        (like("topk(0.01)"), True, ErrorBudget("topk(0.01)")),
    ],
)
def test_a_budget_bounds_a_choice_where_the_mode_itself_does_not(within: Any, measured: bool, budget: Any):
    assert Compress(within=within, measured=measured).budget == budget


@pytest.mark.parametrize(
    ("text", "compress"),
    [
        ("aggressive", Compress(within="aggressive")),
        (" 5e-2", Compress(within=0.05)),
        ("like(topk(0.01))", Compress(within=like("topk(0.01)"))),
        ("like(int4 > int4)", Compress(within=like("int4 > int4"))),
        ("int8", Compress(plan="int8")),
        ("some/plan.json", Compress(plan="some/plan.json")),
    ],
)
def test_a_command_line_says_it_in_one_text(text: str, compress: Compress):
    assert Compress.parse(text) == compress
    if compress.budget is not None:
        assert Compress.parse(str(compress.budget)) == compress


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("brave", "'brave' is neither the path of a saved plan nor a compressor: .*The modes are lossless, balanced"),
        ("Balanced", "The modes are lossless, balanced, aggressive, lossy"),
        (0.05, re.escape("write compress=fxcomp.Compress(within=0.05)")),
        (like("int4"), re.escape('write compress=fxcomp.Compress(within=fxcomp.like("int4"))')),
        (None, "compress= takes a mode .* it is a NoneType"),
        ({"plan": "int8"}, "it is a dict"),
    ],
)
def test_what_says_nothing_is_refused_with_what_does(given: Any, what: str):
    with pytest.raises(FxcompError, match=f"(?s){what}"):
        Compress.of(given)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"plan": "int8", "within": "aggressive"}, "within='aggressive' sets the allowed error: keep one"),
        ({"plan": "int8", "within": 0.05}, "within=0.05 sets the allowed error: keep one"),
        ({"plan": "int8", "measured": True}, "measured=True lets fxcomp choose"),
        ({"plan": "int8", "pins": {"*": "dense"}}, "pins= of some: keep one"),
        ({"measured": 1}, "measured is True or False; it is 1"),
        ({"at": "momentum"}, "takes a plan that is given"),
        ({"at": "update", "plan": "int8"}, "'gradient' or 'momentum' or 'auto'; it is 'update'"),
        (
            {"at": "momentum", "plan": "int8", "feedback": ErrorFeedback(scale_with_lr=True)},
            r"does not go with ErrorFeedback\(scale_with_lr=",
        ),
        ({"steps": 0}, "number of steps of the whole job, 1 or more; it is 0"),
        ({"steps": "10"}, "it is '10'"),
        ({"warmup": 100}, r"warmup is a fxcomp.Warmup; it is a int: write Warmup\(dense_steps=100\)"),
        ({"feedback": {"off": True}}, "feedback is an ErrorFeedback, not a dict"),
        ({"feedback": ErrorFeedback(off=True)}, "for experiments with a given plan"),
    ],
)
def test_what_cannot_go_together_cannot_be_written(options: dict[str, Any], what: str):
    with pytest.raises(BadOption, match=what):
        Compress(**options)


def test_a_mode_is_no_plan():
    with pytest.raises(BadPlan, match="'balanced' is a mode and no plan: write compress='balanced'"):
        Compress(plan="balanced")


def test_another_plan_takes_the_place_of_a_choice_and_keeps_the_rest():
    feedback = ErrorFeedback(everywhere=True)
    compress = Compress(within=0.05, measured=True, pins={"*": "int8"}, feedback=feedback)
    assert compress.following(Plan(())) == Compress(plan=Plan(()), feedback=feedback)


@pytest.mark.parametrize(
    ("options", "may_move"),
    [
        ({"within": "aggressive"}, True),
        ({"within": "aggressive", "at": "auto"}, True),
        ({"within": "aggressive", "at": "gradient"}, False),
        ({"within": "aggressive", "measured": True}, False),
        *(({"within": within}, False) for within in ("lossless", "balanced", "lossy", 0.05, like("int4"))),
        ({"plan": "int8"}, False),
        ({"plan": "int8", "at": "auto"}, False),
        ({"plan": "int8", "at": "momentum"}, False),
    ],
)
def test_aggressive_alone_chooses_the_exchange_point_and_needs_the_length_of_the_job(
    options: dict[str, Any], may_move: bool
):
    short, long = Compress(**options), Compress(**options, steps=3000)
    assert (short.may_move, long.may_move) == (may_move, may_move)
    assert (short.chooses_point, long.chooses_point) == (False, may_move)
    point = ExchangePoint.MOMENTUM if options.get("at") == "momentum" else ExchangePoint.GRADIENT
    assert (short.point, long.point) == (point, point)


def test_a_chosen_exchange_point_is_a_fact_that_ranks_compare():
    asked = Compress(within="aggressive", steps=300)
    assert (asked.facts()["at"], asked.facts()["steps"]) == ("auto", 300)
    assert asked.following(Plan(())) == Compress(plan=Plan(()), steps=300)


@pytest.mark.parametrize(("steps", "first"), [(30, 20), (100, 20), (101, 21), (3000, 600)])
def test_momenta_begin_after_a_fifth_of_the_job(steps: int, first: int):
    asked = Compress(within="aggressive", steps=steps)
    gradients = Plan((Bucket(("a",), (8,), Strategy.flat(Sign())),))
    assert list(asked.warmup_for(gradients.at_momenta()).stages(gradients.at_momenta())) == [0, first]
    assert not asked.warmup_for(gradients)
    own = replace(asked, warmup=Warmup(dense_steps=3))
    assert own.warmup_for(gradients.at_momenta()) == Warmup(dense_steps=3)
