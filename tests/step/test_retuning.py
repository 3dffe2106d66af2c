"""Density and rank change while a job trains: nothing is captured or emitted, no rank differs, nothing owed is lost."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import JOBS, cross_entropy
from helpers.plans import TWO_HOSTS, plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor

import fxcomp
from fxcomp.codegen import program as programs
from fxcomp.cost.table import CostTable
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.step.compiled_step import CompiledStep

JOB = JOBS["mlp"]
ONE_SHOT = "compress({})@gpu > all_gather@world > decompress@gpu"
ON_THE_HOST = "compress({})@cpu > all_gather@world > decompress@cpu"
TWO_SHOTS = (
    "compress({0})@gpu > all_to_all@world > decompress@gpu > compress({0})@gpu > all_gather@world > decompress@gpu"
)
BY_LEVEL = (
    "reduce_scatter@intra > compress({0})@gpu > all_to_all@inter > decompress@gpu > compress({0})@gpu"
    " > all_gather@inter > all_gather@intra > decompress@gpu"
)
DEALT_BY_LEVEL = (
    "compress({0})@gpu > all_to_all@intra > all_to_all@inter > decompress@gpu > compress({0})@gpu"
    " > all_gather@inter > all_gather@intra > decompress@gpu"
)
LOW_RANK = "propose({0})@gpu > all_reduce@world > compress({0})@gpu > all_reduce@world > decompress@gpu"


def plan_of(texts: list[str], compressor: str) -> Plan:
    strategies = [Strategy.parse(text.format(compressor)) for text in texts]
    return plan_in_turns(JOB.build(), strategies, per_bucket=2)


def compiled(plan: Plan, **options: Any) -> CompiledStep:
    model = JOB.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = {"cluster": TWO_HOSTS} if dist.get_world_size() == TWO_HOSTS.world_size else {}
    given: dict[str, Any] = {"verify": "never", "costs": CostTable(), **where, **options}
    return fxcomp.compile_step(model, cross_entropy, optimizer, JOB.batch(0), **gathered(plan=plan, **given))


def owed(step: CompiledStep) -> dict[str, Tensor]:
    """Sum all ranks' residuals of the mean gradient."""
    found: dict[str, Tensor] = {}
    for name, size in step.plan.sizes.items():
        found[name] = torch.zeros(size)
        for piece in step.in_force.state.residuals.slices.get(name, ()):
            piece.add_to(found[name])
        dist.all_reduce(found[name])
    return found


def train_over(texts: list[str], compressors: list[str]) -> dict[str, Any]:
    """A step with each parameter, then one more beside a step that was compiled with the last and loads the state."""
    step = compiled(plan_of(texts, compressors[0]))
    step(batch(0))
    kept: list[bool] = []
    with patch.object(programs, "load", None), patch.object(Compiler, "emit", None):
        for number, compressor in enumerate(compressors[1:], start=1):
            before, plan = owed(step), plan_of(texts, compressor)
            assert step.in_force.can_retune(plan)
            step.in_force.retune(plan)
            after = owed(step)
            kept.append(step.plan == plan and all(torch.equal(before[name], after[name]) for name in before))
            step(batch(number))
    other = compiled(plan_of(texts, compressors[-1]))
    other.training.model.load_state_dict(step.training.model.state_dict())
    other.load_state_dict(step.state_dict())
    for each in (step, other):
        each(batch(len(compressors)))
    return {
        "kept": kept,
        "owes": max(value.abs().max().item() for value in owed(step).values()),
        "source": step.source == other.source,
        "graph": lines_of(step) == lines_of(other),
        "predicted": (step.timeline, costs_of(step)) == (other.timeline, costs_of(other)),
        "sent": step.payload_bytes == other.payload_bytes,
        "trained": replica_fingerprint(step.training.model),
        "like": replica_fingerprint(other.training.model),
    }


def batch(number: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    return JOB.batch(number, dist.get_rank(), length)


def costs_of(step: CompiledStep) -> dict[str, float]:
    return {span.task.name: span.task.duration_us for span in step.in_force.standing.timeline.spans}


def lines_of(step: CompiledStep) -> list[str]:
    return [f"{node.name} {node.args} {node.meta['val']}" for node in step.graph().graph.nodes if node.op != "output"]


TOPK = ["topk(0.05)", "topk(0.2)", "topk(0.01)"]
RANKS = ["powersgd(2)", "powersgd(4)", "powersgd(1)"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("ranks", "texts", "compressors"),
    [
        (2, [ONE_SHOT, TWO_SHOTS], TOPK),
        (2, [ON_THE_HOST], TOPK),
        (4, [BY_LEVEL, DEALT_BY_LEVEL], TOPK),
        (2, [LOW_RANK], RANKS),
    ],
    ids=["one shot and two", "on the host", "by level", "rank"],
)
def test_a_running_step_goes_on_like_one_compiled_with_the_new_parameters(
    ranks: int, texts: list[str], compressors: list[str]
):
    everywhere = run_ranks(ranks, train_over, texts, compressors)
    for found in everywhere:
        assert found["kept"] == [True, True]
        assert found["owes"] > 0
        assert found["source"]
        assert found["graph"]
        assert found["predicted"]
        assert found["sent"]
        assert found["trained"] == found["like"] == everywhere[0]["trained"]


def factors() -> list[list[float]]:
    """Return PowerSGD's memory of the one matrix, at each rank in turn."""
    step = compiled(plan_of([LOW_RANK], "powersgd(2)"))
    found: list[list[float]] = []
    for number, text in enumerate(["powersgd(2)", "powersgd(4)", "powersgd(1)"]):
        if number:
            step.in_force.retune(plan_of([LOW_RANK], text))
        kept = step.in_force.state.compressor_states.shared().items()
        kept = [value for label, value in kept if label.startswith("0.weight, ")]
        found += [value.tolist() for value in kept]
        step(batch(number))
        found += [value.tolist() for value in kept]
    return found


def test_a_higher_rank_keeps_all_factors_and_a_lower_one_the_leading_ones():
    first, second = run_ranks(2, factors)
    assert first == second
    _, two, grown, four, cut, _ = first
    columns = 20
    assert len(grown) == 4 * columns
    assert grown[: 2 * columns] == two
    assert any(grown[2 * columns : 3 * columns])
    assert any(grown[3 * columns :])
    assert cut == four[:columns]


def other_shapes() -> list[str]:
    """Batches of shapes from before and after a change."""
    plans = [plan_of([ONE_SHOT, TWO_SHOTS], text) for text in ("topk(0.05)", "topk(0.1)", "topk(0.02)")]
    step = compiled(plans[0], verify=1)
    sent: list[str] = []
    for number, plan in enumerate(plans):
        if number:
            step.in_force.retune(plan)
        for length in (4, 7, 4, 5 + number):
            step(batch(number, length))
            sent.append(str(step.payload_bytes))
            assert f"ratio={plan.buckets[0].strategy.compressors[0].parameters[0]}" in step.source
    return [*sent, replica_fingerprint(step.training.model)]


def test_batches_of_all_shapes_follow_a_change_and_pass_verification():
    first, second = run_ranks(2, other_shapes)
    assert first[-1] == second[-1]
    for number in range(3):
        assert len(set(first[4 * number : 4 * number + 4])) == 1, "all shapes send the same"
    assert len({first[0], first[4], first[8]}) == 3


@pytest.mark.parametrize(
    ("before", "after", "is_so"),
    [
        (ONE_SHOT.format("topk(0.1)"), ONE_SHOT.format("topk(0.2)"), True),
        (ONE_SHOT.format("topk(0.1)"), ONE_SHOT.format("sidco(0.1)"), False),
        (ONE_SHOT.format("topk(0.1)"), "all_reduce@world", False),
        (ONE_SHOT.format("int4"), ONE_SHOT.format("int8"), False),
        (ONE_SHOT.format("int4"), ONE_SHOT.format("int4(block=8)"), False),
        (ONE_SHOT.format("int4"), ON_THE_HOST.format("int4"), False),
    ],
    ids=["density", "compressor", "dense", "bits", "block", "place"],
)
def test_plans_that_differ_in_parameters_only(before: str, after: str, is_so: bool):
    plan = plan_in_turns(JOB.build(), [Strategy.parse(before)], per_bucket=2)
    other = plan_in_turns(JOB.build(), [Strategy.parse(after)], per_bucket=2)
    assert plan.differs_in_parameters_only(other) is is_so
    assert not plan.differs_in_parameters_only(plan_in_turns(JOB.build(), [Strategy.parse(before)], per_bucket=1))
