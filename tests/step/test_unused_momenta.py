"""Ranks exchange momenta while some batches leave out parameters: as under DDP with `find_unused_parameters=True`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.plan.strategy import DENSE, Strategy

WARM = 3
ALL = (0, 1, 2)
TWO_SHOTS = (
    "compress({0})@gpu > all_to_all@world > decompress@gpu > compress({0})@gpu > all_gather@world > decompress@gpu"
)
STRATEGIES = {
    "dense": DENSE,
    "one shot": Strategy.parse("compress(sign)@gpu > all_gather@world > decompress@gpu"),
    "two shots": Strategy.parse(TWO_SHOTS.format("cmax(4)")),
}
HEADS: list[list[tuple[int, ...]]] = [
    [ALL, ALL, ALL],
    [(0, 1), (2,), (1,)],
    [(2,), (0, 1), (0,)],
    [(0,), (0,), (0,)],
    [(1,), (0,), (0,)],
    [(0,), (1, 2), (1,)],
    [(2,), (2,), (2,)],
    [ALL, (0,), (1,)],
]
"""The heads that each rank uses, step by step. In the warm-up's three steps every head is used by some rank."""

ADAMW = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), **ADAMW),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
}


class Heads(nn.Module):
    """A trunk, and a head for each task; a batch says which ones. The last head's bias is a single value."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(8, 32), nn.ModuleList(nn.Linear(32, size) for size in (4, 3, 1))

    def forward(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        hidden = torch.relu(self.trunk(x))
        return torch.cat([self.heads[head](hidden) for head in heads], 1)


Batch = tuple[Tensor, tuple[int, ...]]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return (model(*batch) - 1).square().mean()


def built() -> Heads:
    torch.manual_seed(0)
    return Heads()


def batch(step: int, rank: int, heads: tuple[int, ...]) -> Batch:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)), heads


def moved(plan: Plan) -> Plan:
    """Let every bucket travel at the momentum, dense ones too."""
    return Plan(tuple(replace(bucket, at=ExchangePoint.MOMENTUM) for bucket in plan.buckets))


def started(optimizer: str, strategy: str, warm: int = WARM, **options: Any):
    model = built()
    made = OPTIMIZERS[optimizer](model)
    plan = moved(plan_in_turns(model, [STRATEGIES[strategy]], 2))
    step = fxcomp.compile_step(
        model,
        loss_of,
        made,
        batch(0, dist.get_rank(), HEADS[1][dist.get_rank()]),  # which leaves something unused, on each rank another
        find_unused_parameters=True,
        compress=fxcomp.Compress(plan=plan, warmup=fxcomp.Warmup(int8_steps=warm)),
        checks=options.pop("checks", fxcomp.Checks(verify=1)),
        costs=fxcomp.CostTable(),
        **options,
    )
    return model, made, step


def used_in(number: int) -> set[int]:
    return {head for heads in HEADS[number][: dist.get_world_size()] for head in heads}


def is_used(name: str, heads: set[int]) -> bool:
    return name.startswith(("trunk", *(f"heads.{head}." for head in heads)))


def everything_of(step: fxcomp.CompiledStep, name: str) -> list[Tensor]:
    """A parameter, its optimizer state and its residuals."""
    parameter = step.in_force.inputs.parameters[name]
    state = step.training.owners[name].state.values()
    residuals = [piece.values for piece in step.in_force.state.residuals.slices.get(name, ())]
    return [each.detach().clone() for each in (parameter, *state, *residuals) if isinstance(each, Tensor)]


def stood_or_moved(optimizer: str, strategy: str) -> tuple[list[str], str, int]:
    """Return what moved though no rank used it, or stood still though one did; every step is verified."""
    rank, wrong = dist.get_rank(), list[str]()
    model, _, step = started(optimizer, strategy)
    for number, heads in enumerate(HEADS):
        step.in_force.enter_stage_of(number)  # now, so that what the freeze changes is no part of the step
        before = {name: everything_of(step, name) for name in step.in_force.inputs.parameters}
        step(batch(number, rank, heads[rank]))
        for name, values in before.items():
            stood = all(map(torch.equal, values, everything_of(step, name)))
            wrong += [f"{name} in step {number}"] if stood is is_used(name, used_in(number)) else []
    assert step.plan.moves_exchange
    return wrong, replica_fingerprint(model), step.steps


@pytest.mark.parametrize(
    ("optimizer", "strategy", "ranks"),
    [
        ("adamw", "dense", 2),
        ("adamw", "one shot", 3),
        ("adamw", "two shots", 2),
        ("nesterov", "one shot", 2),
        ("nesterov", "two shots", 3),
    ],
)
@pytest.mark.one_in(3)
def test_what_no_rank_uses_stands_still_and_replicas_stay_alike(optimizer: str, strategy: str, ranks: int):
    results = run_ranks(ranks, stood_or_moved, optimizer, strategy)
    assert all(wrong == [] for wrong, _, _ in results), results[0][0]
    assert len({fingerprint for _, fingerprint, _ in results}) == 1


def beside_ddp(optimizer: str) -> tuple[float, float]:
    """The distance to DDP with `find_unused_parameters`, by the identity, and how far it went."""
    rank = dist.get_rank()
    model, reference = built(), built()
    plan = moved(plan_in_turns(model, [DENSE], 2))
    compress = fxcomp.Compress(plan=plan)
    first = batch(0, rank, HEADS[1][rank])
    step = fxcomp.compile_step(
        model, loss_of, OPTIMIZERS[optimizer](model), first, find_unused_parameters=True, compress=compress
    )
    theirs, ddp = OPTIMIZERS[optimizer](reference), DistributedDataParallel(reference, find_unused_parameters=True)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for number, heads in enumerate(HEADS[1:] + HEADS):
        given = batch(number, rank, heads[rank])
        step(given)
        theirs.zero_grad()
        loss_of(ddp, given).backward()
        theirs.step()
    mine, other = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, reference))
    return float((mine - other).norm()), float((mine - start).norm())


@pytest.mark.parametrize(("optimizer", "ranks"), [("sgd", 2), ("nesterov", 3)])
def test_by_the_identity_a_step_is_that_of_ddp(optimizer: str, ranks: int):
    for off, went in run_ranks(ranks, beside_ddp, optimizer):
        assert off < 1e-5 * went


class Formula:
    """AdamW until WARM, then momenta in units of a frozen second moment, all ranks in one; what none uses stays."""

    def __init__(self) -> None:
        self.model = built()
        self.kept = {
            name: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0}
            for name, p in self.model.named_parameters()
        }

    def step(self, number: int) -> None:
        (first, second), parameters = ADAMW["betas"], dict(self.model.named_parameters())
        of_ranks: list[dict[str, Tensor | None]] = []
        for rank in range(dist.get_world_size()):
            loss = loss_of(self.model, batch(number, rank, HEADS[number][rank]))
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            of_ranks.append(dict(zip(parameters, found, strict=True)))
        for name, p in parameters.items():
            gradients, kept = [each[name] for each in of_ranks], self.kept[name]
            if number == WARM:
                kept["v"].clamp_(min=0.01 * float(kept["v"].double().mean()))
                kept["d"] = (kept["v"] / (1 - second ** kept["t"])).sqrt() + 1e-8
            if all(gradient is None for gradient in gradients):
                continue
            mean = torch.stack([torch.zeros_like(p) if g is None else g for g in gradients]).mean(0)
            kept["t"] += 1
            kept["m"] = first * kept["m"] + (1 - first) * mean
            if number < WARM:
                kept["v"] = second * kept["v"] + (1 - second) * mean**2
            d = kept["d"] if number >= WARM else (kept["v"] / (1 - second ** kept["t"])).sqrt() + 1e-8
            with torch.no_grad():
                p.mul_(1 - ADAMW["lr"] * ADAMW["weight_decay"])
                p.sub_(ADAMW["lr"] / (1 - first ** kept["t"]) * kept["m"] / d)


def beside_the_formula() -> tuple[float, float]:
    rank, reference = dist.get_rank(), Formula()
    model, optimizer = built(), None
    optimizer = OPTIMIZERS["adamw"](model)
    plan = moved(plan_in_turns(model, [DENSE], 2))
    compress = fxcomp.Compress(plan=plan, warmup=fxcomp.Warmup(dense_steps=WARM))
    first = batch(0, rank, HEADS[1][rank])
    step = fxcomp.compile_step(model, loss_of, optimizer, first, find_unused_parameters=True, compress=compress)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for number, heads in enumerate(HEADS):
        step(batch(number, rank, heads[rank]))
        reference.step(number)
    assert step.plan.moves_exchange
    counts = {name: int(owner.state["step"]) for name, owner in step.training.owners.items()}
    assert counts == {name: kept["t"] for name, kept in reference.kept.items()}
    assert len(set(counts.values())) > 1, "heads have been updated in other steps than the trunk"
    mine, other = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, reference.model))
    return float((mine - other).norm()), float((mine - start).norm())


def test_adam_follows_the_formula_for_what_some_rank_uses():
    for off, went in run_ranks(3, beside_the_formula):
        assert off < 1e-4 * went


def owed(step: fxcomp.CompiledStep, name: str) -> Tensor:
    """Add up what all ranks owe the mean of one parameter's momenta."""
    whole = torch.zeros(step.training.owners[name].parameter.numel())
    for piece in step.in_force.state.residuals.slices.get(name, ()):
        piece.add_to(whole)
    dist.all_reduce(whole)
    return whole


def off_the_sums(strategy: str) -> list[float]:
    """Of each step the largest relative error of m + owed: beta m + the mean gradient + what was owed before."""
    rank, worst = dist.get_rank(), list[float]()
    model, _, step = started("sgd", strategy, warm=0)
    names = list(step.in_force.inputs.parameters)
    for number, heads in enumerate(HEADS):
        given = batch(number, rank, heads[rank])
        found = torch.autograd.grad(loss_of(model, given), list(model.parameters()), allow_unused=True)
        wanted: dict[str, Tensor] = {}
        for name, p, gradient in zip(names, model.parameters(), found, strict=True):
            mean = torch.zeros_like(p) if gradient is None else gradient.clone()
            dist.all_reduce(mean)
            entering = mean / dist.get_world_size() + 0.1 * p.detach()
            before = step.training.owners[name].state.get("momentum_buffer")
            before = torch.zeros_like(p) if before is None else before
            if not is_used(name, used_in(number)):
                wanted[name] = before.flatten() + owed(step, name)
            else:
                wanted[name] = (0.9 * before + entering).flatten() + owed(step, name)
        step(given)
        after = {n: step.training.owners[n].state["momentum_buffer"].flatten() + owed(step, n) for n in names}
        worst.append(max(float((after[n] - w).norm() / w.norm().clamp(min=1e-9)) for n, w in wanted.items()))
    return worst


@pytest.mark.parametrize(("strategy", "ranks"), [("one shot", 2), ("two shots", 3)])
def test_what_is_owed_and_what_arrives_add_up(strategy: str, ranks: int):
    for worst in run_ranks(ranks, off_the_sums, strategy):
        assert len(worst) == len(HEADS)
        assert max(worst) < 1e-4


def on_and_on(job: Any, batches: Sequence[Batch], restarts: Sequence[int]) -> tuple[list[bool], dict[int, str]]:
    """Train, and go on in other jobs from the states after so many steps.

    Returns in which steps the first job exchanges momenta, and the fingerprint of each job; its own is that of step 0.
    """
    saved, moves = dict[int, list[Any]](), list[bool]()
    for number, each in enumerate(batches):
        if number in restarts:
            saved[number] = copy.deepcopy([job[0].state_dict(), job[1].state_dict(), job[2].checkpoint()])
        job[2](each)
        moves.append(job[2].plan.moves_exchange)
    found = {0: replica_fingerprint(job[0])}
    for first, states in saved.items():
        other = started("adamw", "two shots")
        for part, state in zip(other, states, strict=True):
            part.load_state_dict(state)
        for each in batches[first:]:
            other[2](each)
        found[first] = replica_fingerprint(other[0])
    return moves, found


RESTARTS = (1, WARM, WARM + 1, 6)


def restarted() -> dict[int, str]:
    rank = dist.get_rank()
    batches = [batch(number, rank, heads[rank]) for number, heads in enumerate(HEADS)]
    return on_and_on(started("adamw", "two shots"), batches, RESTARTS)[1]


def test_a_restart_goes_on_to_the_bit():
    results = run_ranks(3, restarted)
    assert set(results[0]) == {0, *RESTARTS}
    assert len({fingerprint for found in results for fingerprint in found.values()}) == 1, results


def accumulated() -> tuple[list[str], str]:
    """Of groups of two micro-batches, what moved or stood still wrongly; each group uses two lines of HEADS."""
    rank, wrong = dist.get_rank(), list[str]()
    model, _, step = started("adamw", "two shots", warm=1, accumulate=2)
    for group in range(len(HEADS) // 2):
        step.in_force.enter_stage_of(group)
        before = {name: everything_of(step, name) for name in step.in_force.inputs.parameters}
        numbers = (2 * group, 2 * group + 1)
        heads = [HEADS[number] if group != 2 else HEADS[3] for number in numbers]
        for number, of_ranks in zip(numbers, heads, strict=True):
            step(batch(number, rank, of_ranks[rank]))
        used = {head for of_ranks in heads for mine in of_ranks[: dist.get_world_size()] for head in mine}
        for name, values in before.items():
            stood = all(map(torch.equal, values, everything_of(step, name)))
            wrong += [f"{name} in group {group}"] if stood is is_used(name, used) else []
    assert step.plan.moves_exchange
    return wrong, replica_fingerprint(model)


def test_a_group_uses_what_one_of_its_micro_batches_does():
    results = run_ranks(2, accumulated)
    assert [wrong for wrong, _ in results] == [[], []]
    assert len({fingerprint for _, fingerprint in results}) == 1


# The freeze waits

LATE: list[tuple[int, ...]] = [(0, 1), (0, 1), (0, 1), (0, 1), (0, 2), (0,), (0, 2), (0, 1), ALL, (1,), (0,)]
"""The heads of rank 0; the others use head 0. Head 2 is used in step 4 first, and for the third time in step 8."""


def late() -> dict[str, Any]:
    """Train with a head that the warm-up never uses, and go on from states around what follows."""
    rank = dist.get_rank()
    job = started("adamw", "two shots")
    batches = [batch(number, rank, heads if rank == 0 else (0,)) for number, heads in enumerate(LATE)]
    moves, found = on_and_on(job, batches, (2, 3, 5, 9, 10))
    notes = [note for note in job[2].notes if "go on exchanging gradients" in note]
    return {"moves": moves, "notes": notes, "fingerprints": found}


def test_the_freeze_waits_for_a_parameter_that_the_warm_up_has_not_used():
    results = run_ranks(2, late)
    assert all(each["moves"] == [number >= 9 for number in range(len(LATE))] for each in results), results[0]["moves"]
    for each in results:
        assert len(each["notes"]) == 1
        assert each["notes"][0].startswith("step 3: ")
        assert "'heads.2." in each["notes"][0]
        assert "updated in 0 steps so far" in each["notes"][0]
        assert len(each["fingerprints"]) == 6
    assert len({fingerprint for each in results for fingerprint in each["fingerprints"].values()}) == 1, results


def rolled_back() -> set[str]:
    """Go back from beyond a freeze that was put off to a state from before it was, in the same process."""
    rank, found = dist.get_rank(), set[str]()
    job, saved = started("adamw", "two shots"), list[Any]()
    for goes_back in (False, True):
        if goes_back:
            for each, state in zip(job, saved, strict=True):
                each.load_state_dict(state)
        for number in range(2 if goes_back else 0, len(LATE)):
            if number == 2 and not goes_back:
                saved = copy.deepcopy([each.state_dict() for each in job])
            job[2](batch(number, rank, LATE[number] if rank == 0 else (0,)))
        found.add(replica_fingerprint(job[0]))
    return found


def test_a_freeze_that_was_put_off_waits_again_where_a_job_goes_back():
    assert len(set.union(*run_ranks(2, rolled_back))) == 1


def without_the_optimizers_state() -> tuple[bool, list[str]]:
    """Go on at the freeze with the step's state alone."""
    rank, job = dist.get_rank(), started("adamw", "two shots")
    for number in range(WARM):
        job[2](batch(number, rank, HEADS[number][rank]))
    other = started("adamw", "two shots")
    other[2].load_state_dict(job[2].state_dict())
    other[2](batch(WARM, rank, HEADS[WARM][rank]))
    return other[2].plan.moves_exchange, other[2].notes


def test_a_freeze_waits_where_the_optimizers_state_was_not_loaded():
    for moves, notes in run_ranks(2, without_the_optimizers_state):
        assert not moves
        assert any("has been updated in 0 steps so far" in note for note in notes)
