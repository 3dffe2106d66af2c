"""Train small models on the late device by many schedules, beside the same on the CPU: every bit must be the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from helpers import late
from helpers.late import network
from helpers.late.machine import ELSEWHERE
from helpers.plans import plan_in_turns
from helpers.pretended import as_accelerator

STEPS = 3
"""Steps of each schedule."""

ON_POOL = "compress(int8)@cpu > all_gather@world > decompress@cpu"
TWO_SHOTS = (
    "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int4)@gpu > all_gather@world > decompress@gpu"
)


class Heads(nn.Module):
    """A trunk, and two heads of which a batch uses one, or both if it says 2."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(24, 4) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        seen = self.trunk(x)
        return self.heads[0](seen) + self.heads[1](seen) if head == 2 else self.heads[head](seen)


def loss_of(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
    return model(*batch).square().mean()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _adamw_by_tensors(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with two groups, whose rates are tensors on the device."""
    first, *others = list(parameters)
    groups = [{"params": [first], "lr": torch.tensor(0.01)}, {"params": others, "lr": torch.tensor(0.02)}]
    for group in groups:
        group["lr"] = group["lr"].to(first.device)
    return torch.optim.AdamW(groups, foreach=False)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _one_head(_step: int, _rank: int) -> int:
    return 0


def _other_heads(step: int, rank: int) -> int:
    """Let rank 0 use everything in some steps: it waits for nobody then, and is ahead in the next one."""
    return 0 if rank else (2, 0, 1)[step % 3]


@dataclass(frozen=True)
class Case:
    """A way of training."""

    plan: str | Plan = "dense"
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw
    head: Callable[[int, int], int] = _one_head
    options: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False
    has_nan: bool = False
    """A batch of each schedule but the first is not a number, on rank 1."""


IN_TURNS = (
    "compress(int4)@gpu > all_gather@world > decompress@gpu",
    TWO_SHOTS,
    "all_reduce@world",
    "compress(topk(0.2))@gpu > all_gather@world > decompress@gpu",
    ON_POOL,
)


def in_turns() -> Plan:
    """Let each parameter be a bucket, and the strategies take turns."""
    model = Heads()
    del model.heads[1]
    return plan_in_turns(model, [Strategy.parse(text) for text in IN_TURNS])


CASES = {
    "dense": Case(),
    "clipped": Case(options={"max_grad_norm": 0.05}),
    "int8": Case("int8"),
    "top-k": Case("topk(0.1)", _sgd),
    "in the pool": Case(ON_POOL, _sgd),
    "accumulated": Case("int8", options={"accumulate": 2}),
    "unused": Case("int8", head=_other_heads, options={"find_unused_parameters": True}),
    "left out": Case("int8", options={"skip_nonfinite": True}),
    "scaled, rates as tensors": Case(optimizer=_adamw_by_tensors, scaled=True),
    "agreed": Case("powersgd(2)", _sgd),
    "two shots": Case(TWO_SHOTS, options={"skip_nonfinite": True}),
    "in turns, not finite": Case(in_turns(), _sgd, options={"skip_nonfinite": True}, has_nan=True),
    "rates as tensors": Case("int8", _adamw_by_tensors),
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
        if self.case.has_nan and self.count and rank == 1:
            draws[self.count // STEPS % len(draws)][0, 0] = torch.nan
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
        """List all that must be the same on both devices."""
        return [*losses, *self.model.parameters()]


def _on_cpu(values: list[Tensor]) -> list[Tensor]:
    return [value.detach().to("cpu", copy=True) for value in values]


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@dataclass(frozen=True)
class Trained:
    """The outcome of a case."""

    wrong: list[int]
    """The schedules after which it is not what it is on the CPU."""
    waits: dict[str, int]
    """Numbers of waits for the device, by the function of fxcomp that waited; the first schedules are left out."""


class HookTraining(Training):
    """The same under DistributedDataParallel and its hook, with the loop of its user."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device, self.count = case, device, 0
        self.model = Heads().to(device)
        finds_unused = "find_unused_parameters" in case.options
        if not finds_unused:
            del self.model.heads[1]
        self.scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=8.0) if case.scaled else None
        self.optimizer = case.optimizer(self.model.parameters())
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=finds_unused, bucket_cap_mb=0.002)
        self.ddp.register_comm_hook(None, fxcomp.ddp_hook(compress=case.plan, scaler=self.scaler))

    def go_on(self, batches: list[tuple[Tensor, int]]) -> list[Tensor]:
        losses: list[Tensor] = []
        for batch in batches:
            self.optimizer.zero_grad()
            loss = loss_of(self.ddp, batch)
            losses.append(loss.detach())
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self.count += STEPS
        return losses


class ShardedTraining(HookTraining):
    """The same under fully_shard, or sharded and replicated."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device, self.count, self.scaler = case, device, 0, None
        self.model = self.ddp = Heads().to(device)
        del self.model.heads[1]
        ranks, kind = dist.get_world_size(), torch.device(device).type
        replicas = ranks if case.options["replicated"] else 1
        mesh = init_device_mesh(kind, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
        for module in (self.model.trunk, self.model):
            fully_shard(module, mesh=mesh["shard"])
        if case.options["replicated"]:
            self.average = fxcomp.average_replicas(self.model, mesh["replicate"], costs=CostTable(), compress=case.plan)
        else:
            self.average = fxcomp.compress_reduce_scatter(self.model, costs=CostTable(), compress=case.plan)
        self.optimizer = case.optimizer(self.model.parameters())

    def values(self, losses: list[Tensor]) -> list[Tensor]:
        return [*losses, *(parameter.to_local() for parameter in self.model.parameters())]


HOOK_CASES = {
    "hook, int8": Case("int8", _sgd),
    "hook, in the pool": Case(ON_POOL, _sgd),
    "hook, unused and scaled": Case("topk(0.2)", _sgd, _other_heads, {"find_unused_parameters": True}, scaled=True),
    "hook, agreed": Case("powersgd(2)", _sgd),
    "hook, scaled": Case("int8", _sgd, scaled=True),
}

SHARDED_CASES = {
    "sharded": Case("int8", _sgd, options={"replicated": False}),
    "sharded and replicated": Case("int8", _sgd, options={"replicated": True}),
}


def begins(name: str) -> int:
    """Count the schedules in which state is made, and the hook's plan."""
    return 1 if name in CASES else 3


def training_of(name: str, device: str) -> Training:
    if name in SHARDED_CASES:
        return ShardedTraining(SHARDED_CASES[name], device)
    return HookTraining(HOOK_CASES[name], device) if name in HOOK_CASES else Training(CASES[name], device)


def trained(name: str, seeds: Sequence[int]) -> Trained:
    """Train by one schedule after the other, on each rank. The first ones begin, and so does the hook's plan."""
    machine = late.start()
    network.start()
    expected, there = (training_of(name, device) for device in ("cpu", late.DEVICE))
    machine.drain()  # collectives of both devices are gloo's, and come in one order
    wrong: list[int] = []
    waits: Counter[str] = Counter()
    for seed in seeds:
        on_cpu = _on_cpu(expected.values(expected.go_on(expected.batches())))
        batches = there.batches()
        with late.schedule(seed):
            losses = there.go_on(batches)
            waits.update(machine.waits if seed not in seeds[: begins(name)] else {})
        if not all(_is_same(*pair) for pair in zip(on_cpu, _on_cpu(there.values(losses)), strict=True)):
            wrong.append(seed)
    counted: Counter[str] = Counter()
    for where, count in waits.items():
        thread, _, what = where.partition(": ")
        # Torch runs backward on threads of its own; the pool's threads are there to wait.
        if not thread.startswith("fxcomp-pool") and ELSEWHERE not in what:
            counted[what] += count
    return Trained(wrong, dict(counted))


def all_trained(names: Sequence[str], seeds: Sequence[int]) -> dict[str, Trained]:
    """Train each; the CPU is given the operators that a device would be."""
    with as_accelerator():
        return {name: trained(name, seeds) for name in names}
