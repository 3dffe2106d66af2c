"""With `inductor=True` the backend trains as `backend="inductor"` does, compiled by Inductor in both passes.

All cases share a spawn: compiling takes long, and ranks report numbers, which the tests judge.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.torch_compiled import compiled, seeded
from torch import Tensor, nn
from torch._inductor import config
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp.frontends.torch_compile import compiled_model
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

TWO_BUCKETS = Plan(
    (Bucket(("2.bias", "2.weight"), (10, 480), DENSE), Bucket(("0.bias", "0.weight"), (48, 960), DENSE))
)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 10))


def conv() -> nn.Module:
    """Its running statistics change in each forward pass."""
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attend(x, x, x, need_weights=False)[0], 0.3)
        return self.head(self.norm(x))


class Checkpointed(nn.Module):
    """A block that is computed again, with a dropout inside, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 20), nn.Linear(20, 10)

    def block(self, x: Tensor) -> Tensor:
        return dropout(torch.tanh(self.first(x)), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(dropout(checkpoint(self.block, x, use_reentrant=False), 0.3))


@contextmanager
def graphs_of_inductor() -> Generator[list[tuple[bool, bool]]]:
    """List what Inductor compiles: whether each is an inference graph, as regions are, or a whole backward pass."""
    found: list[tuple[bool, bool]] = []
    inner = compile_fx._compile_fx_inner

    def counted(gm: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        found.append((how["is_inference"], how["is_backward"]))
        return inner(gm, inputs, *args, **how)

    compile_fx._compile_fx_inner = counted
    try:
        yield found
    finally:
        compile_fx._compile_fx_inner = inner


def batch(shape: Sequence[int], number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * dist.get_rank() + number))


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """This rank's gradients, and what is in the buffers."""
    model.zero_grad()
    torch.manual_seed(5 + dist.get_rank())
    run().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def gap(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference, in units of the largest element."""
    return max(((a - b).abs().max() / (b.abs().max() + 1e-3)).item() for a, b in zip(mine, theirs, strict=True))


def drift(values: Sequence[Tensor]) -> float:
    """The largest difference from rank 0."""
    flat = torch.cat([value.flatten() for value in values])
    first = flat.clone()
    dist.broadcast(first, 0)
    return (flat - first).abs().max().item()


def compared(
    build: Callable[[], nn.Module], losses: Callable[[Callable[..., Any]], Tensor], **options: Any
) -> tuple[float, float]:
    """The gap to the mean of what `backend="inductor"` makes on every rank, and how far ranks differ."""
    torch._dynamo.reset()
    ours, model = (seeded(build) for _ in range(2))
    theirs = torch.compile(model, backend="inductor", dynamic=options.get("dynamic"))
    run = compiled(ours, model=ours, inductor=True, **{"plan": "dense", **options})
    mine = gradients(ours, lambda: losses(run))
    means = gradients(model, lambda: losses(theirs))
    for mean in means:
        dist.all_reduce(mean)
    means = [mean / dist.get_world_size() for mean in means]
    buffers = [(a.float(), b.float()) for a, b in zip(ours.buffers(), model.buffers(), strict=True)]
    return max(gap(mine, means), *(gap([a], [b]) for a, b in buffers), 0.0), drift(mine)
