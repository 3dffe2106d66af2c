"""Steps as an accelerator is given them, run on the CPU: fused updates, clipped buckets and means made on the wire."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.pretended import as_accelerator
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp

Make = Callable[[Any], torch.optim.Optimizer]
OPTIM = torch.optim
STEPS = 6


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights with weight decay, vectors without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: OPTIM.AdamW(m.parameters(), lr=1e-2, eps=1e-4, fused=True),
    "adamw groups": lambda m: OPTIM.AdamW(groups(m), lr=1e-2, eps=1e-4, fused=True),
    "adam": lambda m: OPTIM.Adam(m.parameters(), lr=1e-2, weight_decay=0.1, maximize=True, fused=True),
    "sgd": lambda m: OPTIM.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "dampening": lambda m: OPTIM.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5, maximize=True, fused=True),
    "plain": lambda m: OPTIM.SGD(m.parameters(), lr=0.1, fused=True),
}


def scheduled(optimizer: OPTIM.Optimizer, step: int) -> None:
    """Change every number that schedulers change."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
        if "betas" in group:
            group["betas"] = (0.9 - 0.02 * step, 0.99 - 0.01 * step)
        if group.get("momentum"):
            group["momentum"] = 0.9 - 0.05 * step


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_updates_as_the_fused_optimizer_does_bit_for_bit(name: str):
    job = JOBS["mlp"]
    model = job.build()
    eager = copy.deepcopy(model)
    ours, theirs = OPTIMIZERS[name](model), OPTIMIZERS[name](eager)
    with as_accelerator():
        step = fxcomp.compile_step(model, cross_entropy, ours, job.batch(0), checks=fxcomp.Checks(verify=1))
        assert "aten._fused_" in step.source
        for number in range(STEPS):
            scheduled(ours, number)
            scheduled(theirs, number)
            step(job.batch(number))
            theirs.zero_grad()
            cross_entropy(eager, job.batch(number)).backward()
            theirs.step()
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, other)
        for key, value in theirs.state[other].items():
            assert value is None or torch.equal(ours.state[mine][key], value), key


def trained(name: str, plan: str, clip: float | None, of: str = "transformer") -> tuple[float, str, str]:
    """Train beside DDP; returns the distance of the parameters, the replica's fingerprint, and the source."""
    job, rank = JOBS[of], dist.get_rank()
    model = job.build()
    eager = copy.deepcopy(model)
    ours, theirs = OPTIMIZERS[name](model), OPTIMIZERS[name](eager)
    with as_accelerator():
        step = fxcomp.compile_step(
            model,
            cross_entropy,
            ours,
            job.batch(0, rank),
            max_grad_norm=clip,
            compress=fxcomp.Compress(plan=plan, feedback=fxcomp.ErrorFeedback(allow_diverging=True)),
            checks=fxcomp.Checks(verify=1),
        )
        for number in range(STEPS):
            step(job.batch(number, rank))
    ddp = DistributedDataParallel(eager)
    for number in range(STEPS):
        theirs.zero_grad()
        cross_entropy(ddp, job.batch(number, rank)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(eager.parameters(), clip)
        theirs.step()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    distance = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return distance, replica_fingerprint(model), step.source


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_dense_plan_trains_as_ddp_to_rounding(ranks: int, clip: float | None):
    found = run_ranks(ranks, trained, "adamw groups", "dense", clip)
    assert len({fingerprint for _, fingerprint, _ in found}) == 1
    assert max(distance for distance, *_ in found) < 1e-5
    source = found[0][2]
    assert '"world", "avg")' in source
    assert ("_foreach_norm" in source) == (clip is not None)


def test_buffers_arrive_in_lists():
    found = run_ranks(2, trained, "sgd", "dense", None, "conv")
    assert len({fingerprint for _, fingerprint, _ in found}) == 1
    assert max(distance for distance, *_ in found) < 1e-5
    assert "aten._foreach_copy_" in found[0][2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("plan", ["int8", "powersgd(2)"])
def test_compressed_ranks_stay_bit_identical(plan: str):
    found = run_ranks(2, trained, "sgd", plan, 0.05)
    assert len({fingerprint for _, fingerprint, _ in found}) == 1


def skipped() -> tuple[bool, bool, float]:
    """Take a step, one with an infinite loss on rank 1, and another; say if the second one changed anything."""
    job, rank = JOBS["mlp"], dist.get_rank()
    model = job.build()
    optimizer = OPTIMIZERS["adamw"](model)
    with as_accelerator():
        step = fxcomp.compile_step(
            model, cross_entropy, optimizer, job.batch(0, rank), max_grad_norm=1.0, skip_nonfinite=True,
            compress=fxcomp.Compress(plan="int8"), checks=fxcomp.Checks(verify=1),
        )  # fmt: skip
        step(job.batch(0, rank))
        before = [value.clone() for value in _all_values(model, optimizer)]
        inputs, target = job.batch(1, rank)
        step((inputs * (float("inf") if rank else 1.0), target))
        is_left = all(map(torch.equal, before, _all_values(model, optimizer)))
        step(job.batch(2, rank))
    moved = not all(map(torch.equal, before, _all_values(model, optimizer)))
    return is_left, moved, float(next(iter(optimizer.state.values()))["step"])


def _all_values(model: nn.Module, optimizer: OPTIM.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values(), *states]


def test_a_step_that_is_left_out_leaves_parameters_states_and_counters():
    assert run_ranks(2, skipped) == [(True, True, 2.0)] * 2


def scaled() -> float:
    """Train with a GradScaler beside the same loop without a network; returns the distance."""
    job = JOBS["mlp"]
    model = job.build()
    eager = copy.deepcopy(model)
    ours, theirs = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](eager)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    with as_accelerator():
        step = fxcomp.compile_step(
            model, cross_entropy, ours, job.batch(0), scaler=scalers[0], skip_nonfinite=True,
            checks=fxcomp.Checks(verify=1),
        )  # fmt: skip
        for number in range(STEPS):
            step(job.batch(number))
            scalers[0].update()
    for number in range(STEPS):
        theirs.zero_grad()
        scalers[1].scale(cross_entropy(eager, job.batch(number))).backward()
        scalers[1].step(theirs)
        scalers[1].update()
    return max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


def test_a_scaler_is_followed():
    assert run_ranks(1, scaled)[0] < 1e-5
