"""Optimizers with their options, schedules, and one eager step."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import lr_scheduler

if TYPE_CHECKING:
    from fuzzing.program import Program

OPTIMIZERS = ("sgd", "adam", "adamw")
_ALL, _ADAMS = OPTIMIZERS, ("adam", "adamw")
OPTIONS: dict[str, tuple[str, ...]] = {
    "momentum": ("sgd",), "nesterov": ("sgd",), "dampening": ("sgd",), "decoupled": ("adam",), "amsgrad": _ADAMS,
    "betas": _ADAMS, "eps": _ADAMS, "weight_decay": _ALL, "maximize": _ALL, "foreach": _ALL, "fused": _ALL,
    "tensor_lr": _ALL, "groups": _ALL,
}  # fmt: skip
"""Which optimizers take an option."""


def make_optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    """The program's optimizer, with the options that it takes."""
    name, has = program.get("optimizer", "sgd"), lambda option: program.has(f"option.{option}")
    common: dict[str, Any] = {"maximize": has("maximize")}
    if has("weight_decay"):
        common["weight_decay"] = 0.02
    for option in ("foreach", "fused"):
        if has(option) and not (option == "fused" and has("foreach")):
            common[option] = True
    groups = _groups(program, model)
    # A tensor as learning rate and foreach exclude each other, as torch says.
    rate = torch.tensor(0.01) if has("tensor_lr") and not common.get("foreach") else 0.01
    if name == "sgd":
        momentum = 0.9 if has("momentum") or has("nesterov") or has("dampening") else 0.0
        nesterov = has("nesterov") and not has("dampening")
        dampening = 0.3 if has("dampening") else 0.0
        return torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov, dampening=dampening, **common)
    if has("betas"):
        common["betas"] = (0.7, 0.9)
    # With the usual 1e-8, Adam makes a step of rounding errors in gradients that are nearly zero.
    common |= {"eps": 1e-2 if has("eps") else 1e-4, "amsgrad": has("amsgrad")}
    if name == "adam" and has("decoupled"):
        common["decoupled_weight_decay"] = True
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(groups, lr=rate, **common)


def _groups(program: Program, model: nn.Module) -> Any:
    parameters = list(model.parameters())
    if not program.has("option.groups") or len(parameters) < 3:
        return parameters
    r = program.random("option.groups")
    cut = r.randrange(1, len(parameters))
    own: dict[str, Any] = {"lr": 0.005, "weight_decay": r.choice((0.0, 0.1))}
    if r.random() < 0.3:
        own["maximize"] = True
    return [{"params": parameters[:cut]}, {"params": parameters[cut:], **own}]


class Manual:
    """A schedule by hand, of numbers that no scheduler knows."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            if group["weight_decay"] and self.steps % 2:
                group["weight_decay"] *= 0.5
            if group.get("momentum"):
                group["momentum"] = 0.5 + 0.1 * (self.steps % 3)
            if "betas" in group:
                group["betas"] = (0.8 + 0.02 * self.steps, group["betas"][1])
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = 0.01 / (1 + self.steps)


class OnPlateau(lr_scheduler.ReduceLROnPlateau):
    """Steps by a number that never improves."""

    def step(self, *_: Any) -> None:
        super().step(1.0)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=12, cycle_momentum=_has_momentum(o)),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, step_size_up=2, cycle_momentum=_has_momentum(o)),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm_up_from_zero": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 3)),
    "manual": Manual,
    "plateau": lambda o: OnPlateau(o, patience=1),
}


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("momentum", 0.9) > 0 for group in optimizer.param_groups)


# Changes of options between steps


def change_option(optimizer: torch.optim.Optimizer, r: random.Random) -> None:
    """Change one option of one group in place, as a user may at any time."""
    group = r.choice(optimizer.param_groups)
    choices: list[tuple[str, Any]] = [("weight_decay", r.choice((0.0, 0.05))), ("maximize", not group["maximize"])]
    choices.append(("lr", 0.003 if not isinstance(group["lr"], torch.Tensor) else group["lr"].mul(0.5)))
    if "momentum" in group:
        choices += [("momentum", r.choice((0.5, 0.8))), ("momentum", 0.0)]
        choices += [("nesterov", True)] if group["momentum"] and not group["dampening"] else []
    else:
        choices += [("eps", 1e-3), ("amsgrad", not group["amsgrad"]), ("betas", (0.5, 0.99))]
    key, value = r.choice(choices)
    if key == "momentum" and value == 0.0 and group["nesterov"]:
        value = 0.4
    if key == "amsgrad" and value and optimizer.state:
        value = False  # torch has no maximum to go on from
    group[key] = value


@contextmanager
def plainly(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Step as the captured update does, to the bit: parameter by parameter, with Python's numbers.

    Fused updates, those over lists, and those with a tensor as learning rate round otherwise.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(foreach=False, fused=False, lr=float(group["lr"]))
    try:
        yield
    finally:
        for group, was in zip(optimizer.param_groups, before, strict=True):
            group.update(foreach=was["foreach"], fused=was["fused"], lr=was["lr"])


def apply_gradients(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    """Clip, step and clear, after the backward pass."""
    if clip is not None:
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], clip)
    with plainly(optimizer):
        optimizer.step()
