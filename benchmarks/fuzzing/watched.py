"""Watched values besides the model's tensors and the batch, changed between steps: docs/contract.md lists them."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from fuzzing.program import Add
from fuzzing.world import World

WIDTH = 4


class Phase(Enum):
    """A phase of training, with its factor."""

    ONE = 1.0
    HALF = 0.5
    QUARTER = 0.25


class Slotted:
    """An object without a dict."""

    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1.0


class Shared:
    """A class whose attribute is read through its objects."""

    a = 1.0


class Held(NamedTuple):
    """A value outside of the step."""

    make: Callable[[], Any]
    change: Callable[[Any, float], Any]
    read: Callable[[Any], Any]


def _namespace() -> Any:
    return types.SimpleNamespace(inner=types.SimpleNamespace(a=1.0))


def _class() -> type[Any]:
    return type("Own", (Shared,), {"a": 1.0})


HELD: dict[str, Held] = {
    "list": Held(lambda: [1.0], lambda h, v: h.__setitem__(0, v), lambda h: h[0]),
    "nested": Held(lambda: {"a": [1.0]}, lambda h, v: h["a"].__setitem__(0, v), lambda h: h["a"][0]),
    "dict": Held(lambda: {"a": 1.0}, lambda h, v: h.update(a=v), lambda h: h["a"]),
    "deque": Held(lambda: collections.deque([1.0]), lambda h, v: h.__setitem__(0, v), lambda h: h[0]),
    "namespace": Held(_namespace, lambda h, v: setattr(h.inner, "a", v), lambda h: h.inner.a),
    "slots": Held(Slotted, lambda h, v: setattr(h, "a", v), lambda h: h.a),
    "class": Held(_class, lambda h, v: setattr(h, "a", v), lambda h: h.a),
    "array": Held(lambda: numpy.ones(2), lambda h, v: h.__setitem__(0, v), lambda h: float(h[0])),
    "enumeration": Held(lambda: [Phase.ONE], lambda h, v: h.__setitem__(0, Phase(v)), lambda h: h[0].value),
    "kind": Held(lambda: [1.0], lambda h, v: h.__setitem__(0, v if v < 1 else True), lambda h: h[0]),
    "dtype": Held(
        lambda: [torch.float32],
        lambda h, v: h.__setitem__(0, torch.float32 if v < 1 else torch.float64),
        lambda h: 0.5 if h[0] is torch.float64 else 1.0,
    ),
    "tensor": Held(lambda: torch.ones(1), lambda h, v: h.fill_(v), lambda h: h.sum()),
    "number of a tensor": Held(lambda: torch.ones(1), lambda h, v: h.fill_(v), lambda h: h.item()),
    "tensor of a list": Held(
        lambda: [torch.ones(1)], lambda h, v: h.__setitem__(0, torch.full((1,), v)), lambda h: h[0].sum()
    ),
}

Effect = Callable[[dict[str, Any], Tensor, Tensor], Tensor]


def _kept(own: dict[str, Any], _: Tensor, loss: Tensor) -> Tensor:
    before, own["mean"] = own["mean"], loss.item()
    return loss / (1 + abs(before))


def _counted(own: dict[str, Any], _: Tensor, loss: Tensor) -> Tensor:
    own["count"] += 1
    return loss * own["count"]


def _grown(own: dict[str, Any], _: Tensor, loss: Tensor) -> Tensor:
    own["losses"].append(loss.detach())
    return loss


def _written(own: dict[str, Any], x: Tensor, loss: Tensor) -> Tensor:
    """Write a tensor outside, and read it."""
    with torch.no_grad():
        own["buffer"].mul_(0.9).add_(x.mean(0))
    return loss + own["buffer"].sum() * loss.detach()


EFFECTS: dict[str, Effect] = {"kept": _kept, "counted": _counted, "grown": _grown, "written": _written}
"""Changes while the step is captured: all but writing a tensor are refused."""


class Watched(World):
    """A loss function that reads and changes values outside of it."""

    def build(self) -> tuple[Any, Any, Any]:
        self.held = [(HELD[f.name], HELD[f.name].make()) for f in self.program.all("held")]
        readers, values = [each.read for each, _ in self.held], [held for _, held in self.held]
        effects = [EFFECTS[f.name] for f in self.program.all("effect")]
        own: dict[str, Any] = {"mean": 0.0, "count": 0, "losses": [], "buffer": torch.zeros(WIDTH)}
        self.own = own

        def compute(model: nn.Module, batch: Any) -> Any:
            x, y = batch
            loss = (model(x) - y).square().mean()
            for read, held in zip(readers, values, strict=True):
                loss = loss * read(held)
            for effect in effects:
                loss = effect(own, x, loss)
            return loss

        return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh()), compute, lambda _: None

    def before_step(self, step: int) -> None:
        """Change what is held, where it is this step's turn."""
        for number, (each, held) in enumerate(self.held):
            if (step + number) % 2 or self.program.get("turns") == "always":
                each.change(held, (1.0, 0.5, 0.25)[step % 3])

    def more(self) -> Any:
        return self.own["buffer"].clone()

    def batch(self, step: int) -> Any:
        g = torch.Generator()
        g.manual_seed(1000 * self.program.seed + 10 * step + self.rank)
        rows = 2 if self.program.has("few") and step == 2 else 6
        return torch.randn(rows, WIDTH, generator=g), torch.randn(rows, 3, generator=g)


def draw_watched(r: random.Random, add: Add, ranks: int) -> int:  # noqa: ARG001
    for number in range(r.choice((1, 1, 2, 3))):
        add(f"held.{number}", tuple(HELD))
    add("effect.0", tuple(EFFECTS), 0.25)
    add("turns", ("always",), 0.3)
    add("few", ("yes",), 0.3)
    add("accumulate", ("2",), 0.15)
    add("verify", ("1",), 0.2)
    return r.choice((4, 5, 6))
