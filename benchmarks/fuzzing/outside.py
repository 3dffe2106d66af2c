"""Python's state outside of a step: values that change, iterators, kept numbers, tensors that are written."""

from __future__ import annotations

import array
import collections
import ctypes
import fractions
import itertools
import queue
import random
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuzzing.program import Add
from fuzzing.world import World

WIDTH = 4


class Rate(float):
    """A number of a class of one's own."""


class Held(NamedTuple):
    """A value outside of the step."""

    make: Callable[[], Any]
    change: Callable[[Any, float], Any]
    read: Callable[[Any], Any]


def _thread() -> Any:
    own: Any = threading.local()
    own.a = 1.0
    return own


def _refill(held: Any, number: float) -> None:
    held.queue.clear()
    held.put(number)


def _filled() -> Any:
    made: Any = queue.Queue()
    made.put(1.0)
    return made


HELD: dict[str, Held] = {
    "list": Held(lambda: [1.0], lambda h, v: h.__setitem__(0, v), lambda h: h[0]),
    "dict": Held(lambda: {"a": 1.0}, lambda h, v: h.update(a=v), lambda h: h["a"]),
    "deque": Held(lambda: collections.deque([1.0]), lambda h, v: h.__setitem__(0, v), lambda h: h[0]),
    "chain": Held(lambda: collections.ChainMap({}, {"a": 1.0}), lambda h, v: h.maps[1].update(a=v), lambda h: h["a"]),
    "rate": Held(lambda: [Rate(1.0)], lambda h, v: h.__setitem__(0, Rate(v)), lambda h: h[0]),
    "fraction": Held(
        lambda: [fractions.Fraction(1)], lambda h, v: h.__setitem__(0, fractions.Fraction(v)), lambda h: float(h[0])
    ),
    "namespace": Held(lambda: types.SimpleNamespace(a=1.0), lambda h, v: setattr(h, "a", v), lambda h: vars(h)["a"]),
    "array": Held(lambda: array.array("d", [1.0]), lambda h, v: h.__setitem__(0, v), lambda h: h[0]),
    "ctypes": Held(lambda: ctypes.c_double(1.0), lambda h, v: setattr(h, "value", v), lambda h: h.value),
    "queue": Held(_filled, _refill, lambda h: h.queue[0]),
    "thread": Held(_thread, lambda h, v: setattr(h, "a", v), lambda h: h.a),
    "tensor": Held(lambda: torch.ones(1), lambda h, v: h.fill_(v), lambda h: h.sum()),
    "number of a tensor": Held(lambda: torch.ones(1), lambda h, v: h.fill_(v), lambda h: h.item()),
    "tensor of a list": Held(
        lambda: [torch.ones(1)], lambda h, v: h.__setitem__(0, torch.full((1,), v)), lambda h: h[0].sum()
    ),
}

ITERATORS: dict[str, Callable[[], Any]] = {
    "cycle": lambda: itertools.cycle([1.0, 0.5]),
    "chain": lambda: itertools.chain([1.0] * 9, [0.5]),
    "islice": lambda: itertools.islice(itertools.count(1), 99),
    "map": lambda: map(float, range(1, 99)),
    "zip": lambda: (pair[0] for pair in zip(range(1, 99), range(99), strict=False)),
    "filter": lambda: filter(None, range(99)),
    "sentinel": lambda: iter(collections.deque(range(1, 99)).popleft, 0),
    "accumulate": lambda: itertools.accumulate([0.5] * 99),
}

Effect = Callable[[dict[str, Any], nn.Module, Tensor, Tensor], Tensor]


def _kept(own: dict[str, Any], _: nn.Module, __: Tensor, loss: Tensor) -> Tensor:
    before, own["mean"] = own["mean"], loss.item()
    return loss / (1 + abs(before))


def _counted(own: dict[str, Any], _: nn.Module, __: Tensor, loss: Tensor) -> Tensor:
    own["count"] += 1
    return loss * own["count"]


def _written(own: dict[str, Any], _: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """Write a tensor outside, and read it."""
    with torch.no_grad():
        own["buffer"].mul_(0.9).add_(x.mean(0))
    return loss + own["buffer"].sum() * loss.detach()


def _read_first(own: dict[str, Any], _: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """Read a tensor outside before it is written."""
    loss = loss * (1 + own["buffer"].square().sum())
    with torch.no_grad():
        own["buffer"].copy_(x.mean(0))
    return loss


def _without_gradient(_: dict[str, Any], model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return loss + (model(x) - 0.5 * target).square().mean()


def _inverted(_: dict[str, Any], model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """Invert a matrix that is singular for a batch of few rows; eager raises there."""
    return loss + torch.linalg.inv(x.T @ x + 0.0 * model(x).sum()).sum() * 1e-6


def _looked_up(_: dict[str, Any], model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """Take rows of a table, some of which it may lack."""
    places = (x[:, 0] * 3).long().abs()
    return loss + nn.functional.embedding(places, model.get_parameter("table")).sum()


EFFECTS: dict[str, Effect] = {
    "kept": _kept,
    "counted": _counted,
    "written": _written,
    "read_first": _read_first,
    "without_gradient": _without_gradient,
    "inverted": _inverted,
    "looked_up": _looked_up,
}


class Net(nn.Module):
    """One layer, and a table to look into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(WIDTH, 3), nn.Parameter(torch.ones(9, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + self.table[0]


class Outside(World):
    """A loss function that reads, uses up and changes what lies outside of it."""

    def build(self) -> tuple[Any, Any, Any]:
        self.held = [(HELD[f.name], HELD[f.name].make()) for f in self.program.all("held")]
        readers = [(each.read, held) for each, held in self.held]
        iterators = [ITERATORS[f.name]() for f in self.program.all("iterator")]
        effects = [EFFECTS[f.name] for f in self.program.all("effect")]
        own: dict[str, Any] = {"mean": 0.0, "count": 0, "buffer": torch.zeros(WIDTH)}
        self.own = own

        def compute(model: nn.Module, batch: Any) -> Any:
            x, y = batch
            loss = (model(x) - y).square().mean()
            for read, held in readers:
                loss = loss * read(held)
            for iterator in iterators:
                loss = loss * next(iterator)
            for effect in effects:
                loss = effect(own, model, x, loss)
            return loss

        return Net(), compute, lambda _: None

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
        x = torch.randn(rows, WIDTH, generator=g)
        return x * (5.0 if self.program.has("far") and step == 3 else 1.0), torch.randn(rows, 3, generator=g)


def draw_outside(r: random.Random, add: Add, ranks: int) -> int:  # noqa: ARG001
    for number in range(r.choice((0, 1, 1, 2, 3))):
        add(f"held.{number}", tuple(HELD))
    add("iterator.0", tuple(ITERATORS), 0.1)
    for number in range(r.choice((0, 1, 1, 2))):
        add(f"effect.{number}", tuple(EFFECTS) if r.random() < 0.3 else tuple(EFFECTS)[2:])
    add("turns", ("always",), 0.3)
    add("few", ("yes",), 0.3)
    add("far", ("yes",), 0.3)
    add("verify", ("1",), 0.2)
    return r.choice((4, 5, 6))
