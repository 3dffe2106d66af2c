"""Layers that do what tracing could freeze or miss: buffers, flags, configuration; of any shape.

A layer with `touch(random)` has something that a user may change between two steps; the change `touch` does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from fuzzing.odd_operations import Adversarial, Constants, Detached, Hooked, InPlace, Noise, SelfSetting, ValuesDecide

SCALE = 1.0
"""A global number that layers read."""

OPTIONS: dict[str, Any] = {"scale": 1.0}


class Applied(nn.Module):
    """A function as a layer; another function may take its place."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Activation(nn.Module):
    """A function that a user exchanges."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.act = r.choice((torch.relu, torch.tanh))

    def touch(self, r: random.Random) -> None:
        self.act = r.choice((functional.gelu, torch.sigmoid))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) + 0.1 * x


class Scaled(nn.Module):
    """Multiply by a number that is kept in one of many places."""

    shared = 1.0

    def __init__(self, r: random.Random):
        super().__init__()
        self.place = r.choice(
            (
                "attribute",
                "config",
                "dict",
                "list",
                "global",
                "global_dict",
                "class",
                "nested",
                "numpy",
                "default",
                "cell",
            )
        )
        self.scale, self.cfg = 1.0, SimpleNamespace(scale=1.0, inner=SimpleNamespace(scale=1.0, names=["a"]))
        self.options, self.scales, self.numpy_scale = {"scale": 1.0}, [1.0, 2.0], numpy.float64(1.0)
        type(self).shared = 1.0
        globals()["SCALE"] = OPTIONS["scale"] = 1.0
        self.of_cell, self.set_cell = _cell()

    def touch(self, r: random.Random) -> None:
        value = r.choice((0.5, 1.5, 2, True))
        match self.place:
            case "attribute":
                self.scale = value
            case "config":
                self.cfg.scale = value
            case "nested":
                self.cfg.inner.scale = value
            case "dict":
                self.options["scale"] = value
            case "list":
                self.scales[0] = value
            case "numpy":
                self.numpy_scale = numpy.float64(value)
            case "class":
                type(self).shared = value
            case "global":
                globals()["SCALE"] = value
            case "cell":
                self.set_cell(value)
            case "default":
                self._by_default.__func__.__defaults__ = (value,)
            case _:
                OPTIONS["scale"] = value

    def _by_default(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    def forward(self, x: Tensor) -> Tensor:
        match self.place:
            case "attribute":
                return x * self.scale
            case "config":
                return x * self.cfg.scale
            case "nested":
                return x * self.cfg.inner.scale
            case "dict":
                return x * self.options["scale"]
            case "list":
                return x * self.scales[0]
            case "numpy":
                return x * float(self.numpy_scale)
            case "class":
                return x * self.shared
            case "global":
                return x * SCALE
            case "cell":
                return self.of_cell(x)
            case "default":
                return self._by_default(x)
            case _:
                return x * OPTIONS["scale"]


def _cell() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 1.0

    def apply(x: Tensor) -> Tensor:
        return x * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return apply, change


class Moded(nn.Module):
    """Branch on a flag, a string or the number of a phase."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.mode, self.enabled, self.phase = "plain", True, 0
        self.what = r.choice(("mode", "enabled", "phase"))
        self.weight = nn.Parameter(torch.ones(()))

    def touch(self, r: random.Random) -> None:
        match self.what:
            case "mode":
                self.mode = r.choice(("squared", "halved"))
            case "enabled":
                self.enabled = not self.enabled
            case _:
                self.phase += 1

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if self.mode == "squared":
            x = 0.5 * x + 0.1 * x.square()
        elif self.mode == "halved":
            x = x / 2
        if not self.enabled:
            x = x + 1
        return x * (1 + 0.25 * self.phase)


class Counted(nn.Module):
    """Buffers that the forward pass writes, in several ways."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.way = r.choice(("in_place", "assigned", "data", "copied", "by_size", "add_size", "if_training", "sliced"))
        self.register_buffer("count", torch.zeros((), dtype=r.choice((torch.long, torch.float32))))
        self.register_buffer("mean", torch.zeros(3), persistent=r.random() < 0.8)
        self.register_buffer("nothing", None)

    def touch(self, r: random.Random) -> None:
        if r.random() < 0.5:
            self.mean = torch.full((3,), 0.25)
        else:
            self.count.add_(3)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean()
        match self.way:
            case "in_place":
                self.count += 1
                self.mean.mul_(0.9).add_(0.1 * now)
            case "assigned":
                self.count = self.count + 1
                self.mean = 0.9 * self.mean + 0.1 * now
            case "data":
                self.mean.data = 0.9 * self.mean.data + 0.1 * now
            case "copied":
                with torch.no_grad():
                    self.mean.copy_(self.mean.lerp(now.expand(3), 0.1))
            case "by_size":
                if x.shape[0] > 3:
                    self.count += 1
                    self.mean[0] = now
            case "add_size":
                self.count += x.shape[0] * x[0].numel()
            case "sliced":
                self.mean[1:].add_(now)
                self.mean[:1] = self.mean[1:2] * 0.5
            case _:
                if self.training:
                    self.count.add_(1)
                    self.mean += now
        return x + 0.1 * self.mean.sum() + 0.01 * self.count.clamp(max=5)


ODD: dict[str, Callable[[random.Random], nn.Module]] = {
    "activation": Activation,
    "scaled": Scaled,
    "scaled_too": Scaled,
    "moded": Moded,
    "counted": Counted,
    "counted_too": Counted,
    "noise": Noise,
    "hooked": Hooked,
    "adversarial": Adversarial,
    "constants": Constants,
    "in_place": InPlace,
    "detached": Detached,
    "identity": lambda _: nn.Identity(),
}

SELDOM: dict[str, Callable[[random.Random], nn.Module]] = {"values_decide": ValuesDecide, "self_setting": SelfSetting}
"""Layers that mostly have to be refused."""
