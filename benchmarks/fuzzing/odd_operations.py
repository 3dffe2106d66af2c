"""Layers of operators that are hard to capture: drawn numbers, hooks, own gradients, writes, reads of values."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn


class Noise(nn.Module):
    """Draw random numbers in the forward pass."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.kind = r.choice(
            ("randn_like", "rand", "bernoulli", "normal", "uniform_", "randint", "randperm", "transposed")
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        match self.kind:
            case "randn_like":
                return x + 0.1 * torch.randn_like(x)
            case "rand":
                return x * (0.5 + torch.rand(x.shape))
            case "bernoulli":
                return x * torch.bernoulli(torch.full(x.shape[-1:], 0.7))
            case "normal":
                return x + torch.normal(0.0, 0.1, (x.shape[-1],))
            case "uniform_":
                return x + torch.empty_like(x).uniform_(-0.1, 0.1)
            case "randint":
                return x + 0.01 * torch.randint(0, 5, x.shape[-1:])
            case "randperm":
                return x + 0.1 * x[torch.randperm(x.shape[0])]
            case _:
                return x + torch.empty_like(x.transpose(0, -1)).normal_(0, 0.1).transpose(0, -1)


class Hooked(nn.Module):
    """A layer with a hook of its own, from the beginning or from a later step on."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.inner = nn.Identity()
        self.kind = r.choice(("forward", "pre", "tensor", "backward", "keywords"))
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
            case "keywords":
                change = lambda _m, args, kwargs: (tuple(a + 0.1 for a in args), kwargs)  # noqa: E731
                self.handles.append(self.inner.register_forward_pre_hook(change, with_kwargs=True))
            case "backward":
                self.handles.append(self.inner.register_full_backward_hook(lambda _m, g, _o: tuple(2 * v for v in g)))
            case _:
                self.handles.append(self.inner.register_forward_hook(_scale_gradient))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 1.0)


def _scale_gradient(_module: nn.Module, _args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * 0.5)


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round, as in adversarial training of domains."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


class Adversarial(nn.Module):
    def __init__(self, r: random.Random):
        super().__init__()
        self.strength = r.choice((0.1, 0.5))

    def touch(self, _: random.Random) -> None:
        self.strength *= 2

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + Reversed.apply(x, self.strength)


class Constants(nn.Module):
    """Tensors that are no buffers."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.shift, self.many = torch.full((1,), 0.5), [torch.ones(1), torch.zeros(1)]
        self.way = r.choice(("in_place", "replaced", "in_list"))

    def touch(self, _: random.Random) -> None:
        match self.way:
            case "in_place":
                self.shift.fill_(1.5)
            case "replaced":
                self.shift = torch.full((1,), 2.0)
            case _:
                self.many[0] = torch.full((1,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.many[0] + self.shift


class InPlace(nn.Module):
    """Operators that write what they were given."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.way = r.choice(("mul_", "masked_fill_", "slice", "index", "relu_"))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.1
        match self.way:
            case "mul_":
                x.mul_(0.9).add_(0.1)
            case "masked_fill_":
                x.masked_fill_(x.detach() > 1.0, 0.5)
            case "slice":
                x[..., :2] = x[..., 2:4] * 0.5
            case "index":
                x[..., torch.tensor([0, 3])] += 1.0
            case _:
                torch.relu_(x)
        return x


class Detached(nn.Module):
    """Statistics without gradient, and a straight-through estimate."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.way = r.choice(("no_grad", "detach", "round", "item_free"))

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "no_grad":
                with torch.no_grad():
                    scale = x.abs().mean() + 1
                return x / scale
            case "detach":
                return x - x.detach().mean()
            case "round":
                return x + ((x * 4).round() / 4 - x).detach()
            case _:
                return torch.where(x.detach().mean() > 0, x, 1.1 * x)


class ValuesDecide(nn.Module):
    """Python that reads a tensor, which has to be refused."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.way = r.choice(("if", "item", "python_random", "numpy_random", "nonzero"))

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "if":
                return x if x.detach().mean() > 0 else 2 * x
            case "item":
                return x * x.detach().abs().mean().item()
            case "python_random":
                return x * (1 + random.random())
            case "numpy_random":
                return x * float(1 + numpy.random.rand())
            case _:
                return x + 0.01 * torch.nonzero(x.detach() > 0).shape[0]


class SelfSetting(nn.Module):
    """A layer that sets attributes of itself while it runs."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.way = r.choice(("cache", "last_shape", "calls", "ready", "kept"))
        self.cached: Any = None
        self.calls, self.ready, self.kept = 0, False, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "cache":
                if self.cached is None or self.cached.shape != x.shape[-1:]:
                    self.cached = torch.linspace(0.5, 1.5, x.shape[-1])
                return x * self.cached
            case "last_shape":
                self.last = tuple(x.shape)
                return x * (1 + 0.1 * self.last[0])
            case "calls":
                self.calls += 1
                return x * (1 + 0.1 * self.calls)
            case "kept":
                self.kept[:] = [x.detach().mean()]
                return x * 1.1
            case _:
                if not self.ready:
                    self.ready = True
                return x * 1.2
