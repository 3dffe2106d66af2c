"""Pinned gradients stay pinned while a job runs: in a race, after planning again, and in a loaded state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import JOB, compiled, links_become, table
from helpers.gathered import gathered
from helpers.jobs import cross_entropy, mlp
from helpers.ranks import run_ranks
from helpers.replicas import flat_parameters

import fxcomp
from fxcomp.frontends.torch_compile import compiled_model
from fxcomp.plan.plan import Plan
from fxcomp.step.compiled_step import CompiledStep

PINS = {"*": "bf16", "2.weight": "dense", "0.bias": "topk(0.1)"}
SOME = {"0.weight": "int8"}


def strategies(plan: Plan) -> dict[str, str]:
    """The compressors of each parameter."""
    return {
        name: ", ".join(map(str, bucket.strategy.compressors)) or "dense"
        for bucket in plan.buckets
        for name in bucket.names
    }


def trained(step: CompiledStep, first: int, steps: int) -> list[dict[str, str]]:
    """The strategies of every step's plan."""
    found: list[dict[str, str]] = []
    for number in range(first, first + steps):
        found.append(strategies(step.plan))
        step(JOB.batch(number, dist.get_rank()))
    return found


def error_of(**options: Any) -> tuple[str, str]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        fxcomp.compile_step(model, cross_entropy, optimizer, JOB.batch(0), costs=table(0.05), **gathered(**options))
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def run_pinned() -> dict[str, Any]:
    raced = compiled(table(0.05), race="auto", verify="never", pins=SOME)
    in_race = trained(raced, 0, 12)
    choice = raced.in_force.decision.choice
    runners = [strategies(runner.plan) for runner in choice.runners] if choice else []

    pinned = compiled(table(0.05), pins=PINS)
    before = trained(pinned, 0, 5)
    state = pinned.state_dict()
    other = compiled(table(0.05), pins=PINS)
    other.load_state_dict(state)
    after = trained(other, 5, 5)
    with links_become(0.05):
        other.replan()
    again = trained(other, 10, 1)
    odd = dist.get_rank() == 1
    model = JOB.build()
    options = {"compress": fxcomp.Compress(pins=PINS), "costs": table(0.05)}
    backward = torch.compile(model, backend="fxcomp", options=options)
    cross_entropy(backward, JOB.batch(0, dist.get_rank())).backward()
    return {
        "backend": strategies(compiled_model(model).plan),
        "in_race": in_race,
        "runners": runners,
        "pinned": before + after + again,
        "report": pinned.explain(),
        "parameters": [flat_parameters(each.training.model).tolist() for each in (raced, other)],
        "differ": error_of(pins={"*.weight": "int8" if odd else "bf16", "*.bias": "dense"}),
        "order": error_of(pins={"*.weight": "int8", "0.*": "bf16"} if odd else {"0.*": "bf16", "*.weight": "int8"}),
        "misspelt": error_of(pins={"3.weight" if odd else "2.weight": "int8"}),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, run_pinned)


def test_every_plan_of_a_race_has_what_is_pinned(ranks: list[dict[str, Any]]):
    for found in (*ranks[0]["in_race"], *ranks[0]["runners"]):
        assert found["0.weight"] == "int8"
    assert len({tuple(sorted(each.items())) for each in ranks[0]["in_race"]}) > 1, "plans took turns"


def test_steps_follow_the_pins_from_a_saved_state_and_under_a_new_decision_too(ranks: list[dict[str, Any]]):
    for found in ranks[0]["pinned"]:
        assert found == {"0.weight": "bf16", "2.weight": "dense", "0.bias": "topk(0.1)", "2.bias": "bf16"}


def test_the_backend_of_torch_compile_follows_the_pins_too(ranks: list[dict[str, Any]]):
    pinned = {"0.weight": "bf16", "2.weight": "dense", "0.bias": "topk(0.1)", "2.bias": "bf16"}
    assert [rank["backend"] for rank in ranks] == [pinned, pinned]


def test_all_ranks_have_the_same_parameters(ranks: list[dict[str, Any]]):
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert ranks[0]["in_race"] == ranks[1]["in_race"]


def test_other_pins_on_one_rank_are_an_error_on_all(ranks: list[dict[str, Any]]):
    for rank in ranks:
        assert rank["differ"][0] == rank["order"][0] == "ReplicasDiffer"
        assert "pins is ['*.weight=int8', '*.bias=dense'] on rank 1" in rank["differ"][1]
    assert [rank["misspelt"][0] for rank in ranks] == ["PeerFailed", "BadOption"]
    assert "matches no parameter" in ranks[0]["misspelt"][1]
