"""Nodes that are written instead of traced again are what tracing gives: writes, updates and clipping."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.captures import captured
from helpers.jobs import JOBS, OPTIMIZERS
from torch import Tensor, nn
from torch.fx.node import map_arg

import fxcomp
from fxcomp import compat
from fxcomp.capture import updates
from fxcomp.graph import functional as functionalizing
from fxcomp.graph.captured import Captured
from fxcomp.graph.info import Role, info


def text(step: Captured) -> list[tuple[str, str, str]]:
    """Every node as an operator with numbered arguments, whatever nodes and symbols are called."""
    number = {node: k for k, node in enumerate(step.graph.graph.nodes)}
    return [
        (
            str(node.target),
            str(map_arg(node.args, lambda used: number[used])),
            re.sub(r"(zu?f)\d+", r"\1", str(node.meta.get("val"))),
        )
        for node in step.graph.graph.nodes
    ]


@pytest.mark.parametrize("job", ["conv", "dropout"])
def test_writes_are_functionalized_without_a_second_trace_as_with_one(job: str, monkeypatch: pytest.MonkeyPatch):
    model, batch = JOBS[job].build(), JOBS[job].batch(0)
    quick = text(captured(model, batch))
    monkeypatch.setattr(functionalizing, "_plain_writes", lambda _: None)  # trace again
    assert text(captured(model, batch)) == quick
    written = ("copy_", "bernoulli_")
    assert sum(any(name in target for name in written) for target, _, _ in quick) == {"conv": 1, "dropout": 4}[job]


def test_writes_that_others_see_are_functionalized_by_tracing_again(monkeypatch: pytest.MonkeyPatch):
    again: list[object] = []
    trace = compat.trace_functional
    monkeypatch.setattr(compat, "trace_functional", lambda *a: again.append(a) or trace(*a))

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x) * 2.0
            first = out[:, 0]
            out.add_(1.0)  # through the view, too
            return out.sum() + 3.0 * first.sum()

    torch.manual_seed(0)
    model, batch = Seen(), torch.randn(2, 3)
    expected = model(batch).detach()
    step = fxcomp.compile_step(
        model, lambda m, x: m(x), OPTIMIZERS["sgd"](model.parameters()), batch, checks=fxcomp.Checks(verify=1)
    )
    assert len(again) == 1
    assert torch.equal(step(batch), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_is_traced_once_for_all_shapes_as_for_each(optimizer: str, monkeypatch: pytest.MonkeyPatch):
    model, batch = JOBS["conv"].build(), JOBS["conv"].batch(0)
    traced: list[str] = []
    trace = updates.trace_update
    monkeypatch.setattr(updates, "trace_update", lambda owner, *a: traced.append(owner.name) or trace(owner, *a))
    quick = text(captured(model, batch, optimizer))
    assert len(traced) == 1
    monkeypatch.setattr(updates, "resized_update", lambda *_: None)  # trace each
    assert text(captured(model, batch, optimizer)) == quick
    assert len(traced) == 1 + 4  # then one for each of four shapes


@pytest.mark.parametrize("job", ["mlp", "conv"])
def test_clipping_is_what_tracing_clip_grad_norm_gives(job: str):
    model: nn.Module = JOBS[job].build()
    batch, limit = JOBS[job].batch(0), 0.7
    if job == "conv":
        model = model.to(memory_format=torch.channels_last)
    fakes, _ = compat.fake_mode()
    step = captured(model, batch, max_grad_norm=limit)
    parameters = [dict(model.named_parameters())[name] for name in step.gradient_names]

    def clip(gradients: list[Tensor]) -> list[Tensor]:
        stand_ins = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
        for stand_in, gradient in zip(stand_ins, gradients, strict=True):
            stand_in.grad = gradient * 1.0  # clipped in place
        nn.utils.clip_grad_norm_(stand_ins, limit, foreach=False)
        return [stand_in.grad for stand_in in stand_ins if stand_in.grad is not None]

    with fakes:
        traced = compat.trace(clip, ([fakes.from_tensor(parameter.detach()) for parameter in parameters],))
    ours = [node for node in step.graph.graph.nodes if info(node).role is Role.CLIP]
    assert [_said(node) for node in ours] == [_said(node) for node in _clipping(traced)]


def _clipping(traced: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Without what makes stand-ins and copies of gradients."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    start = next(k for k, node in enumerate(nodes) if "norm" in node.name)
    return nodes[start:]


def _said(node: torch.fx.Node) -> tuple[Any, ...]:
    """An operator, its numbers, and how its result lies in memory."""
    name = str(node.target).split(".")[1].rstrip("_")
    value = node.meta["val"]
    numbers = [argument for argument in node.args if isinstance(argument, float | None)]
    return name, numbers, tuple(value.shape), value.stride()
