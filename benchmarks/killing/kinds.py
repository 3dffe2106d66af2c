"""Small jobs by kind: a model, its training step under a frontend of fxcomp, and what a checkpoint of it holds."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers.plans import plan_in_turns
from helpers.scaled import scaler
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.errors import CannotReplan
from fxcomp.frontends.torch_compile import compiled_model
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search import choose
from fxcomp.search.choose import uniform
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.runners import Runner
from fxcomp.step.calendar import Use

WIDTHS = (16, 64, 32, 4)
Batch = tuple[Tensor, Tensor, dict[str, Tensor]]

TWO_SHOTS = (
    "compress(int4(block=32)) > all_to_all@world > decompress"
    " > compress(int4(block=32)) > all_gather@world > decompress"
)
ONE_SHOT = "compress({}) > all_gather@world > decompress"
LOW_RANK = "propose(powersgd(2)) > all_reduce@world > compress(powersgd(2)) > all_reduce@world > decompress"
EVERYWHERE = fxcomp.ErrorFeedback(everywhere=True)


class Model(nn.Module):
    """Three layers and their loss, which is linear in the parameters if `is_linear`."""

    def __init__(self, is_linear: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS))
        self.is_linear = is_linear

    def forward(self, batch: Batch) -> Tensor:
        inputs, target, directions = batch
        if self.is_linear:
            return sum((directions[name] * p).sum() for name, p in self.named_parameters())  # pyright: ignore
        for layer in self.layers:
            inputs = layer(inputs.tanh())
        return (inputs - target).square().mean()


def built(is_linear: bool) -> Model:
    torch.manual_seed(5)
    return Model(is_linear)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch)


SHAPES = {name: tuple(p.shape) for name, p in built(True).named_parameters()}


def directions(number: int, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a linear loss for a batch."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def batch_of(number: int) -> Batch:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * number + rank)
    inputs = torch.randn(6, WIDTHS[0], generator=generator)
    return inputs, inputs[:, : WIDTHS[-1]].cumsum(1), directions(number, rank)


def runners(always: Mapping[str, Plan], _: Any, prices: StepPrices, __: Any) -> tuple[Runner, ...]:
    """Return plans that race: dense, and compressors whose errors are owed."""
    named = [uniform(name, prices.workload, prices.costs, prices.cluster) for name in ("topk(0.1)", "int4")]
    plans = {"dense": always["dense"], "topk": named[0], "int4": named[1]}
    return tuple(Runner(name, plan, 1e3, 0.9, 0.1) for name, plan in plans.items())


class Training(ABC):
    """A job in the middle of training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    micro_batches = 1

    @abstractmethod
    def train(self, number: int) -> None: ...

    @abstractmethod
    def state(self) -> Any: ...

    @abstractmethod
    def load(self, states: Any) -> None: ...

    def phase(self, number: int) -> str:  # noqa: ARG002
        return "stepping"

    def replan(self, number: int) -> None:  # noqa: B027
        """Plan again if this kind of job does."""

    @property
    @abstractmethod
    def plan(self) -> Plan | None: ...


def _optimizer(model: nn.Module, is_linear: bool) -> torch.optim.Optimizer:
    if is_linear:
        return torch.optim.SGD(model.parameters(), lr=1.0)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Compiled(Training):
    """A job under compile_step."""

    def __init__(self, is_linear: bool, strategy: str | None, **options: Any) -> None:
        self.model = built(is_linear)
        at_momenta, self.replans_at = options.pop("at_momenta", False), list(options.pop("replans_at", ()))
        self.micro_batches = options.get("accumulate", 1)
        self.scaler = options.get("scaler")
        self.optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=1e-2) if at_momenta else _optimizer(self.model, is_linear)
        )
        if strategy is None:
            compress = fxcomp.Compress(within="lossy")
        else:
            plan = plan_in_turns(self.model, [Strategy.parse(strategy)], 2)
            compress = fxcomp.Compress(
                plan=plan.at_momenta() if at_momenta else plan,
                warmup=fxcomp.Warmup(int8_steps=5 if at_momenta else 0),
                feedback=EVERYWHERE if is_linear and "int8" in strategy else fxcomp.ErrorFeedback(),
            )
            options["costs"] = CostTable()
        checks = fxcomp.Checks(verify=5, replan="offer" if strategy is None else "off")
        self.step = fxcomp.compile_step(
            self.model, loss_fn, self.optimizer, batch_of(0), compress=compress, checks=checks, **options
        )

    def train(self, number: int) -> None:
        for micro in range(self.micro_batches):
            self.step(batch_of(number * self.micro_batches + micro))
        if self.scaler is not None:
            self.scaler.update()

    def state(self) -> Any:
        return self.step.state_dict()

    def load(self, states: Any) -> None:
        self.step.load_state_dict(states)

    def phase(self, number: int) -> str:
        calendar = self.step.in_force.calendar
        if calendar.use_of(number) is Use.VERIFY:
            return "verifying"
        if self.step.in_force.decision.is_provisional:
            return "measuring"
        return "racing" if calendar.turn is not None else "stepping"

    def replan(self, number: int) -> None:
        if self.replans_at and number >= self.replans_at[0]:
            with suppress(CannotReplan):  # until the race is over
                self.step.replan()
                self.replans_at.pop(0)

    @property
    def plan(self) -> Plan:
        return self.step.in_force.lasting


class Eager(Training):
    """A job whose backward pass averages gradients."""

    def __init__(self, model: nn.Module, is_linear: bool) -> None:
        self.model, self.call = model, model
        self.optimizer = _optimizer(model, is_linear)

    def train(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.call(batch_of(number)).backward()
        self.optimizer.step()


class Backend(Eager):
    """A job under torch.compile."""

    def __init__(self, is_linear: bool) -> None:
        super().__init__(built(is_linear), is_linear)
        plan = plan_in_turns(self.model, [Strategy.parse(ONE_SHOT.format("int4"))], 2)
        self.call = fxcomp.compile_model(self.model, compress=plan, costs=CostTable())
        self.call(batch_of(0)).backward()  # compiles; the gradient is dropped, and with it what it owes
        self.optimizer.zero_grad()
        compiled_model(self.model).state.residuals.arena.zero_()

    def state(self) -> Any:
        return compiled_model(self.model).state_dict()

    def load(self, states: Any) -> None:
        compiled_model(self.model).load_state_dict(states)

    @property
    def plan(self) -> Plan:
        return compiled_model(self.model).plan


class Hook(Eager):
    """A job under DistributedDataParallel; without a plan, plans race."""

    def __init__(self, is_linear: bool, *, races: bool) -> None:
        super().__init__(built(is_linear), is_linear)
        plan = plan_in_turns(self.model, [Strategy.parse(ONE_SHOT.format("topk(0.1)"))], 2)
        self.outer = fxcomp.ddp_hook(compress="lossy" if races else plan, costs=None if races else CostTable())
        self.call = DistributedDataParallel(self.model, bucket_cap_mb=0.006)
        self.call.register_comm_hook(None, self.outer)  # pyright: ignore
        self.races = races

    def state(self) -> Any:
        return self.outer.state_dict()

    def load(self, states: Any) -> None:
        self.outer.load_state_dict(states)

    def phase(self, number: int) -> str:
        if self.plan is None or number < 2:
            return "measuring" if self.races else "compiling"
        return "racing" if self.outer.is_racing else "stepping"

    @property
    def plan(self) -> Plan | None:
        job: Any = self.outer._job
        return None if job is None or job.follower is None else job.follower.lasting.decision.plan


class Sharded(Eager):
    """A job under fully_shard, whose replicas are averaged by a plan."""

    def __init__(self, is_linear: bool) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model: Any = built(is_linear)
        how = Strategy.parse(ONE_SHOT.format("int4"))
        sizes = {name: p.numel() // 2 for name, p in model.named_parameters()}
        names = [(f"layers.{k}.weight", f"layers.{k}.bias") for k in (2, 1, 0)]
        plan = Plan(tuple(Bucket(each, tuple(sizes[name] for name in each), how) for each in names))
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh["shard"])
        super().__init__(model, is_linear)
        self.outer = fxcomp.average_replicas(model, mesh["replicate"], compress=plan, costs=CostTable())

    def state(self) -> Any:
        return self.outer.state_dict()

    def load(self, states: Any) -> None:
        self.outer.load_state_dict(states)

    @property
    def plan(self) -> Plan | None:
        return self.outer.plan


def _scaled(is_linear: bool) -> Training:
    return Compiled(is_linear, ONE_SHOT.format("int4"), scaler=scaler(init_scale=2.0**6))


START: Mapping[str, Callable[[bool], Training]] = {
    "dense": lambda linear: Compiled(linear, "all_reduce@world"),
    "int8": lambda linear: Compiled(linear, ONE_SHOT.format("int8")),
    "two-shot int4": lambda linear: Compiled(linear, TWO_SHOTS),
    "PowerSGD": lambda linear: Compiled(linear, LOW_RANK),
    "momenta": lambda linear: Compiled(linear, ONE_SHOT.format("cmax(8)"), at_momenta=True),
    "scaler": _scaled,
    "accumulation": lambda linear: Compiled(linear, ONE_SHOT.format("topk(0.1)"), accumulate=2),
    "backend": Backend,
    "hook": lambda linear: Hook(linear, races=False),
    "HSDP": Sharded,
    "race": lambda linear: Compiled(linear, None),
    "hook race": lambda linear: Hook(linear, races=True),
    "replanning": lambda linear: Compiled(linear, None, replans_at=(66, 106)),
}
"""Start a job of each kind; the argument says whether its loss is linear."""

STEPS = {"race": 80, "hook race": 72, "replanning": 120}
"""Number of steps of a job; 16 for kinds with a given plan."""


def steps_of(kind: str) -> int:
    return STEPS.get(kind, 16)


def saves_every(kind: str) -> int:
    return 8 if kind in STEPS else 4


def let_plans_race() -> None:
    """Offer the same plans for a race in every job of this process."""
    patch.object(choose, "pick_runners", runners).start()
