"""One rank changes something alone: replicas stay alike to the bit, or the step says which rank differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzzing import changes
from fuzzing.program import Add
from fuzzing.training import OPTIMIZERS
from fuzzing.world import World

WIDTH = 4


class Replica(nn.Module):
    """A few layers with what a user may change of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        x = torch.tanh(self.norm(self.first(x)) + self.offset)
        return self.last(x) * self.scale


Change = Callable[["Alone", random.Random], None]


def _group(key: str, *values: Any) -> Change:
    """Set an option of a group, where the optimizer has it."""

    def change(world: Alone, r: random.Random) -> None:
        group, value = r.choice(world.optimizer.param_groups), r.choice(values)
        if key in group and group[key] != value and not (key == "nesterov" and not group["momentum"]):
            group[key] = value
            world.parted = True

    return change


def _rate(world: Alone, r: random.Random) -> None:
    group = r.choice(world.optimizer.param_groups)
    if isinstance(group["lr"], Tensor):
        group["lr"].mul_(0.5)
    else:
        group["lr"] *= r.choice((0.5, 0.1, 1 + 1e-7, 0.0))
    world.parted = True


def _parameter(world: Alone, r: random.Random) -> None:
    with torch.no_grad():
        r.choice(list(world.model.parameters())).mul_(0.9)


def _state(world: Alone, r: random.Random) -> None:
    """Write into the optimizer's state."""
    held = [v for state in world.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    if held:
        r.choice(held).add_(r.choice((1.0, 0.01)))


def _train_eagerly(world: Alone, _: random.Random) -> None:
    """A step by hand on this rank."""
    world.optimizer.zero_grad()
    world.loss_fn(world.model, world.example).backward()
    world.optimizer.step()
    world.optimizer.zero_grad()


def _hook(world: Alone, _: random.Random) -> None:
    world.model.first.register_forward_hook(lambda _m, _a, output: output * 1.25)


LIVE: dict[str, Change] = {
    "rate": _rate,
    "weight_decay": _group("weight_decay", 0.05, 0.0, 0.3),
    "momentum": _group("momentum", 0.5, 0.3),
    "dampening": _group("dampening", 0.2),
    "nesterov": _group("nesterov", True),
    "maximize": _group("maximize", True),
    "betas": _group("betas", (0.5, 0.9), (0.9, 0.9)),
    "eps": _group("eps", 1e-2, 1e-3),
}
"""Numbers of the optimizer's groups: no rank may take one step with others."""

HELD: dict[str, Change] = {
    "parameter": _parameter,
    "state": _state,
    "load_model": changes.CHANGES["load_model"],
    "clear_state": lambda world, _: world.optimizer.state.clear(),
    "train_eagerly": _train_eagerly,
}
"""Changes that the next verified step finds."""

LOCAL: dict[str, Change] = {
    "hook": _hook,
    "set_weight": lambda world, _: world.weight.__setitem__(0, 0.5),
    "set_scale": lambda world, _: setattr(world.model, "scale", 2.0),
    "eval": changes.CHANGES["eval"],
    "evaluate": changes.CHANGES["evaluate"],
    "buffer": lambda world, _: world.model.offset.add_(0.5) and None,
}
"""Changes that a rank may make alone, as under DistributedDataParallel: gradients are averaged all the same."""

CHANGES = {**LIVE, **HELD, **LOCAL}


class Alone(World):
    """A world in which one rank does something that the others do not."""

    def build(self) -> tuple[Any, Any, Any]:
        self.weight = [1.0]
        weight = self.weight

        def compute(model: nn.Module, batch: Any) -> Tensor:
            x, y = batch
            return (model(x).squeeze(1) - y).square().mean() * weight[0]

        return Replica(), compute, lambda _: None

    @property
    def chosen(self) -> int:
        """The rank that acts alone."""
        return self.program.random("alone").randrange(self.ranks)

    def eager_gradients(self, batch: Any) -> Any:
        """Buffers are rank 0's before the forward pass, as under DistributedDataParallel."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        return super().eager_gradients(batch)

    def may_part(self, step: int, verified: str) -> bool:
        """Return whether replicas may differ after a step without an error, as until the next verified step."""
        held = [f.step or 0 for f in self.program.all("alone") if f.name in HELD and (f.step or 0) <= step]
        return bool(held) and verified != "1" and not (verified == "2" and step - max(held, default=0) >= 2)

    def before_step(self, step: int) -> None:
        """Make the change on one rank, before a step."""
        if self.rank == self.chosen:
            for feature in self.program.all("alone"):
                if feature.step == step:
                    CHANGES[feature.name](self, self.program.random(feature.slot))
                    self.parted |= feature.name in HELD or feature.name == "buffer"

    def batch(self, step: int) -> Any:
        g = torch.Generator()
        g.manual_seed(1000 * self.program.seed + 10 * step + self.rank)
        rows = 4 if not self.program.has("lengths") else 3 + (step + self.rank) % 3
        return torch.randn(rows, WIDTH, generator=g), torch.randn(rows, generator=g)


def draw_alone(r: random.Random, add: Add, ranks: int) -> int:  # noqa: ARG001
    add("optimizer", OPTIMIZERS)
    for option in ("momentum", "weight_decay", "groups", "tensor_lr", "fused", "foreach"):
        add(f"option.{option}", (option,), 0.3)
    steps = r.choice((3, 4, 5))
    for number in range(r.choice((0, 1, 1, 1, 2))):
        sort = r.choice((LIVE, LIVE, HELD, LOCAL))
        add(f"alone.{number}", tuple(sort), step=r.randrange(1, steps))
    add("lengths", ("own",), 0.2)
    add("plan", ("int8", "powersgd(2)", "bf16", "topk(0.05)"), 0.25)
    add("verify", ("1", "2"), 0.5)
    add("clip", ("0.05",), 0.15)
    return steps
