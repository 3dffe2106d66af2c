"""One rank changes something alone: replicas stay alike to the bit, or the step says which rank differs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzzing.program import Add
from fuzzing.training import OPTIMIZERS
from fuzzing.world import World

WIDTH = 4

WEIGHT = 1.0
"""A global number that the loss reads."""


class Replica(nn.Module):
    """A few layers with what a user may change of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.scale, self.act = 1.0, torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        x = self.dropout(self.act(self.norm(self.first(x)) + self.offset))
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


def _rate_for_a_step(world: Alone, _: random.Random) -> None:
    """Another rate for one step; it is as it was before the next one."""
    group = world.optimizer.param_groups[0]
    before = group["lr"]
    group["lr"] = 0.5 * before
    world.after_next = lambda: group.update(lr=before)
    world.parted = True


def _parameter(world: Alone, r: random.Random) -> None:
    with torch.no_grad():
        r.choice(list(world.model.parameters())).mul_(0.9)
    world.parted = True


def _element(world: Alone, r: random.Random) -> None:
    with torch.no_grad():
        r.choice(list(world.model.parameters())).view(-1)[0].add_(r.choice((1.0, 1e-6, float("nan"))))
    world.parted = True


def _data(world: Alone, r: random.Random) -> None:
    parameter = r.choice(list(world.model.parameters()))
    parameter.data = parameter.data + 0.01
    world.parted = True


def _state(world: Alone, r: random.Random) -> None:
    """Write into the optimizer's state."""
    held = [v for state in world.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    if held:
        r.choice(held).add_(r.choice((1.0, 0.01)))
        world.parted = True


def _load_state(world: Alone, _: random.Random) -> None:
    """Load the optimizer's state of the beginning on this rank."""
    world.optimizer.load_state_dict(copy.deepcopy(world.saved["optimizer"]))
    world.parted = True


def _load_model(world: Alone, _: random.Random) -> None:
    world.model.load_state_dict(world.saved["model"])
    world.parted = True


def _clear_state(world: Alone, _: random.Random) -> None:
    world.optimizer.state.clear()
    world.parted = True


def _train_eagerly(world: Alone, _: random.Random) -> None:
    """A step by hand on this rank."""
    world.optimizer.zero_grad()
    world.loss_fn(world.model, world.example).backward()
    world.optimizer.step()
    world.optimizer.zero_grad()
    world.parted = True


def _swap_groups(world: Alone, _: random.Random) -> None:
    if len(world.optimizer.param_groups) > 1:
        world.optimizer.param_groups.reverse()
        world.parted = True


def _buffer(world: Alone, _: random.Random) -> None:
    world.model.offset.add_(0.5)
    world.parted = True


def _running_mean(world: Alone, _: random.Random) -> None:
    world.model.norm.running_mean.add_(0.5)
    world.parted = True


def _hook(world: Alone, _: random.Random) -> None:
    world.model.first.register_forward_hook(lambda _m, _a, output: output * 1.25)


def _set_weight(world: Alone, _: random.Random) -> None:
    world.weight[0] = 0.5


def _set_scale(world: Alone, _: random.Random) -> None:
    world.model.scale = 2.0


def _set_act(world: Alone, _: random.Random) -> None:
    world.model.act = torch.sigmoid


def _eval(world: Alone, _: random.Random) -> None:
    world.model.eval()


def _dropout(world: Alone, _: random.Random) -> None:
    world.model.dropout.p = 0.4


def _evaluate(world: Alone, _: random.Random) -> None:
    """Score a batch on this rank alone, as rank 0 does; nothing that is trained changes."""
    world.model.eval()
    with torch.no_grad():
        world.loss_fn(world.model, world.example)
    world.model.train()


def _draw(world: Alone, _: random.Random) -> None:  # noqa: ARG001
    torch.rand(3)


LIVE: dict[str, Change] = {
    "rate": _rate,
    "rate_for_a_step": _rate_for_a_step,
    "weight_decay": _group("weight_decay", 0.05, 0.0, 0.3),
    "momentum": _group("momentum", 0.5, 0.3),
    "dampening": _group("dampening", 0.2),
    "nesterov": _group("nesterov", True),
    "maximize": _group("maximize", True),
    "betas": _group("betas", (0.5, 0.9), (0.9, 0.9)),
    "eps": _group("eps", 1e-2, 1e-3),
    "swap_groups": _swap_groups,
}
"""Numbers of the optimizer's groups: no rank may take one step with others."""

HELD: dict[str, Change] = {
    "parameter": _parameter,
    "element": _element,
    "data": _data,
    "state": _state,
    "load_state": _load_state,
    "load_model": _load_model,
    "clear_state": _clear_state,
    "train_eagerly": _train_eagerly,
}
"""Changes that the next verified step finds."""

LOCAL: dict[str, Change] = {
    "hook": _hook,
    "set_weight": _set_weight,
    "set_scale": _set_scale,
    "set_act": _set_act,
    "eval": _eval,
    "dropout": _dropout,
    "evaluate": _evaluate,
    "draw": _draw,
    "buffer": _buffer,
    "running_mean": _running_mean,
}
"""Changes that a rank may make alone, as under DistributedDataParallel: gradients are averaged all the same."""

CHANGES = {**LIVE, **HELD, **LOCAL}


class Alone(World):
    """A world in which one rank does something that the others do not."""

    def build(self) -> tuple[Any, Any, Any]:
        self.weight = [1.0]
        self.after_next: Callable[[], None] | None = None
        self.plateau: Any = None
        self.losses = 10.0
        weight = self.weight

        def compute(model: nn.Module, batch: Any) -> Tensor:
            x, y = batch
            return (model(x).squeeze(1) - y).square().mean() * weight[0]

        return Replica(), compute, lambda _: None

    @property
    def chosen(self) -> int:
        """The rank that acts alone."""
        return self.program.random("alone").randrange(self.ranks)

    def _come_with_a_history(self) -> None:
        """Let a rank come with a history of its own, as after loading a checkpoint on rank 0 alone."""
        r, early = self.program.random("early"), self.program.get("early")
        if not early or self.rank != self.chosen:
            return
        if early == "trained":
            _train_eagerly(self, r)
        else:
            CHANGES[early](self, r)

    def eager_gradients(self, batch: Any) -> Any:
        """Buffers are rank 0's before the forward pass, as under DistributedDataParallel."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        return super().eager_gradients(batch)

    def may_part(self, step: int, verified: str) -> bool:
        """Return whether replicas may differ after a step without an error, as until the next verified step."""
        held = [f.step or 0 for f in self.program.all("alone") if f.name in HELD and (f.step or 0) <= step]
        early = self.program.get("early") in ("trained",)
        return (bool(held) or early) and verified != "1" and not (verified == "2" and step - max(held, default=0) >= 2)

    def before_step(self, step: int) -> None:
        """Make the change on one rank, before a step."""
        if self.rank == self.chosen:
            for feature in self.program.all("alone"):
                if feature.step == step:
                    CHANGES[feature.name](self, self.program.random(feature.slot))

    def finish_building(self) -> None:
        if self.program.has("plateau"):
            self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self._come_with_a_history()

    def after_step(self) -> None:
        super().after_step()
        if self.plateau is not None:  # as by losses of each rank's own
            self.losses += 1 if self.rank == self.chosen else -1
            before = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.plateau.step(self.losses)
            self.parted |= before != [float(group["lr"]) for group in self.optimizer.param_groups]
        if self.after_next is not None:
            self.after_next()
            self.after_next = None

    def batch(self, step: int) -> Any:
        g = torch.Generator()
        g.manual_seed(1000 * self.program.seed + 10 * step + self.rank)
        rows = 4 if not self.program.has("lengths") else 3 + (step + self.rank) % 3
        return torch.randn(rows, WIDTH, generator=g), torch.randn(rows, generator=g)


EARLY = ("trained", "rate", "weight_decay", "momentum", "parameter", "buffer", "set_scale", "eval", "maximize")


def draw_alone(r: random.Random, add: Add, ranks: int) -> int:  # noqa: ARG001
    add("optimizer", OPTIMIZERS)
    for option in ("momentum", "weight_decay", "groups", "tensor_lr", "fused", "foreach"):
        add(f"option.{option}", (option,), 0.3)
    steps = r.choice((3, 4, 5))
    for number in range(r.choice((0, 1, 1, 1, 2))):
        sort = r.choice((LIVE, LIVE, HELD, LOCAL))
        add(f"alone.{number}", tuple(sort), step=r.randrange(1, steps))
    add("early", EARLY, 0.2)
    add("plateau", ("own_losses",), 0.12)
    add("lengths", ("own",), 0.2)
    add("plan", ("int8", "powersgd(2)", "bf16", "topk(0.05)"), 0.25)
    add("verify", ("1", "2"), 0.5)
    add("clip", ("0.05",), 0.15)
    return steps
