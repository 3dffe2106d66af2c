"""A compiled step trains as eager PyTorch does: DDP where the plan is dense, and the same bits on every rank always.

Ranks train a case both ways and report numbers, which the test then judges.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, Job, cross_entropy
from helpers.plans import TWO_HOSTS, plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.capture import step_capture
from fxcomp.compressors import parse_compressor
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Device, Strategy

STEPS = 12


@dataclass(frozen=True)
class Case:
    """A job under a plan, and what varies from step to step."""

    job: str
    optimizer: str = "sgd"
    plan: str = "dense"
    lengths: str = "equal"
    scheduler: str = "none"
    clip: float | None = None

    def __str__(self) -> str:
        extra = [self.lengths, self.scheduler, f"clip={self.clip}" if self.clip else "none"]
        return "-".join(
            [self.job, self.optimizer, self.plan, *(text for text in extra if text not in ("equal", "none"))]
        )

    @property
    def is_dense(self) -> bool:
        return self.plan in ("dense", "hierarchical dense")


@dataclass(frozen=True)
class Numbers:
    """Hold one rank's distances to eager DDP, its replica's fingerprint, and its number of captures."""

    parameters: float = 0.0
    buffers: float = 0.0
    losses: float = 0.0
    last_loss: float = 0.0
    fingerprint: str = ""
    captures: int = 0


# Cases

DENSE_2 = [
    *(Case("mlp", name) for name in ("sgd", "adamw_default")),
    *(Case(name, "adamw") for name in ("conv", "dropout")),
    Case("transformer", "adamw", clip=0.05),
    Case("mlp", "adamw", scheduler="one_cycle"),
    Case("conv", "sgd", lengths="changing"),
]
"""SGD with dampening and Adam step alone below, exactly as eager."""
DENSE_3 = [Case("mlp"), Case("dropout", "adamw")]
LOSSY_2 = [
    *(Case("mlp", plan=plan) for plan in ("bf16", "int8", "topk(0.01)")),
    Case("conv", "adamw", "int8"),
    Case("conv", "adamw", "offload"),
    Case("transformer", "adamw", "sign", clip=0.05),
    Case("mlp", plan="auto"),
]
DENSE_4 = [Case("mlp", plan="hierarchical dense")]
LOSSY_4 = [Case("mlp", plan="hierarchical")]
FAST = {2: [*DENSE_2, *LOSSY_2], 3: DENSE_3, 4: [*DENSE_4, *LOSSY_4]}
"""By number of ranks."""

SLOW = {
    2: [
        *(Case("mlp", name) for name in ("dampening", "adam")),
        Case("transformer"),
        Case("mlp", "sgd", scheduler="step"),
        Case("dropout", "sgd", lengths="changing"),
        *(Case("transformer", "adamw", plan, lengths="changing") for plan in ("topk(0.01)", "offload")),
        Case("transformer", "sgd", lengths="changing"),
        Case("mlp", clip=0.05),
        Case("conv", plan="auto"),
    ],
    3: [Case("conv"), Case("transformer", "adamw")],
    4: [
        Case("conv", plan="hierarchical dense"),
        Case("transformer", "adamw", "hierarchical dense", "changing"),
        Case("transformer", "adamw", "hierarchical", lengths="changing"),
    ],
}


# On the ranks


def follow_eager(case: Case) -> Numbers:
    job, rank, ranks = JOBS[case.job], dist.get_rank(), dist.get_world_size()
    model = job.build()
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = (OPTIMIZERS[case.optimizer](m.parameters()) for m in (model, reference))
    schedulers = [SCHEDULERS[case.scheduler](o) for o in (optimizer, reference_optimizer)]

    with counted_captures() as captures:
        step = fxcomp.compile_step(
            model,
            cross_entropy,
            optimizer,
            _batch(job, case, 0, rank),
            max_grad_norm=case.clip,
            cluster=TWO_HOSTS if ranks == 4 else None,
            compress=fxcomp.Compress(
                plan=_plan(case.plan, model), feedback=fxcomp.ErrorFeedback(allow_diverging=case.plan != "auto")
            ),
            checks=fxcomp.Checks(verify=1),
        )
        losses: list[float] = []
        torch.manual_seed(7 + rank)
        for i in range(STEPS):
            losses.append(step(_batch(job, case, i, rank)).item())
            _advance(schedulers[0])
    fingerprint = replica_fingerprint(model)
    if not case.is_dense:
        return Numbers(last_loss=losses[-1], fingerprint=fingerprint, captures=len(captures))

    ddp = DistributedDataParallel(reference)
    expected: list[float] = []
    torch.manual_seed(7 + rank)
    for i in range(STEPS):
        reference_optimizer.zero_grad()
        loss = cross_entropy(ddp, _batch(job, case, i, rank))
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), case.clip)
        reference_optimizer.step()
        _advance(schedulers[1])
        expected.append(loss.item())
    # DDP hands out rank 0's buffers before a forward pass, a compiled step after it.
    for buffer in reference.buffers():
        dist.broadcast(buffer, 0)
    return Numbers(
        parameters=_distance(model.parameters(), reference.parameters()),
        buffers=_distance(model.buffers(), reference.buffers()),
        losses=max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        last_loss=losses[-1],
        fingerprint=fingerprint,
        captures=len(captures),
    )


class counted_captures:
    """Counts how often a step is captured while it is open."""

    def __enter__(self) -> list[str]:
        self.original = step_capture.capture
        captures: list[str] = []

        def counting(*args: Any, **kwargs: Any) -> Any:
            captures.append("capture")
            return self.original(*args, **kwargs)

        step_capture.capture = counting
        return captures

    def __exit__(self, *_: object) -> None:
        step_capture.capture = self.original


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,  # noqa: ARG005
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1),
}

CHANGING = {0: [5, 6, 9, 11, 6], 1: [7, 8, 10, 12, 15], 2: [4, 4, 4, 9, 3], 3: [6, 5, 8, 7, 5]}
"""Lengths of batches that differ from rank to rank and from step to step. From 16 on torch convolves otherwise."""


def _batch(job: Job, case: Case, step: int, rank: int) -> Any:
    length = CHANGING[rank][step % 5] if case.lengths == "changing" else None
    return job.batch(step, rank, length)


def _advance(scheduler: Any) -> None:
    if scheduler is not None:
        scheduler.step()


def _plan(name: str, model: nn.Module) -> Plan | str | None:
    int8, topk, sign, bf16 = (parse_compressor(text) for text in ("int8", "topk(0.05)", "sign", "bf16"))
    flat, split, cpu = Strategy.flat, Strategy.hierarchical, Device.CPU
    by_hand = {
        "offload": [flat(int8, cpu), flat(None), flat(topk, cpu), flat(sign), flat(bf16, cpu)],
        "hierarchical": [split(int8), split(None), split(topk, cpu), flat(int8), split(sign)],
        "hierarchical dense": [split(None), flat(None)],
    }
    if name not in by_hand:
        return None if name == "auto" else name
    return plan_in_turns(model, by_hand[name])


def _distance(ours: Iterator[Tensor], theirs: Iterator[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max([(a.detach().double() - b.detach().double()).abs().max().item() for a, b in pairs], default=0.0)


# What must hold


def cases() -> Any:
    """All cases; those of `SLOW` are marked."""
    return [
        pytest.param(ranks, case, id=f"{ranks}-{case}", marks=[pytest.mark.slow] if cases is SLOW else [])
        for cases in (FAST, SLOW)
        for ranks in cases
        for case in cases[ranks]
    ]


def tolerance_of(ranks: int, case: Case) -> float:
    """SGD adds in another order than DDP only with 3 ranks and more; Adam divides by small numbers."""
    if case.optimizer in ("sgd", "dampening") and ranks == 2:
        return 1e-6
    return 1e-5


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("ranks", "case"), cases())
def test_ranks_hold_the_same_bits_and_follow_eager_ddp_where_nothing_is_lost(ranks: int, case: Case):
    found: list[Numbers] = run_ranks(ranks, follow_eager, case)
    assert len({numbers.fingerprint for numbers in found}) == 1
    assert all(math.isfinite(numbers.last_loss) for numbers in found)
    for numbers in found if case.is_dense else ():
        assert numbers.losses <= (1e-4 if case.optimizer == "adamw_default" else 1e-5)
        if case.optimizer != "adamw_default":
            assert numbers.parameters <= tolerance_of(ranks, case)
            assert numbers.buffers <= tolerance_of(ranks, case)
    if ranks == 2:  # from the third length on one capture serves all; nothing but shapes leads to another one
        assert [numbers.captures for numbers in found] == [1 if case.lengths == "equal" else 3] * ranks


# One process


@pytest.mark.parametrize(
    ("job_name", "optimizer_name"),
    [
        *(("mlp", name) for name in ("plain", "sgd", "dampening", "adam", "adamw_default")),
        *(("conv", name) for name in ("sgd", "adamw_default")),
        ("transformer", "dampening"),
        *(("dropout", name) for name in ("sgd", "adamw_default")),
    ],
)
def test_alone_a_step_is_eager_exactly(job_name: str, optimizer_name: str):
    job = JOBS[job_name]
    model = job.build()
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = (OPTIMIZERS[optimizer_name](m.parameters()) for m in (model, reference))
    step = fxcomp.compile_step(model, cross_entropy, optimizer, job.batch(0), checks=fxcomp.Checks(verify=1))
    torch.manual_seed(7)
    ours = [step(job.batch(i)).item() for i in range(5)]
    torch.manual_seed(7)
    for i in range(5):
        reference_optimizer.zero_grad()
        loss = cross_entropy(reference, job.batch(i))
        loss.backward()
        reference_optimizer.step()
        assert ours[i] == loss.item()
    for (name, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        for key, value in reference_optimizer.state[b].items():
            if isinstance(value, Tensor):
                assert torch.equal(optimizer.state[a][key], value), key
