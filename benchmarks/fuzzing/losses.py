"""Cross entropy, with a weight that is kept in one of several places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
    source = program.get("weight")

    def compute(model: nn.Module, batch: Any, weight: Any = 1.0) -> Tensor:
        x, y, given = opened(batch)
        logits = model(x)
        logits, y = logits.reshape(-1, logits.shape[-1]), y.reshape(-1).long() % logits.shape[-1]
        value = functional.cross_entropy(logits, y) * (given if source == "batch" else weight)
        return value.float()

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
        return lambda m, b: criterion(compute(m, b)), lambda v: setattr(criterion, "weight", v)

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
