"""Loss functions: what is compared and added, where their numbers come from, and what they return beside the loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuzzing.models import opened

if TYPE_CHECKING:
    from fuzzing.program import Program

ANNEALED = 1.0
"""A global number that some losses read."""

LossFn = Callable[[nn.Module, Any], Any]


def set_annealed(value: float) -> None:
    globals()["ANNEALED"] = value


# What is compared: logits (N, C) and classes (N,)


def _one_hot(logits: Tensor, target: Tensor) -> Tensor:
    return functional.one_hot(target, logits.shape[-1]).to(logits.dtype)


LOSSES: dict[str, Callable[[random.Random], Callable[[Tensor, Tensor], Tensor]]] = {
    "cross_entropy": lambda _: functional.cross_entropy,
    "weighted": lambda _: lambda x, y: functional.cross_entropy(x, y, weight=torch.linspace(0.5, 1.5, x.shape[-1])),
    "mse": lambda _: lambda x, y: functional.mse_loss(x, _one_hot(x, y)),
    "bce": lambda _: partial(_with_one_hot, functional.binary_cross_entropy_with_logits),
    "kl": lambda _: (
        lambda x, y: functional.kl_div(x.log_softmax(-1), (_one_hot(x, y) + 0.1).softmax(-1), reduction="batchmean")
    ),
}


def _with_one_hot(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> Tensor:
    return loss(logits, _one_hot(logits, target))


# What is added


def _decay(model: nn.Module, _logits: Tensor) -> Tensor:
    return 1e-3 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


TERMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "decay": _decay,
    "penalty": lambda model, _: 0.01 * sum((b.detach().float().sum() for b in model.buffers()), torch.zeros(())),
}


# What is returned beside it

AUXILIARY: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "logits": lambda _, x, y: x,  # noqa: ARG005
    "dict": lambda m, x, y: {
        "accuracy": (x.argmax(-1) == y).float().mean(),
        "n": len(y),
        "mode": "train" if m.training else "eval",
        "nothing": None,
        "shape": tuple(x.shape),
    },
    "sizes": lambda _, x, y: [x.shape[0], x.numel() * 2, x.shape[0] / 4, y.dtype, x.shape],
    "buffers": lambda m, x, y: [b.clone() for b in m.buffers() if b is not None],  # noqa: ARG005
    "tensor_of_sizes": lambda _, x, y: (torch.tensor(x.shape[0]), x.new_tensor([x.shape[0], 2.0]), y.float().mean()),
}

WEIGHTS = ("global", "cell", "config", "default", "partial", "criterion", "batch")


class Weight(nn.Module):
    """A criterion that keeps its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, loss: Tensor) -> Tensor:
        return loss * self.weight


def make_loss(program: Program) -> tuple[LossFn, Callable[[float], None]]:
    """The loss function, and what changes its number between steps."""
    loss = LOSSES[program.get("loss", "cross_entropy")](program.random("loss"))
    terms = [TERMS[f.name] for f in program.all("term")]
    beside = AUXILIARY.get(program.get("aux"))
    source = program.get("weight")

    def compute(model: nn.Module, batch: Any, weight: Any = 1.0) -> Any:
        x, y, given = opened(batch)
        logits = model(x)
        y = _for_each(logits, y)
        logits, y = logits.reshape(-1, logits.shape[-1]), y.reshape(-1).long() % logits.shape[-1]
        value = loss(logits, y)
        for term in terms:
            value = value + weight * term(model, logits)
        value = value * (given if source == "batch" else weight)
        value = value.float()
        return value if beside is None else (value, beside(model, logits, y))

    return _weighed(compute, source)


def _weighed(compute: Any, source: str) -> tuple[LossFn, Callable[[float], None]]:
    """Take the weight from one of several places."""
    cell, config, criterion = 1.0, SimpleNamespace(loss=SimpleNamespace(weight=1.0)), Weight()
    set_annealed(1.0)
    if source in ("global", "batch"):
        return lambda model, batch: compute(model, batch, ANNEALED), set_annealed
    if source == "config":
        return lambda m, b: compute(m, b, config.loss.weight), lambda v: setattr(config.loss, "weight", v)
    if source == "partial":
        bound = partial(compute, weight=1.0)
        return bound, lambda v: bound.keywords.update(weight=v)
    if source == "criterion":
        return lambda m, b: _first(criterion, compute(m, b)), lambda v: setattr(criterion, "weight", v)

    def of_cell(model: nn.Module, batch: Any) -> Any:
        return compute(model, batch, cell)

    def change_cell(value: float) -> None:
        nonlocal cell
        cell = value

    def by_default(model: nn.Module, batch: Any, weight: float = 1.0) -> Any:
        return compute(model, batch, weight)

    if source == "default":
        return by_default, lambda v: setattr(by_default, "__defaults__", (v,))
    return of_cell, change_cell


def _for_each(logits: Tensor, y: Tensor) -> Tensor:
    """A class for each row of logits: the first one where there are too many, the same where there are too few."""
    if logits.dim() == 2:
        return y if y.dim() == 1 else y[:, 0]
    return y if y.dim() == 2 else y[:, None].expand(logits.shape[:-1])


def _first(change: Callable[[Tensor], Tensor], result: Any) -> Any:
    return (change(result[0]), result[1]) if isinstance(result, tuple) else change(result)
