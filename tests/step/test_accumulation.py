"""Gradients of a group of micro-batches are summed up, then sent once: as DDP does under `no_sync`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks, try_ranks
from helpers.replicas import flat_parameters, replica_fingerprint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.capture.batch_type import batch_type
from fxcomp.errors import BadCall, BadOption, Unsupported

EPOCH = 5
"""Micro-batches of an epoch; in groups of two the last one is shorter."""
LENGTHS = (4, 4, 6, 3, 4)


def calls(job_name: str, accumulate: int, epochs: int = 2) -> Iterator[tuple[Any, int, bool]]:
    """Each micro-batch with the length of its group, and whether it ends a shorter one."""
    job, rank = JOBS[job_name], dist.get_rank() if dist.is_initialized() else 0
    for epoch in range(epochs):
        for place in range(EPOCH):
            first = place - place % accumulate
            length = min(accumulate, EPOCH - first)
            ends = place == EPOCH - 1
            draw_length = LENGTHS[place] if job_name != "transformer" else None
            yield job.batch(10 * epoch + place, rank, draw_length), length, ends and length < accumulate


def eager(job_name: str, optimizer_name: str, accumulate: int, clip: float | None) -> tuple[nn.Module, list[float]]:
    """Train as a user of DDP does who accumulates."""
    model = JOBS[job_name].build()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    torch.manual_seed(3)
    losses, done = [], 0
    for batch, length, _ in calls(job_name, accumulate):
        done += 1
        quiet = wrapped.no_sync() if done < length and dist.is_initialized() else contextlib.nullcontext()
        with quiet:
            loss = cross_entropy(wrapped, batch)
            (loss / length).backward()
        losses.append(loss.item())
        if done == length:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            done = 0
    return model, losses


def compiled(
    job_name: str, optimizer_name: str, accumulate: int, clip: float | None = None, plan: str = "dense", **options: Any
) -> tuple[fxcomp.CompiledStep, list[float]]:
    model = JOBS[job_name].build()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    batch, _, _ = next(calls(job_name, accumulate))
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        optimizer,
        batch,
        max_grad_norm=clip,
        accumulate=accumulate,
        **gathered(plan=plan, **options),
    )
    torch.manual_seed(3)
    losses = [step(batch, last=last).item() for batch, _, last in calls(job_name, accumulate)]
    return step, losses


def distances(job_name: str, optimizer_name: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    reference, expected = eager(job_name, optimizer_name, accumulate, clip)
    step, losses = compiled(job_name, optimizer_name, accumulate, clip, verify=2)
    model = step.training.model
    off = (flat_parameters(model) - flat_parameters(reference)).abs().max().item()
    buffers = zip(model.buffers(), reference.buffers(), strict=True)
    found = {
        "parameters": off,
        "buffers": max(((a - b).abs().max().item() for a, b in buffers), default=0.0),
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "steps": step.steps,
        "fingerprint": replica_fingerprint(model),
    }
    step.close()
    return found


CASES = [("mlp", "adamw", 3, 0.05), ("conv", "sgd", 2, None)]
SLOW = [("mlp", "sgd", 2, None), ("transformer", "sgd", 3, None), ("dropout", "adamw", 2, 0.05)]


def all_distances(cases: list[tuple[str, str, int, float | None]]) -> list[dict[str, Any]]:
    return [distances(*case) for case in cases]


@pytest.mark.parametrize("cases", [CASES, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_a_dense_step_of_micro_batches_is_that_of_ddp_under_no_sync(cases: list[tuple[str, str, int, float | None]]):
    everyone = run_ranks(2, all_distances, cases)
    for case, *found in zip(cases, *everyone, strict=True):
        for mine in found:
            assert mine["parameters"] <= 1e-5, case
            assert mine["losses"] <= 1e-5, case
            assert mine["steps"] == 2 * -(-EPOCH // case[2])
        assert found[0]["buffers"] <= 1e-5, case
        assert found[0]["fingerprint"] == found[1]["fingerprint"]


@pytest.mark.parametrize(
    "case", [CASES[1], pytest.param(SLOW[2], marks=pytest.mark.slow)], ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}"
)
def test_one_rank_alone_accumulates(case: tuple[str, str, int, float | None]):
    found = distances(*case)
    assert found["parameters"] <= 1e-5
    assert found["buffers"] <= 1e-5
    assert found["losses"] <= 1e-5


TWO_SHOTS = (
    "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int4)@gpu > all_gather@world > decompress@gpu"
)
LOSSY = ["int8", "topk(0.1)", TWO_SHOTS]


def lossy() -> list[tuple[str, float, int]]:
    """For each plan: the replica, the largest sum that is left, and the number of steps."""
    found = []
    for plan in LOSSY:
        options: dict[str, Any] = {"plan": plan}
        step, _ = compiled("mlp", "sgd", 2, **options)
        left = max(step.in_force.inputs.sums.of(name).abs().max().item() for name in step.plan.sizes)
        found.append((replica_fingerprint(step.training.model), left, step.steps))
        step.close()
    return found


def test_ranks_stay_identical_where_sums_are_compressed():
    one, other = run_ranks(2, lossy)
    for mine, theirs in zip(one, other, strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == theirs[1] == 0, "sums begin at zero again"
        assert mine[2] == 6


def nothing_sent() -> list[Any]:
    """The bytes of each call, and the residual before and after a call that sends nothing."""
    step = fresh("topk(0.1)", 3)
    rank, found = dist.get_rank(), []
    for place in range(3):
        before = step.in_force.state.residuals.arena.clone()
        step(JOBS["mlp"].batch(place, rank))
        found.append(torch.equal(before, step.in_force.state.residuals.arena))
    return [*found, step.steps]


def fresh(plan: str, accumulate: int, **options: Any) -> fxcomp.CompiledStep:
    model = JOBS["mlp"].build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return fxcomp.compile_step(
        model, cross_entropy, optimizer, JOBS["mlp"].batch(0), accumulate=accumulate, **gathered(plan=plan, **options)
    )


def test_residuals_change_at_the_end_of_a_group_alone():
    assert run_ranks(2, nothing_sent) == [[True, True, False, 1]] * 2


def ends_apart() -> None:
    step = fresh("dense", 3)
    rank = dist.get_rank()
    step(JOBS["mlp"].batch(0, rank))
    step(JOBS["mlp"].batch(1, rank), last=rank == 0)
    step(JOBS["mlp"].batch(2, rank))
    step(JOBS["mlp"].batch(2, rank), last=True)


def test_ranks_that_end_a_group_at_different_calls_are_told():
    outcomes = try_ranks(2, ends_apart, group_timeout_s=20.0)
    assert [outcome.error for outcome in outcomes] == ["ReplicasDiffer"] * 2
    assert "rank 0 ends a group after 2 micro-batches, rank 1 after 3" in outcomes[0].text


def test_a_state_is_saved_between_groups():
    step = fresh("dense", 2)
    step(JOBS["mlp"].batch(0))
    with pytest.raises(BadCall, match="1 of 2 micro-batches"):
        step.state_dict()
    step(JOBS["mlp"].batch(1))
    assert step.state_dict()["steps"] == 1


def test_a_gradient_of_a_group_that_is_not_finite_leaves_the_whole_group_out():
    step = fresh("dense", 2, skip_nonfinite=True)
    before = flat_parameters(step.training.model)
    inputs, target = JOBS["mlp"].batch(0)
    step((inputs * float("inf"), target))
    step(JOBS["mlp"].batch(1))
    assert step.skipped_steps == 1
    assert torch.equal(before, flat_parameters(step.training.model))
    for place in range(2):
        step(JOBS["mlp"].batch(place))
    assert step.skipped_steps == 1
    assert flat_parameters(step.training.model).isfinite().all()


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "4"])
def test_a_group_has_a_whole_number_of_micro_batches(given: Any):
    with pytest.raises(BadOption, match="number of micro-batches"):
        fresh("dense", given)


def test_the_emitted_micro_batch_sends_nothing():
    step = fresh("dense", 2)
    step(JOBS["mlp"].batch(0))
    batch = JOBS["mlp"].batch(0)
    source = step.in_force.find_micro(batch, *batch_type(batch)).source
    assert "rt." not in source
    assert source.count("aten.add_") == 4


def test_an_error_in_a_micro_batch_begins_the_group_again():
    steps = [fresh("dense", 2) for _ in range(2)]
    inputs, target = JOBS["mlp"].batch(9)
    steps[0](JOBS["mlp"].batch(8))
    with pytest.raises(IndexError):
        steps[0]((inputs, target + 1000))
    for step in steps:
        for place in range(2):
            step(JOBS["mlp"].batch(place))
    one, other = (flat_parameters(step.training.model) for step in steps)
    assert torch.equal(one, other)


def test_a_batch_that_is_refused_leaves_the_group_as_it_is():
    steps = [fresh("dense", 2) for _ in range(2)]
    for step in steps:
        step(JOBS["mlp"].batch(0))
        if step is steps[0]:
            with pytest.raises(Unsupported, match="a batch holds a object"):
                step(object())
        step(JOBS["mlp"].batch(1))
    one, other = (flat_parameters(step.training.model) for step in steps)
    assert torch.equal(one, other)
