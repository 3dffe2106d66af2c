"""A step that raises on one rank ends on all, and nobody's step 8 meets another one's step 7."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import table
from helpers.ranks import run_ranks
from helpers.replicas import everyone
from helpers.small_step import batch, compiled, parameters_of
from torch import Tensor, nn

import fxcomp
from fxcomp.compressors import Int8
from fxcomp.errors import FxcompError
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

ON_POOL = "compress(int8)@cpu > all_gather@world > decompress@cpu"


def outcome(work: Callable[[], Any]) -> str:
    try:
        work()
    except (FxcompError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def offloaded() -> fxcomp.CompiledStep:
    buckets = tuple(Bucket((name,), (size,), Strategy.parse(ON_POOL)) for name, size in (("bias", 10), ("weight", 200)))
    return compiled(plan=Plan(buckets))


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a mistake of ours")


def is_one() -> bool:
    return dist.get_rank() == 1


def one_rank_raises() -> dict[str, list[Any]]:
    """Rank 1 raises inside step 2 and goes on with its next batch."""
    said: dict[str, list[Any]] = {}
    step = compiled(plan="int8")
    step(batch(0))
    step(batch(1))
    saved, model = step.state_dict(), {k: v.clone() for k, v in step.training.model.state_dict().items()}
    said["early"] = [early(step) if is_one() else outcome(lambda: step(batch(2)))]
    said["early"] += [outcome(lambda: step(batch(3))), outcome(lambda: step(batch(4))), step.steps]

    def load() -> None:
        step.training.model.load_state_dict(model)
        step.load_state_dict(saved)

    load()
    said["early"].append(outcome(lambda: step(batch(2))))
    said["same"] = everyone("after loading", parameters_of(step))

    with patch.object(Int8, "decode", fails) if is_one() else nullcontext():
        said["late"] = [outcome(lambda: step(batch(3)))]
    said["late"].append(outcome(lambda: step(batch(3))))
    load()
    said["late"].append(outcome(lambda: step(batch(2))))

    # All raise before anything has run, and all go on.
    said["all"] = [early(step), outcome(lambda: step(batch(3))), step.steps]
    said["all"] += everyone("after all", parameters_of(step))
    with step:
        pass
    said["closed"] = [outcome(lambda: step(batch(4))), outcome(lambda: step.load_state_dict(saved))]
    return said


def early(step: fxcomp.CompiledStep) -> str:
    """Raise where a step is prepared."""
    with patch.object(step.in_force.inputs, "of", fails):
        return outcome(lambda: step(batch(2)))


CAUSE = "rank 1 failed in step {}: ZeroDivisionError: a mistake of ours"


def all_of_it() -> dict[str, Any]:
    return {**one_rank_raises(), "pool": pool_fails(), "backward": backward_fails()}


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_ranks(2, all_of_it)


def test_a_rank_that_raised_and_goes_on_is_refused_until_all_have_loaded_a_state(on_two: Any):
    ends = (f"PeerFailed: step 2 did not end: {CAUSE.format(2)}", "ZeroDivisionError: a mistake of ours")
    for said, end in zip(on_two, ends, strict=True):
        first, second, third, steps, loaded = said["early"]
        assert first.startswith(end)
        assert second.startswith(f"RanksApart: the ranks are no longer at the same step: {CAUSE.format(2)}")
        assert "rank 0 stopped inside step 2; rank 1 stopped before any work of step 2" in second
        assert "step.load_state_dict" in second
        assert third.startswith("RanksApart")
        assert (steps, loaded) == (2, "done")
        assert said["same"][0] == said["same"][1]


def test_a_rank_that_raises_behind_its_collectives_ends_the_others_next_step(on_two: Any):
    zero, one = on_two
    assert zero["late"][0] == "done"  # it had everything that it needed of step 3
    assert zero["late"][1].startswith(f"PeerFailed: step 4 did not end: {CAUSE.format(3)}")
    assert one["late"][0] == "ZeroDivisionError: a mistake of ours"
    assert "rank 0 stopped inside step 4; rank 1 stopped inside step 3" in one["late"][1]
    assert zero["late"][2] == one["late"][2] == "done"


def test_where_all_ranks_raise_before_a_step_has_begun_all_go_on(on_two: Any):
    for said in on_two:
        raised, then, steps, first, second = said["all"]
        assert raised.startswith("ZeroDivisionError")
        assert (then, steps) == ("done", 4)
        assert first == second


def test_a_closed_step_says_so(on_two: Any):
    for said in on_two:
        assert all(text.startswith("BadCall") and "compile_step again" in text for text in said["closed"])


# The pool


def pool_fails() -> dict[str, list[Any]]:
    """A line fails on rank 1's pool whose result nobody reads."""
    step = offloaded()
    step(batch(0))
    saved, said = step.state_dict(), dict[str, list[Any]]()
    submit = step.in_force.runtime.pool.submit

    def unread(work: Callable[..., Tensor], *given: Any, **options: Any) -> Any:
        future = submit(work, *given, **options)
        submit(fails)
        return future

    with patch.object(step.in_force.runtime.pool, "submit", unread) if is_one() else nullcontext():
        said["raised"] = [outcome(lambda: step(batch(1)))]
    said["raised"] += [step.steps, outcome(lambda: step(batch(2)))]
    step.load_state_dict(saved)
    said["after"] = [outcome(lambda: step(batch(2))), step.steps]
    return said


def test_what_fails_on_the_pool_is_raised_in_the_same_step_whoever_reads_it(on_two: Any):
    zero, one = (said["pool"] for said in on_two)
    assert one["raised"][:2] == ["ZeroDivisionError: a mistake of ours", 1]
    assert zero["raised"][:2] == ["done", 2]
    assert zero["raised"][2].startswith(f"PeerFailed: step 2 did not end: {CAUSE.format(1)}")
    assert one["raised"][2].startswith("RanksApart")
    assert zero["after"] == one["after"] == ["done", 2]


# torch.compile


def backward_fails() -> list[str]:
    model = nn.Linear(20, 10)
    run = fxcomp.compile_model(model, "int8", costs=table(2.0))

    def backward() -> None:
        inputs, target = batch(0)
        nn.functional.cross_entropy(run(inputs), target).backward()

    said = [outcome(backward)]
    with patch.object(Int8, "encode", fails) if is_one() else nullcontext():
        said.append(outcome(backward))
    said.append(outcome(backward))
    torch._dynamo.reset()
    return [*said, outcome(backward)]


def test_a_backward_pass_that_raises_on_one_rank_ends_on_all(on_two: Any):
    zero, one = (said["backward"] for said in on_two)
    cause = "rank 1 failed in step 1: ZeroDivisionError: a mistake of ours"
    assert zero[0] == one[0] == zero[3] == one[3] == "done"
    assert zero[1].startswith(f"PeerFailed: step 1 did not end: {cause}")
    assert one[1] == "ZeroDivisionError: a mistake of ours"
    assert zero[2].startswith("RanksApart")
    assert one[2].startswith("RanksApart")
