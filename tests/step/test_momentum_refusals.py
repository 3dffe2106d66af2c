"""Momentum correction is refused beside another momentum, clipping, or no feedback, now and later."""

from __future__ import annotations

import pytest
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import try_ranks

import fxcomp
from fxcomp.errors import BadOption
from fxcomp.plan.error_feedback import ErrorFeedback, check_momentum

JOB = JOBS["mlp"]


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 2])
def test_a_momentum_is_from_zero_to_below_one(momentum: float):
    with pytest.raises(BadOption, match=rf"momentum is from 0 \(none\) to below 1; it is {momentum}"):
        ErrorFeedback(momentum=momentum)


def test_without_feedback_there_is_nothing_to_correct():
    with pytest.raises(BadOption, match=r"off=True\) has nothing to scale, to correct.*\n.*Leave off=True out"):
        ErrorFeedback(off=True, momentum=0.9)


@pytest.mark.parametrize(
    ("optimizer", "options", "what"),
    [
        ("sgd", {}, r"parameter group 0 of SGD has momentum=0.9: it would be applied twice.*\n.*Give SGD momentum=0"),
        ("adamw", {}, r"AdamW has one of its own.*\n.*Use torch.optim.SGD without momentum"),
        (
            "plain",
            {"clips": True},
            r"max_grad_norm and max_grad_value clip .* ErrorFeedback\(momentum=0.9\) is momentum.*\n.*Leave",
        ),
        ("plain", {"alone": True}, r"there is one rank: nothing is sent.*\n.*On one rank, give momentum=0.9 to SGD"),
    ],
)
def test_what_momentum_correction_cannot_go_with_is_refused(optimizer: str, options: dict[str, bool], what: str):
    made = OPTIMIZERS[optimizer](JOB.build().parameters())
    check_momentum(ErrorFeedback(), made, **options)
    with pytest.raises(BadOption, match=what):
        check_momentum(ErrorFeedback(momentum=0.9), made, **options)


def compiled(name: str) -> fxcomp.CompiledStep:
    model = JOB.build()
    optimizer = OPTIMIZERS[name](model.parameters())
    options = ErrorFeedback(momentum=0.9)
    return fxcomp.compile_step(
        model, cross_entropy, optimizer, JOB.batch(0), compress=fxcomp.Compress(plan="topk(0.1)", feedback=options)
    )


def with_optimizer(name: str) -> None:
    compiled(name)


def test_two_momenta_are_refused_on_every_rank_and_nobody_hangs():
    for outcome in try_ranks(2, with_optimizer, "sgd"):
        assert outcome.error == "BadOption"
        assert "applied twice" in outcome.text


def changed_later() -> None:
    step = compiled("plain")
    step(JOB.batch(0))
    step.training.optimizers[0].param_groups[0]["momentum"] = 0.5
    step(JOB.batch(1))


def test_a_momentum_that_the_optimizer_gets_later_is_refused():
    for outcome in try_ranks(2, changed_later):
        assert outcome.error == "BadOption"
        assert "SGD has momentum=0.5: it would be applied twice" in outcome.text
