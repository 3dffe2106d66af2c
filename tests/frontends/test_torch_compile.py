"""`torch.compile(model, backend="fxcomp")` trains as DistributedDataParallel does.

Cases that can share a spawn do: ranks report numbers, which the tests judge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, Job, cross_entropy
from helpers.ranks import run_ranks
from helpers.torch_compiled import compiled, own_options
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fxcomp.cost.table import CostTable
from fxcomp.frontends import torch_compile as backend
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

TWO_BUCKETS = Plan(
    (Bucket(("2.bias", "2.weight"), (10, 3000), DENSE), Bucket(("0.bias", "0.weight"), (300, 6000), DENSE))
)


@dataclass(frozen=True)
class Trained:
    parameters: list[Tensor]
    first_gradients: list[Tensor]
    losses: list[float]

    def distance(self, other: Trained) -> float:
        """The largest difference of parameters and of the first step's gradients."""
        mine, theirs = (t.parameters + t.first_gradients for t in (self, other))
        return max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.numpy().tobytes())
        return digest.hexdigest()


def train(
    job: Job,
    wrap: Callable[[nn.Module], Callable[..., Any]],
    *,
    stretch: Callable[[int], int] = lambda _: 0,
    micro: int = 1,
    steps: int = 4,
) -> Trained:
    """Some steps of SGD, of `micro` accumulated backward passes each: all lengths come, and gradients from weights."""
    model = job.build()
    call = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first: list[Tensor] = []
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss = cross_entropy(call, job.batch(step * micro + part, dist.get_rank(), job.length + stretch(step)))
            loss.backward()
            losses.append(loss.item())
        first = first or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return Trained([p.detach().clone() for p in model.parameters()], first, losses)


class Checkpointed(nn.Module):
    """Two blocks that are computed again, each with two dropouts, and one dropout outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 10)

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return dropout(torch.tanh(layer(dropout(x, 0.2))), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.first, x, use_reentrant=False)
        x = checkpoint(self.block, self.second, x, use_reentrant=False)
        return self.head(dropout(x, 0.3))


CHECKPOINTED = replace(JOBS["mlp"], model=Checkpointed)


def rank_by_rank(step: int) -> int:
    """Other lengths on every rank, in another order."""
    return (step + dist.get_rank()) % 4


def under_autocast(call: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Autocast around each forward pass."""

    def run(inputs: Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return call(inputs)

    return run


class Narrow(nn.Module):
    """Matrices in bf16, and a norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(20, 96, dtype=torch.bfloat16), nn.LayerNorm(96)
        self.last = nn.Linear(96, 10, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.bfloat16()).float()).bfloat16()).float()


NARROW = replace(JOBS["mlp"], model=Narrow)


def parities() -> dict[str, float]:
    """Distances to eager DDP."""
    found: dict[str, float] = {}
    for name in ("mlp", "transformer", "conv"):
        ddp = train(JOBS[name], DistributedDataParallel)
        found[name] = train(JOBS[name], own_options).distance(ddp)
    ddp = train(JOBS["mlp"], DistributedDataParallel)
    found["two buckets"] = train(JOBS["mlp"], lambda model: compiled(model, plan=TWO_BUCKETS, model=model)).distance(
        ddp
    )
    chosen = {"plan": None, "costs": CostTable(), "within": "lossless"}
    found["chosen"] = train(JOBS["mlp"], lambda model: compiled(model, model=model, **chosen)).distance(ddp)
    ddp = train(JOBS["mlp"], DistributedDataParallel, stretch=rank_by_rank)
    found["lengths"] = train(JOBS["mlp"], own_options, stretch=rank_by_rank).distance(ddp)
    for dtype in (torch.bfloat16, torch.float16):
        ddp = train(JOBS["mlp"], lambda model, dtype=dtype: under_autocast(DistributedDataParallel(model), dtype))
        ours = train(JOBS["mlp"], lambda model, dtype=dtype: under_autocast(own_options(model), dtype))
        found[f"autocast to {dtype}"] = ours.distance(ddp)
    found["bf16 parameters"] = train(NARROW, own_options).distance(train(NARROW, DistributedDataParallel))
    ddp = train(CHECKPOINTED, DistributedDataParallel)
    found["checkpointed"] = train(CHECKPOINTED, own_options).distance(ddp)
    ddp = train(JOBS["mlp"], DistributedDataParallel, micro=2)
    found["accumulated"] = train(JOBS["mlp"], own_options, micro=2).distance(ddp)
    return found


def test_dense_training_equals_ddp():
    for found in run_ranks(2, parities):
        assert all(distance < 1e-6 for distance in found.values()), found


def compressed(name: str) -> tuple[str, float, float, float]:
    """The fingerprint, how far the loss is from dense, the distance to dense, and what the residuals hold."""
    dense = train(JOBS[name], own_options, steps=10)
    job, models = JOBS[name], []

    def wrap(model: nn.Module) -> Callable[..., Any]:
        models.append(model)
        return compiled(model, plan="int8(block=1024)", model=model)

    lossy = train(job, wrap, steps=10)
    kept = backend.compiled_model(models[0])
    left_out, saved = kept.state.residuals.arena.clone(), kept.state_dict()
    for _ in range(2):
        kept.state.residuals.arena.zero_()
        kept.load_state_dict(saved)
        assert torch.equal(kept.state.residuals.arena, left_out)
    return (
        lossy.fingerprint,
        abs(lossy.losses[-1] - dense.losses[-1]),
        lossy.distance(dense),
        left_out.abs().max().item(),
    )


def test_int8_keeps_ranks_bit_identical_and_follows_the_dense_loss():
    ranks = run_ranks(2, compressed, "mlp")
    assert len({fingerprint for fingerprint, *_ in ranks}) == 1
    for _, loss, distance, left_out in ranks:
        assert loss < 1e-2
        assert 0 < distance < 1e-2
        assert left_out > 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_without_a_process_group_it_is_eager():
    job = JOBS["transformer"]
    models = job.build(), job.build()
    for model, call in zip(models, (models[0], compiled(models[1])), strict=True):
        cross_entropy(call, job.batch(0)).backward()
        assert all(p.grad is not None for p in model.parameters())
    for eager, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(eager.grad, ours.grad)


def test_torch_finds_the_backend_by_its_entry_point():
    assert "fxcomp" in torch._dynamo.list_backends()
