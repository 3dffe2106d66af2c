"""Parameters that get a gradient for some batches only: as under DDP with `find_unused_parameters=True`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.errors import StepChanged


class Heads(nn.Module):
    """A trunk, and a head for each task; a batch says which."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(8, 32), nn.ModuleList(nn.Linear(32, 4) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.relu(self.trunk(x)))


def loss_of(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
    return model(*batch).square().mean()


def built() -> Heads:
    torch.manual_seed(0)
    return Heads()


def batch(step: int, rank: int, head: int) -> tuple[Tensor, int]:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)), head


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}

HEADS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (0, 0), (0, 2)]
"""Which head each rank uses, step by step."""

TWO_SHOTS = (
    "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int4)@gpu > all_gather@world > decompress@gpu"
)


def everything_of(step: fxcomp.CompiledStep, name: str) -> list[Tensor]:
    """A parameter, its optimizer state and its residuals."""
    parameter = step.in_force.inputs.parameters[name]
    state = step.training.owners[name].state.values()
    residuals = [piece.values for piece in step.in_force.state.residuals.slices.get(name, ())]
    return [each.detach() for each in (parameter, *state, *residuals) if isinstance(each, Tensor)]


def distance(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


def trained(optimizer: str, plan: str, max_grad_norm: float | None) -> tuple[float, list[str], float]:
    """Distance to DDP, what moved though no rank used it or stood still though one did, and a digest."""
    rank, model, reference = dist.get_rank(), built(), built()
    mine, theirs = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, reference))
    ddp = DistributedDataParallel(reference, find_unused_parameters=True)
    step = fxcomp.compile_step(
        model,
        loss_of,
        mine,
        batch(0, rank, 0),
        max_grad_norm=max_grad_norm,
        find_unused_parameters=True,
        compress=plan,
        checks=fxcomp.Checks(verify=3),
    )
    assert "leaves 4 of 8 parameters unused (heads.1.weight, heads.1.bias, heads.2.weight, ...)" in step.notes[0]
    wrong: list[str] = []
    names = list(step.in_force.inputs.parameters)
    for number, heads in enumerate(HEADS):
        given = batch(number, rank, heads[rank])
        before = {name: [each.clone() for each in everything_of(step, name)] for name in names}
        step(given)
        for name, values in before.items():
            stood = all(map(torch.equal, values, everything_of(step, name)))
            is_used = name.startswith(("trunk", *(f"heads.{head}." for head in heads)))
            wrong += [f"{name} in step {number}"] if stood is is_used else []
        theirs.zero_grad()
        loss_of(ddp, given).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm)
        theirs.step()
    return distance(model, reference), wrong, sum(p.double().sum().item() for p in model.parameters())


def several() -> dict[str, tuple[float, list[str], float]]:
    return {
        "dense": trained("adamw", "dense", 0.1),
        "topk": trained("sgd", "topk(0.1)", 0.1),
        "two shots": trained("adamw", TWO_SHOTS, None),
    }


def test_what_no_rank_uses_stands_still_and_what_one_uses_gets_the_mean_with_zeros():
    mine, theirs = run_ranks(2, several)
    for name, (apart, wrong, digest) in mine.items():
        assert wrong == [] == theirs[name][1], name
        assert digest == theirs[name][2], "ranks are apart"
        assert apart == 0 if name == "dense" else apart < 0.1, name


def test_on_one_rank_it_is_eager_while_parameters_freeze_and_thaw():
    model, reference = built(), built()
    mine, theirs = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, reference))
    step = fxcomp.compile_step(
        model, loss_of, mine, batch(0, 0, 0), find_unused_parameters=True, checks=fxcomp.Checks(verify=1)
    )
    for number, (is_frozen, head) in enumerate([(False, 0), (True, 0), (True, 1), (False, 1), (False, 0)]):
        for each in (model, reference):
            each.trunk.requires_grad_(not is_frozen)
        given = batch(number, 0, head)
        step(given)
        theirs.zero_grad()
        loss_of(reference, given).backward()
        theirs.step()
        assert distance(model, reference) == 0


def test_what_waits_for_a_parameter_goes_on_waiting_while_nobody_uses_it():
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxcomp.compile_step(model, loss_of, optimizer, batch(0, 0, 0), find_unused_parameters=True)
    waiting = step.in_force.state.owed
    waiting["heads.1.bias"] = torch.ones(4)
    before = model.heads[1].bias.detach().clone()
    step(batch(0, 0, 0))
    assert torch.equal(waiting["heads.1.bias"], torch.ones(4))
    assert torch.equal(model.heads[1].bias, before)
    step(batch(0, 0, 1))
    assert not waiting, "the first gradient has brought it"


def test_without_the_option_other_gradients_are_refused_and_the_option_named():
    model = built()
    with pytest.warns(UserWarning, match="does not depend on 'heads"):
        step = fxcomp.compile_step(model, loss_of, OPTIMIZERS["sgd"](model.parameters()), batch(0, 0, 0))
    with pytest.raises(StepChanged, match=r"(?s)other parameters get a gradient.*find_unused_parameters=True"):
        step(batch(0, 0, 1))


def test_a_parameter_that_was_frozen_when_the_step_was_compiled_needs_another_step():
    model = built()
    model.trunk.requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = fxcomp.compile_step(model, loss_of, optimizer, batch(0, 0, 0), find_unused_parameters=True)
    before = copy.deepcopy(model.trunk.state_dict())
    step(batch(0, 0, 0))
    assert all(torch.equal(before[name], value) for name, value in model.trunk.state_dict().items())
    model.trunk.requires_grad_(True)
    with pytest.raises(StepChanged, match="compile_step again"):
        step(batch(0, 0, 0))


GROUPS = [((0, 1), (0, 0)), ((1, 1), (1, 1)), ((0, 2), (0, 0)), ((0, 0), (0, 1))]
"""The heads of two micro-batches of each rank, step by step."""


def accumulated(plan: str) -> tuple[float, list[str], float]:
    """Distance to eager sums over both ranks, what stood still or moved wrongly, and a digest."""
    rank, model, reference = dist.get_rank(), built(), built()
    mine, theirs = (OPTIMIZERS["sgd"](m.parameters()) for m in (model, reference))
    step = fxcomp.compile_step(
        model, loss_of, mine, batch(0, rank, 0), find_unused_parameters=True, accumulate=2, compress=plan
    )
    wrong: list[str] = []
    names = list(step.in_force.inputs.parameters)
    for number, heads in enumerate(GROUPS):
        before = {name: [each.clone() for each in everything_of(step, name)] for name in names}
        for place in range(2):
            step(batch(2 * number + place, rank, heads[rank][place]))
            for other in range(2):
                (loss_of(reference, batch(2 * number + place, other, heads[other][place])) / 4).backward()
        theirs.step()
        theirs.zero_grad()
        used = {head for each in heads for head in each}
        for name, values in before.items():
            stood = all(map(torch.equal, values, everything_of(step, name)))
            is_used = name.startswith(("trunk", *(f"heads.{head}." for head in used)))
            wrong += [f"{name} in step {number}"] if stood is is_used else []
    return distance(model, reference), wrong, sum(p.double().sum().item() for p in model.parameters())


def all_accumulated() -> list[tuple[float, list[str], float]]:
    return [accumulated("dense"), accumulated("topk(0.1)")]


def test_a_group_uses_what_one_of_its_micro_batches_does():
    one, other = run_ranks(2, all_accumulated)
    for mine, theirs in zip(one, other, strict=True):
        assert mine[1] == theirs[1] == []
        assert mine[2] == theirs[2]
    assert one[0][0] <= 1e-6
