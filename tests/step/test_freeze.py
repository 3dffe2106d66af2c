"""Momenta owe what gradients owed before the freeze, in their own unit; restarts around it lose nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn

import fxcomp
from fxcomp.graph.moments import LARGEST_MEAN
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.step.compiled_step import CompiledStep

JOB = JOBS["mlp"]
WARM, STEPS = 5, 9
ONE_SHOT = "compress({0})@gpu > all_gather@world > decompress@gpu"
TWO_SHOTS = (
    "compress({0})@gpu > all_to_all@world > decompress@gpu > compress({0})@gpu > all_gather@world > decompress@gpu"
)

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1),
    "adam with decay": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.8, 0.99)),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
}

Job = tuple[nn.Module, torch.optim.Optimizer, CompiledStep]


def started(optimizer: str, strategy: str, warmup: dict[str, int], *, moves: bool = True) -> Job:
    """Compile a job whose ranks exchange momenta after a warm-up; or gradients, by the same strategy."""
    model = JOB.build()
    made = OPTIMIZERS[optimizer](model)
    plan: Plan = plan_in_turns(model, [Strategy.parse(strategy)], 2)
    compress = fxcomp.Compress(plan=plan.at_momenta() if moves else plan, warmup=fxcomp.Warmup(**warmup))
    batch, checks = JOB.batch(0, dist.get_rank()), fxcomp.Checks(verify=1)
    step = fxcomp.compile_step(
        model, cross_entropy, made, batch, compress=compress, checks=checks, costs=fxcomp.CostTable()
    )
    return model, made, step


def train(step: CompiledStep, first: int, end: int) -> None:
    for number in range(first, end):
        step(JOB.batch(number, dist.get_rank()))


def kept_by(job: Job) -> list[Any]:
    return copy.deepcopy([each.state_dict() for each in job])


def take_back(saved: list[Any], job: Job) -> None:
    for each, state in zip(job, copy.deepcopy(saved), strict=True):  # an optimizer goes on in the tensors it is given
        each.load_state_dict(state)


def owed(step: CompiledStep) -> dict[str, Tensor]:
    """Add up what all ranks owe of each parameter, to the mean gradient or the mean of momenta."""
    state, sizes = step.in_force.state, {n: each.parameter.numel() for n, each in step.training.owners.items()}
    found: dict[str, Tensor] = {}
    for name, size in sizes.items():
        whole = state.owed.get(name, torch.zeros(size)) / dist.get_world_size()
        for piece in state.residuals.slices.get(name, ()):
            piece.add_to(whole)
        dist.all_reduce(whole)
        found[name] = whole
    return found


def in_gradients(step: CompiledStep, name: str, value: Tensor) -> Tensor:
    """Change what is owed to momenta into what is owed to gradients: by d / (1 - beta1)."""
    owner = step.training.owners[name]
    if "exp_avg_sq" not in owner.state:
        return value
    (beta1, beta2), kept = owner.options["betas"], owner.state
    d = (kept["exp_avg_sq"] / (1 - beta2 ** float(kept["step"]))).sqrt() + owner.options["eps"]
    return value * d.flatten() / (1 - beta1)


def over_the_freeze(optimizer: str, shots: str, loads: bool) -> list[tuple[float, float]]:
    """Of each parameter the norm of what is owed before the freeze, and how far it is off after it."""
    if loads:
        _, made, before = started(optimizer, shots.format("int4"), {}, moves=False)
        _, its, step = started(optimizer, shots.format("cmax(4)"), {"int8_steps": WARM})
        train(before, 0, WARM - 1)
        step.load_state_dict(before.state_dict())
        its.load_state_dict(made.state_dict())
        train(step, WARM - 1, WARM)
    else:
        step = started(optimizer, shots.format("cmax(4)"), {"int8_steps": 2, "int4_steps": WARM - 2})[2]
        train(step, 0, WARM)
    mine = owed(step)
    assert not step.in_force.plan.moves_exchange
    step.in_force.enter_stage_of(WARM)
    assert step.in_force.plan.moves_exchange
    after = {name: in_gradients(step, name, value) for name, value in owed(step).items()}
    train(step, WARM, STEPS)
    return [(float(mine[name].norm()), float((after[name] - mine[name]).norm())) for name in mine]


@pytest.mark.parametrize(
    ("optimizer", "shots", "loads", "ranks"),
    [
        ("adamw", ONE_SHOT, False, 3),
        ("adamw", TWO_SHOTS, False, 2),
        ("adam with decay", TWO_SHOTS, False, 3),
        ("sgd", ONE_SHOT, False, 2),
        ("sgd", TWO_SHOTS, False, 3),
        ("adamw", ONE_SHOT, True, 2),
        ("adamw", TWO_SHOTS, True, 3),
        ("sgd", TWO_SHOTS, True, 2),
    ],
)
@pytest.mark.one_in(3)
def test_what_gradients_owe_is_owed_by_momenta(optimizer: str, shots: str, loads: bool, ranks: int):
    for found in run_ranks(ranks, over_the_freeze, optimizer, shots, loads):
        assert any(norm for norm, _ in found), "int4 leaves something out"
        for norm, off in found:
            assert off <= 1e-5 * norm


def restarted() -> dict[str, str]:
    """Fingerprints without and with restarts: from the states of a job in others, and in itself, back from the end."""
    warmup, saved = {"int4_steps": WARM}, dict[int, list[Any]]()
    job = started("adamw", TWO_SHOTS.format("cmax(4)"), warmup)
    for number in range(STEPS):
        if number in (1, WARM - 1, WARM, WARM + 1):
            saved[number] = kept_by(job)
        train(job[2], number, number + 1)
    found = {"whole": replica_fingerprint(job[0])}
    for steps, states in saved.items():
        for way in ("elsewhere", "back"):
            other = job if way == "back" else started("adamw", TWO_SHOTS.format("cmax(4)"), warmup)
            take_back(states, other)
            train(other[2], steps, STEPS)
            found[f"{way} at {steps}"] = replica_fingerprint(other[0])
    return found


def test_a_restart_goes_on_to_the_bit():
    results = run_ranks(2, restarted)
    assert len(results[0]) == 9
    assert len({fingerprint for found in results for fingerprint in found.values()}) == 1, results


def after_a_jump(optimizer: str) -> list[float]:
    """Return how far values go at most, in steps after the inputs grew, in learning rates and without decay."""
    model, made, step = started(optimizer, TWO_SHOTS.format("cmax(4)"), {"int8_steps": WARM})
    train(step, 0, WARM + 2)
    (group,), went = made.param_groups, list[float]()
    for number in range(WARM + 2, WARM + 5):
        before = [p.detach().clone() for p in model.parameters()]
        inputs, target = JOB.batch(number, dist.get_rank())
        step((inputs * 1e5, target))
        steps = number + 1
        shrunk = 1 - group["lr"] * group["weight_decay"] if isinstance(made, torch.optim.AdamW) else 1.0
        moved = [float((p - shrunk * b).abs().max()) for p, b in zip(model.parameters(), before, strict=True)]
        went.append(max(moved) * (1 - group["betas"][0] ** steps) / group["lr"])
    return went


@pytest.mark.parametrize("optimizer", ["adamw", "adam with decay"])
def test_a_jump_moves_no_value_beyond_the_reach_of_adam(optimizer: str):
    for went in run_ranks(2, after_a_jump, optimizer):
        assert max(went) <= LARGEST_MEAN * 1.001
        assert max(went) > LARGEST_MEAN / 2, "what the data ask for is cut off"
