"""Train small models on the late device by many schedules, beside the same on the CPU: every bit must be the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxcomp
from helpers import late
from helpers.late import network

STEPS = 3
"""Steps of each schedule."""

ON_POOL = "compress(int8)@cpu > all_gather@world > decompress@cpu"


class Heads(nn.Module):
    """A trunk, and two heads of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(24, 4) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x))


def loss_of(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
    return model(*batch).square().mean()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _one_head(_step: int, _rank: int) -> int:
    return 0


@dataclass(frozen=True)
class Case:
    """A way of training."""

    plan: str = "dense"
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw
    head: Callable[[int, int], int] = _one_head
    options: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False


CASES = {
    "dense": Case(),
    "clipped": Case(options={"max_grad_norm": 0.05}),
    "int8": Case("int8"),
    "top-k": Case("topk(0.1)", _sgd),
    "in the pool": Case(ON_POOL, _sgd),
    "accumulated": Case("int8", options={"accumulate": 2}),
    "unused": Case("int8", head=lambda step, rank: step * (rank + 1) % 2, options={"find_unused_parameters": True}),
    "left out": Case("int8", options={"skip_nonfinite": True}),
    "scaled": Case(scaled=True),
}


class Training:
    """A model and its step on a device, which goes on schedule after schedule."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.model = Heads().to(device)
        if "find_unused_parameters" not in case.options:
            del self.model.heads[1]
        self.scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=8.0) if case.scaled else None
        self.count = 0
        self.step = fxcomp.compile_step(
            self.model,
            loss_of,
            case.optimizer(self.model.parameters()),
            self.batches()[0],
            compress=case.plan,
            checks=fxcomp.Checks(verify=0),
            scaler=self.scaler,
            **case.options,
        )

    def batches(self) -> list[tuple[Tensor, int]]:
        """The batches of the next schedule."""
        rank, each = dist.get_rank(), self.case.options.get("accumulate", 1)
        numbers = range(self.count * each, (self.count + STEPS) * each)
        draws = [torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * n + rank)) for n in numbers]
        return [(x.to(self.device), self.case.head(n, rank)) for n, x in zip(numbers, draws, strict=True)]

    def go_on(self, batches: list[tuple[Tensor, int]]) -> list[Tensor]:
        losses: list[Tensor] = []
        for batch in batches:
            losses.append(self.step(batch))
            if self.scaler is not None:
                self.scaler.update()
        self.count += STEPS
        return losses

    def values(self, losses: list[Tensor]) -> list[Tensor]:
        return [value.detach().cpu() for value in (*losses, *self.model.parameters())]


@dataclass(frozen=True)
class Trained:
    """The outcome of a case."""

    wrong: list[int]
    """The schedules after which it is not what it is on the CPU."""
    waits: dict[str, int]
    """Where the main thread waited for the device, and how often in all; but for the first schedule, which begins."""


def trained(name: str, seeds: Sequence[int]) -> Trained:
    """Train by one schedule after the other, on each rank."""
    machine = late.start()
    network.start()
    expected, there = (Training(CASES[name], device) for device in ("cpu", late.DEVICE))
    wrong: list[int] = []
    waits: Counter[str] = Counter()
    for seed in seeds:
        on_cpu = expected.values(expected.go_on(expected.batches()))
        batches = there.batches()
        with late.schedule(seed):
            losses = there.go_on(batches)
            waits.update(machine.waits if seed != seeds[0] else {})
        if not all(map(torch.equal, on_cpu, there.values(losses))):
            wrong.append(seed)
    main = "MainThread: "
    return Trained(wrong, {where.removeprefix(main): n for where, n in waits.items() if where.startswith(main)})


def all_trained(names: Sequence[str], seeds: Sequence[int]) -> dict[str, Trained]:
    return {name: trained(name, seeds) for name in names}
