"""`fxcomp.no_sync` keeps gradients of the compiled backward pass on the rank, as DistributedDataParallel's does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks
from helpers.replicas import flat_parameters, replica_fingerprint
from helpers.torch_compiled import compiled, own_options
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.errors import BadOption
from fxcomp.frontends.torch_compile import compiled_model

JOB = JOBS["mlp"]
Quiet = Callable[[], contextlib.AbstractContextManager[None]]

GROUPS = (2, 3, 1, 2)
"""Micro-batches of each step."""


def train(call: Callable[..., Any], model: nn.Module, quiet: Quiet) -> list[torch.Tensor]:
    """Accumulate in groups; returns the gradients that each step applies."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    applied, number = [], 0
    for length in GROUPS:
        for place in range(length):
            with quiet() if place < length - 1 else contextlib.nullcontext():
                (cross_entropy(call, JOB.batch(number, dist.get_rank())) / length).backward()
            number += 1
        applied.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    return applied


def distances() -> dict[str, Any]:
    reference = JOB.build()
    ddp = DistributedDataParallel(reference)
    expected = train(ddp, reference, ddp.no_sync)
    found: dict[str, Any] = {}
    model = JOB.build()
    gradients = train(own_options(model), model, lambda: fxcomp.no_sync(model))
    found["gradients"] = max((a - b).abs().max().item() for a, b in zip(gradients, expected, strict=True))
    found["parameters"] = (flat_parameters(model) - flat_parameters(reference)).abs().max().item()
    found["sent"] = compiled_model(model).passes
    for plan in ("int8", "topk(0.1)"):
        model = JOB.build()
        train(compiled(model, model=model, plan=plan), model, lambda model=model: fxcomp.no_sync(model))
        found[plan] = replica_fingerprint(model)
    return found


def test_micro_batches_are_reduced_together():
    one, other = run_ranks(2, distances)
    for found in (one, other):
        assert found["gradients"] <= 1e-6
        assert found["parameters"] <= 1e-6
        assert found["sent"] == len(GROUPS)
    assert one == other


def forward_and_backward_apart() -> list[list[Any]]:
    """Run forward inside and backward outside, then the reverse; what is sent, and whether ranks' gradients agree."""
    found: list[list[Any]] = []
    for inside in (True, False):
        model = JOB.build()
        call = own_options(model)
        cross_entropy(call, JOB.batch(0, dist.get_rank())).backward()
        model.zero_grad()
        sent = compiled_model(model).passes
        with fxcomp.no_sync(model) if inside else contextlib.nullcontext():
            loss = cross_entropy(call, JOB.batch(1, dist.get_rank()))
        with contextlib.nullcontext() if inside else fxcomp.no_sync(model):
            loss.backward()
        gradient = next(p.grad for p in model.parameters() if p.grad is not None).flatten()[:4].clone()
        found.append([compiled_model(model).passes - sent, gradient.tolist()])
    return found


def test_the_forward_pass_decides():
    one, other = run_ranks(2, forward_and_backward_apart)
    assert [found[0] for found in one] == [0, 1]
    assert one[0][1] != other[0][1], "this rank's own"
    assert one[1][1] == other[1][1], "the mean"


def dropped() -> tuple[float, int]:
    """Gradients that the user sets to zero are not sent."""
    models = [JOB.build(), JOB.build()]
    for model, is_first in zip(models, (True, False), strict=True):
        call = own_options(model)
        if is_first:
            with fxcomp.no_sync(model):
                cross_entropy(call, JOB.batch(0, dist.get_rank())).backward()
            model.zero_grad()
        cross_entropy(call, JOB.batch(1, dist.get_rank())).backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs), compiled_model(models[0]).passes


def test_what_the_user_sets_to_zero_is_not_sent():
    assert run_ranks(2, dropped) == [(0.0, 1)] * 2


def test_what_is_no_model_is_refused():
    nothing: Any = None
    with (
        pytest.raises(BadOption, match=r"no_sync takes the model that was compiled, .* it is a NoneType"),
        fxcomp.no_sync(nothing),
    ):
        pass


def test_one_rank_alone_has_nothing_to_keep():
    model = nn.Linear(4, 1)
    call = compiled(model)
    with fxcomp.no_sync(model):
        call(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0] * 4]
