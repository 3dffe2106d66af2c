"""Warm-up and the learning rate, on compiled steps: what is sent and what is left out add up to the gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.compressors import Int4, Int8, parse_compressor
from fxcomp.plan.compress import Warmup
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.strategy import Strategy

JOB = JOBS["mlp"]


def flat(name: str) -> Strategy:
    return Strategy.flat(parse_compressor(name))


def parameters(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def compiled(names: list[str], optimizer: str, options: ErrorFeedback, **more: Any) -> fxcomp.CompiledStep:
    model = JOB.build()
    plan = plan_in_turns(model, [flat(name) if name else Strategy.flat(None) for name in names], per_bucket=2)
    return fxcomp.compile_step(
        model,
        cross_entropy,
        OPTIMIZERS[optimizer](model.parameters()),
        JOB.batch(0, dist.get_rank()),
        **gathered(plan=plan, feedback=options, verify=1, **more),
    )


# Warm-up

DENSE_STEPS, INT8_STEPS, INT4_STEPS = 3, 2, 2


def warm_up() -> dict[str, Any]:
    rank = dist.get_rank()
    step = compiled(
        ["topk(0.05)"],
        "sgd",
        ErrorFeedback(),
        warmup=Warmup(dense_steps=DENSE_STEPS, int8_steps=INT8_STEPS, int4_steps=INT4_STEPS),
    )
    dense = compiled([""], "sgd", ErrorFeedback())
    reference = DistributedDataParallel(JOB.build())
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    sent: list[list[str]] = []
    found: dict[str, Any] = {}
    builds = len(step.in_force.programs)
    for i in range(DENSE_STEPS + INT8_STEPS + INT4_STEPS + 2):
        batch = JOB.batch(i, rank)
        note = step.counted_notes
        step(batch)
        sent.append(sorted({str(b.strategy.compressor) for b in step.plan.buckets}))
        if i < DENSE_STEPS:
            dense(batch)
            optimizer.zero_grad()
            cross_entropy(reference, batch).backward()
            optimizer.step()
        if i == DENSE_STEPS - 1:
            mine, theirs = parameters(step.training.model), parameters(reference.module)
            found["like ddp"] = (mine - theirs).abs().max().item()
            found["like dense"] = torch.equal(mine, parameters(dense.training.model))
            found["residual"] = step.in_force.state.residuals.arena.abs().max().item()
            found["note"] = note
    found["sent"] = sent
    found["residual after"] = step.in_force.state.residuals.arena.abs().max().item()
    found["built later"] = len(step.in_force.programs) - builds
    found["last notes"] = step.counted_notes
    found["parameters"] = parameters(step.training.model).tolist()
    return found


def test_dense_steps_equal_ddp_then_int8_and_int4_are_sent():
    one, other = run_ranks(2, warm_up)
    for rank in (one, other):
        assert rank["like dense"]
        assert rank["like ddp"] <= 1e-6
        assert rank["residual"] == 0
        assert rank["residual after"] > 0
        assert rank["sent"] == [
            *[["None"]] * DENSE_STEPS,
            *[[str(Int8())]] * INT8_STEPS,
            *[[str(Int4())]] * INT4_STEPS,
            *[["topk(0.05)"]] * 2,
        ]
        assert rank["built later"] == 0, "every stage is compiled beforehand"
        assert rank["note"] == ("warming up until step 7: stage 1 of 3",)
        assert rank["last notes"] == ()
    assert one["parameters"] == other["parameters"]


def resumed() -> list[bool]:
    """A state saved after the warm-up, loaded into a fresh step, goes on where it was."""
    rank = dist.get_rank()
    step, fresh = (compiled(["int4"], "plain", ErrorFeedback(), warmup=Warmup(dense_steps=2)) for _ in range(2))
    for i in range(3):
        step(JOB.batch(i, rank))
    fresh.load_state_dict(step.state_dict())
    fresh.training.model.load_state_dict(step.training.model.state_dict())
    for each in (step, fresh):
        each(JOB.batch(3, rank))
    return [fresh.plan == step.plan, torch.equal(parameters(step.training.model), parameters(fresh.training.model))]


def test_a_loaded_state_knows_its_place_in_the_warm_up():
    assert run_ranks(2, resumed) == [[True, True]] * 2


# The books: what was applied and what is left out are the gradients, over a skipped step and changing learning rates


def books(names: list[str], scale_with_lr: bool, everywhere: bool) -> float:
    """Return the distance of Σ mean + mean residual from Σ gradients, relative to the largest sum, over all ranks.

    The loss is linear in the parameters, so that gradients do not depend on them: a reference is the plain sum. With
    scaled residuals, everything is in the unit of updates: lr · gradient.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = JOB.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategies = [Strategy.parse(name) if ">" in name else flat(name) for name in names]
    plan = plan_in_turns(model, strategies, per_bucket=1)

    def linear(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return sum((batch[name] * p).sum() for name, p in model.named_parameters())  # pyright: ignore

    def draw(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}

    options = ErrorFeedback(scale_with_lr=scale_with_lr, everywhere=everywhere)
    step = fxcomp.compile_step(
        model, linear, optimizer, draw(0), skip_nonfinite=True, compress=fxcomp.Compress(plan=plan, feedback=options)
    )
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    due = {name: torch.zeros_like(value) for name, value in start.items()}
    for i in range(50):
        optimizer.param_groups[0]["lr"] = rate = 0.1 if i < 20 else 0.01 if i < 35 else 0.03
        gradients = draw(i)
        if i in (7, 20, 33):
            if rank == i % ranks:
                gradients["0.weight"][0, 0] = math.nan
        else:
            for name, gradient in gradients.items():
                due[name] += rate * gradient.double()
        step(gradients)
    assert step.skipped_steps == 3
    worst = 0.0
    for bucket in plan.buckets:
        for name in bucket.names:
            wanted, left = due[name], torch.zeros_like(due[name])
            for piece in step.in_force.state.residuals.slices.get(name, ()):  # a shard may hold nothing of it
                piece.add_to(left.view(-1))
            both = torch.stack([wanted, left])
            dist.all_reduce(both)
            applied = start[name] - dict(model.named_parameters())[name].detach().double()
            off = applied + rate * both[1] - both[0] / ranks
            worst = max(worst, off.abs().max().item() / wanted.abs().max().item())
    return worst


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("names", "everywhere"),
    [(["int4", "sign", "topk(0.05)", "int4"], False), (["topk(0.01)"], True)],
)
def test_over_skipped_steps_and_learning_rates_nothing_is_lost(names: list[str], everywhere: bool):
    for worst in run_ranks(2, books, names, True, everywhere):
        assert worst <= 2e-5


TWO_SHOTS = "compress({0}) > all_to_all@world > decompress > compress({1}) > all_gather@world > decompress"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_two_shots_the_owners_residual_makes_up_for_the_second_compression(ranks: int):
    names = [TWO_SHOTS.format("int4", "topk(0.05)"), TWO_SHOTS.format("topk(0.05)", "sign")]
    for worst in run_ranks(ranks, books, names, True, False):
        assert worst <= 2e-5


def test_without_scaling_a_residual_weighs_what_the_present_rate_says():
    """The same books do not balance: what a large rate left out is applied at a small one."""
    for worst in run_ranks(2, books, ["topk(0.01)"], False, False):
        assert worst > 1e-2


def untouched() -> bool:
    """A rate that stays, and one of zero, scale nothing."""
    step = compiled(["topk(0.05)"], "plain", ErrorFeedback(scale_with_lr=True))
    group = step.training.optimizers[0].param_groups[0]
    rank, same = dist.get_rank(), True
    plain = compiled(["topk(0.05)"], "plain", ErrorFeedback())
    for i, rate in enumerate((0.1, 0.1, 0.0, 0.1)):
        group["lr"] = plain.training.optimizers[0].param_groups[0]["lr"] = rate
        step(JOB.batch(i, rank))
        plain(JOB.batch(i, rank))
        same = same and torch.equal(step.in_force.state.residuals.arena, plain.in_force.state.residuals.arena)
    return same


def test_a_rate_that_does_not_change_and_a_rate_of_zero_scale_nothing():
    assert run_ranks(2, untouched) == [True, True]
