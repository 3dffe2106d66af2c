"""The options of error feedback: what they stand for, and which combinations are refused, and why."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import try_ranks
from torch import nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import BF16, Compressor, Int4, Int8, TopK, parse_compressor
from fxcomp.compressors.facts import Feedback
from fxcomp.errors import BadOption, BadPlan
from fxcomp.plan.budget import polluting_share
from fxcomp.plan.compress import Warmup
from fxcomp.plan.error_feedback import BURST_SHARES, ErrorFeedback, UpdateKind, check_plan
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.search.choose import choose
from fxcomp.search.question import Terms
from fxcomp.search.workload import Gradient, Workload


class Expanding(Int8):
    """An unbiased compressor whose error can exceed what it is given."""

    __slots__ = ()

    @property
    def feedback(self) -> Feedback:
        return Feedback.FORBIDDEN


def plan(*compressors: Compressor | None, sizes: tuple[int, ...] = (100, 100, 100)) -> Plan:
    strategies = [DENSE if c is None else Strategy.flat(c) for c in compressors]
    return Plan(tuple(Bucket((f"p{k}",), (n,), s) for k, (n, s) in enumerate(zip(sizes, strategies, strict=False))))


def checked(options: ErrorFeedback, wanted: Plan, kinds: Collection[UpdateKind] = (), ranks: int = 2) -> None:
    """Check a plan of flat parameters among so many ranks."""
    shapes = {name: (size,) for b in wanted.buckets for name, size in zip(b.names, b.sizes, strict=True)}
    check_plan(options, wanted, shapes, among(ranks), kinds)


def among(ranks: int) -> Cluster:
    return Cluster(ranks, 1, intra=Link(5.0, 20.0), inter=Link(50.0, 0.01))


# Stages


def test_by_default_the_plan_is_followed_from_the_first_step():
    wanted = plan(TopK(0.01), None)
    assert Warmup().stages(wanted) == {0: wanted}


def test_a_warm_up_is_dense_then_by_int8_then_by_int4():
    wanted = plan(TopK(0.01), None, Int8())
    stages = Warmup(dense_steps=3, int8_steps=10, int4_steps=5).stages(wanted)
    assert {step: str(each.buckets[0].strategy.compressor) for step, each in stages.items()} == {
        0: "None",
        3: str(Int8()),
        13: str(Int4()),
        18: "topk(0.01)",
    }
    assert stages[0].is_dense
    assert stages[0].names == wanted.names
    assert stages[13].buckets[1:] == (wanted.buckets[1], stages[13].buckets[2])
    assert stages[18] == wanted


def test_a_dense_plan_needs_no_dense_warm_up():
    assert len(Warmup(dense_steps=5).stages(plan(None))) == 1


def test_a_dense_warm_up_keeps_the_levels():
    hierarchical = Plan((Bucket(("p",), (8,), Strategy.hierarchical(Int8())),))
    assert Warmup(dense_steps=1).stages(hierarchical)[0].buckets[0].strategy == Strategy.hierarchical(None)


@pytest.mark.parametrize(
    ("options", "around"),
    [
        (ErrorFeedback(), (True, False, False)),
        (ErrorFeedback(everywhere=True), (True, True, False)),
        (ErrorFeedback(off=True), (False, False, False)),
        (ErrorFeedback(everywhere=True, allow_diverging=True), (True, True, True)),
    ],
)
def test_which_compressors_get_a_residual(options: ErrorFeedback, around: tuple[bool, ...]):
    assert tuple(map(options.surrounds, (TopK(0.1), BF16(), Expanding()))) == around


# Values that cannot be


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"off": 1}, r"off is True or False; it is 1"),
        ({"scale_with_lr": None}, r"scale_with_lr is True or False; it is None"),
        ({"off": True, "everywhere": True}, r"off=True\) has nothing to scale.*\n  Leave off=True out"),
        ({"off": True, "scale_with_lr": True}, r"off=True\) has nothing to scale"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, Any], what: str):
    with pytest.raises(BadOption, match=what):
        ErrorFeedback(**options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dense_steps": -1}, r"dense_steps is a whole number of steps, from 0; it is -1"),
        ({"dense_steps": 1.5}, r"dense_steps is a whole number of steps, from 0; it is 1.5"),
        ({"int8_steps": "3"}, r"int8_steps is a whole number of steps, from 0; it is '3'"),
        ({"int4_steps": True}, r"int4_steps is a whole number of steps, from 0; it is True"),
    ],
)
def test_steps_of_a_warm_up_that_cannot_be_are_refused(options: dict[str, Any], what: str):
    with pytest.raises(BadOption, match=what):
        Warmup(**options)


# Refusals


@pytest.mark.parametrize("given", [(), ["int8"], TopK(0.1)])
def test_only_a_plan_or_its_text_is_one(given: Any):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadOption, match=r"compress= takes a mode .*; it is a (tuple|list|TopK)\."):
        fxcomp.compile_step(model, cross_entropy, optimizer, JOBS["mlp"].batch(0, 0), compress=given)
    with pytest.raises(BadPlan, match=r"plan is a fxcomp.Plan, the path .*; it is a (tuple|list|TopK)\.\n"):
        fxcomp.Compress(plan=given)


def test_feedback_around_an_expanding_compressor_is_refused():
    checked(ErrorFeedback(), plan(Expanding()))
    with pytest.raises(BadOption, match=r"around int8 diverges: .*unbiased.*\n.*Leave everywhere=True out"):
        checked(ErrorFeedback(everywhere=True), plan(Expanding()))
    checked(ErrorFeedback(everywhere=True, allow_diverging=True), plan(Expanding()))


def test_a_biased_compressor_without_feedback_is_refused():
    checked(ErrorFeedback(off=True), plan(BF16(), None))
    with pytest.raises(BadOption, match=r"topk\(0.01\) without error feedback.*\n.*Leave off=True out"):
        checked(ErrorFeedback(off=True), plan(TopK(0.01)))
    checked(ErrorFeedback(off=True, allow_diverging=True), plan(TopK(0.01)))


def test_bursts_under_adam_are_refused_beyond_a_share():
    few, many = plan(TopK(0.01), Int8(), sizes=(9, 91)), plan(TopK(0.01), Int8(), sizes=(11, 89))
    adam, linear = [UpdateKind.MOMENTUM, UpdateKind.SECOND_MOMENT], [UpdateKind.PLAIN, UpdateKind.MOMENTUM]
    checked(ErrorFeedback(), few, adam)
    checked(ErrorFeedback(), many, linear)
    for name in ("sign", "bf16"):
        checked(ErrorFeedback(), plan(parse_compressor(name)), adam)
    told = r"11% of all elements .* topk\(0.01\).*update is divided by .*at most 10%.*\n.*Use int8"
    with pytest.raises(BadOption, match=told):
        checked(ErrorFeedback(), many, adam)
    checked(ErrorFeedback(allow_diverging=True), many, adam)


def test_what_a_compressor_needs_is_asked_among_so_many_ranks():
    rounding, random = (plan(parse_compressor(f"shared_int8(stochastic={switch})")) for switch in ("false", "true"))
    without, everywhere = ErrorFeedback(off=True), ErrorFeedback(everywhere=True)
    checked(without, random, ranks=18)
    with pytest.raises(BadOption, match="shared_int8 without error feedback"):
        checked(without, random, ranks=19)
    with pytest.raises(BadOption, match=r"shared_int8\(stochastic=false\) without error feedback"):
        checked(without, rounding, ranks=2)
    checked(everywhere, random, ranks=63)
    with pytest.raises(BadOption, match="error feedback around shared_int8 diverges"):
        checked(everywhere, random, ranks=64)
    # One level: what is below half a block's largest value waits, and comes in bursts.
    checked(ErrorFeedback(), rounding, [UpdateKind.SECOND_MOMENT], ranks=63)
    with pytest.raises(BadOption, match="100% of all elements"):
        checked(ErrorFeedback(), rounding, [UpdateKind.SECOND_MOMENT], ranks=64)


def test_the_search_keeps_bursts_within_the_share():
    where = Cluster(2, 1, intra=Link(5.0, 20.0), inter=Link(50.0, 0.01))
    # So narrow that low rank saves nothing.
    gradients = tuple(Gradient(f"p{k}", (1 << 18, 1), 500.0 * (k + 1), 10.0) for k in range(8))
    workload, costs = Workload(gradients, 4000.0), fxcomp.CostTable(error=0.0)
    free, share = choose(workload, costs, where, Mode.LOSSY), BURST_SHARES[UpdateKind.SECOND_MOMENT]
    bound = choose(workload, costs, where, Terms(Mode.LOSSY, bursts=share))
    assert polluting_share(free.plan, where) > share
    assert polluting_share(bound.plan, where) <= share
    assert not bound.plan.is_dense


def compiled_with_adam() -> str:
    job = JOBS["mlp"]
    model = job.build()
    optimizer = torch.optim.Adam(model.parameters())
    fxcomp.compile_step(model, cross_entropy, optimizer, job.batch(0), compress="topk(0.01)")
    return "compiled"


def test_a_refused_plan_fails_on_every_rank_and_nobody_hangs():
    for outcome in try_ranks(2, compiled_with_adam):
        assert outcome.error == "BadOption"
        assert "let fxcomp choose: name no plan, and no pattern of pins=" in outcome.text


class WithoutRate(torch.optim.Optimizer):
    """Steps by a rate of its own, which no parameter group has."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"speed": 0.1})

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-group["speed"])


def compiled_without_rate() -> None:
    job = JOBS["mlp"]
    model = job.build()
    options = ErrorFeedback(scale_with_lr=True)
    fxcomp.compile_step(
        model,
        cross_entropy,
        WithoutRate(model.parameters()),
        job.batch(0),
        compress=fxcomp.Compress(plan="int8", feedback=options),
    )


def test_residuals_are_not_scaled_by_a_rate_that_no_group_has():
    what = (
        r"scale_with_lr=True\) .* parameter group 0 of WithoutRate has no 'lr': its options are 'speed'"
        r"\.\n.*as 'lr', or leave scale_with_lr=True out"
    )
    with pytest.raises(BadOption, match=what):
        compiled_without_rate()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"feedback": ErrorFeedback(scale_with_lr=True)}, "ErrorFeedback.scale_with_lr needs the optimizer"),
        ({"warmup": Warmup(dense_steps=1)}, "warmup= counts the steps of the optimizer"),
        ({"warmup": Warmup(int8_steps=1)}, "warmup= counts the steps of the optimizer"),
        ({"measured": True}, "measured=True looks at gradients in whole steps"),
    ],
)
def test_the_backend_refuses_what_needs_the_optimizer(options: dict[str, Any], what: str):
    torch._dynamo.reset()
    model = JOBS["mlp"].build()
    compiled = torch.compile(model, backend="fxcomp", options={"compress": fxcomp.Compress(**options)})
    with pytest.raises(Exception, match=f"{what}.*, which torch.compile leaves yours"):
        cross_entropy(compiled, JOBS["mlp"].batch(0)).backward()
