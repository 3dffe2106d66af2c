"""Layers that do what tracing could freeze or miss: buffers, flags, draws, hooks; of any shape.

A layer with `touch(random)` has something that a user may change between two steps; the change `touch` does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Activation(Applied):
    """A function that a user exchanges."""

    def touch(self, r: random.Random) -> None:
        self.function = r.choice((functional.gelu, torch.sigmoid))


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
        self.way = r.choice(("in_place", "assigned", "copied", "by_size", "if_training", "sliced"))
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
            case "copied":
                with torch.no_grad():
                    self.mean.copy_(self.mean.lerp(now.expand(3), 0.1))
            case "by_size":
                if x.shape[0] > 3:
                    self.count += 1
                    self.mean[0] = now
            case "sliced":
                self.mean[1:].add_(now)
                self.mean[:1] = self.mean[1:2] * 0.5
            case _:
                if self.training:
                    self.count.add_(1)
                    self.mean += now
        return x + 0.1 * self.mean.sum() + 0.01 * self.count.clamp(max=5)


def _noisy(x: Tensor) -> Tensor:
    """Draw with the default generator, in another order of memory too."""
    return x + torch.randn_like(x) * 0.1 + torch.empty_like(x.transpose(0, -1)).normal_(0, 0.1).transpose(0, -1)


class Hooked(nn.Module):
    """A layer with a hook of its own, from the beginning or from a later step on."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.inner = nn.Identity()
        self.kind = r.choice(("forward", "pre", "backward"))
        self.handles: list[Any] = []
        if r.random() < 0.5:
            self.touch(r)

    def touch(self, _: random.Random) -> None:
        if self.handles:
            self.handles.pop().remove()
            return
        match self.kind:
            case "forward":
                self.handles.append(self.inner.register_forward_hook(lambda *a: a[2] * 1.5))
            case "pre":
                self.handles.append(self.inner.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,)))
            case _:
                self.handles.append(self.inner.register_full_backward_hook(lambda _m, g, _o: tuple(2 * v for v in g)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 1.0)


ODD: dict[str, Callable[[random.Random], nn.Module]] = {
    "activation": lambda r: Activation(r.choice((torch.relu, torch.tanh))),
    "moded": Moded,
    "counted": Counted,
    "noise": lambda _: Applied(_noisy),
    "hooked": Hooked,
}
