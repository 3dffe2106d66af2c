"""`torch.compile(model, backend="fxcomp")` trains as DistributedDataParallel does, and refuses what it cannot train rightly."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import JOBS, Job, cross_entropy
from ranks import Outcome, run_ranks, try_ranks
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

STEPS = 10


# What ranks run


def train(
    job: Job, wrap: Callable[[nn.Module], Callable[..., Any]], *, lengths: bool = False
) -> tuple[nn.Module, list[Tensor]]:
    """Some steps of SGD; the model and the gradients of the first step."""
    model = job.build()
    call = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        length = job.length + step % 3 if lengths else None
        cross_entropy(call, job.batch(step, dist.get_rank(), length)).backward()
        first = first or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return model, first


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def against_ddp(name: str, options: dict[str, Any], lengths: bool = False) -> tuple[float, float, str]:
    """Distances of parameters and first gradients to eager DDP, and this rank's fingerprint."""
    ddp, expected = train(JOBS[name], DistributedDataParallel, lengths=lengths)
    model, found = train(JOBS[name], lambda m: torch.compile(m, backend="fxcomp", options=options), lengths=lengths)
    return distance(list(model.parameters()), list(ddp.parameters())), distance(found, expected), fingerprint(model)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_dense_training_equals_ddp(name: str):
    for parameters, gradients, _ in run_ranks(2, against_ddp, name, {"plan": "dense"}):
        assert gradients < 1e-6
        assert parameters < 1e-6
