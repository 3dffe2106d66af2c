"""A small model under fully_shard, trained natively and with its gradients compressed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.errors import FxcompError
from helpers.gathered import gathered

WIDTH = 30
"""No multiple of three: the last rank's part of a layer is filled up with zeros."""
STEPS = 4


def model_of(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def sharded(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    model = model_of().to(dtype)
    for layer in model[:3]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, WIDTH, generator=generator)
    dtype = next(iter(model.parameters())).dtype
    return (model(inputs.to(dtype)).float() - inputs[:, :5].cumsum(1).tanh()).square().mean()


def local(model: nn.Module) -> Tensor:
    """All that this rank holds."""
    return torch.cat([p.detach().to_local().flatten().float() for p in model.parameters()])  # type: ignore[union-attr]


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def trained(
    model: nn.Module, steps: Sequence[int] = range(STEPS), *, clip: float | None = None, micro: int = 1
) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)  # type: ignore[operator]
            loss_of(model, step * micro + part).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return local(model)


def compressed(plan: Any, model: nn.Module | None = None, **options: Any) -> tuple[Any, fxcomp.ShardScatter]:
    model = sharded() if model is None else model
    return model, fxcomp.compress_reduce_scatter(model, costs=CostTable(), **gathered(plan=plan, **options))


def owed_of(scatter: fxcomp.ShardScatter) -> dict[str, Tensor]:
    """Return what this rank's next gradients bring, by parameter."""
    state = scatter.state_dict()
    found: dict[str, Tensor] = dict(state["owed"]) if state else {}
    for name, pieces in state["residuals"].items() if state else ():
        whole = found.setdefault(name, torch.zeros(pieces[0]["size"]))
        for piece in pieces:
            whole[piece["start"] : piece["start"] + piece["values"].numel()] += piece["values"]
    return found


@contextmanager
def told(found: dict[str, Any], what: str) -> Generator[None]:
    try:
        yield
    except FxcompError as error:
        found[what] = f"{type(error).__name__}: {error}"
