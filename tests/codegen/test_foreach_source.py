"""Updates over lists of parameters do what one after the other does, bit for bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers.gathered import gathered
from torch import Tensor, nn

import fxcomp


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def train(kind: Any, options: dict[str, Any], **more: Any) -> tuple[list[Tensor], dict[str, Any], fxcomp.CompiledStep]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 4, bias=False))
    parameters = list(model.parameters())
    optimizer = kind([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.3}], **options)
    batches = [torch.randn(5, 8) for _ in range(4)]
    step = fxcomp.compile_step(model, square, optimizer, batches[0], **gathered(plan="dense", **more))
    for batch in batches:
        step(batch)
    return [p.detach().clone() for p in parameters], copy.deepcopy(optimizer.state_dict()["state"]), step


@pytest.mark.one_in(3)
@pytest.mark.parametrize("more", [{"verify": 1}, {"verify": "never", "max_grad_value": 0.01}])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
        (torch.optim.NAdam, {"lr": 0.1}),
        (torch.optim.Rprop, {"lr": 0.1}),
    ],
)
def test_lists_give_the_bits_of_one_after_the_other(
    kind: Any, options: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fxcomp.codegen.emit.listed_elements", lambda _: 0)
    expected, states, _ = train(kind, options, **more)
    monkeypatch.setattr("fxcomp.codegen.emit.listed_elements", lambda _: math.inf)
    found, states_by_lists, step = train(kind, options, **more)
    assert all(map(torch.equal, found, expected))
    for place, state in states.items():
        for key, value in state.items():
            assert torch.equal(states_by_lists[place][key], value)
    groups = 1 if kind is torch.optim.Rprop else 2  # its rate is in its state
    assert step.source.count("    optimizer_step_") == groups


def test_adamw_launches_one_kernel_an_operator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxcomp.codegen.emit.listed_elements", lambda _: math.inf)
    _, _, step = train(torch.optim.AdamW, {"lr": 0.1})
    rule = step.source.partition("def optimizer_step_0")[2].partition("\n\n")[0]
    for line in (
        "aten._foreach_mul_.Scalar(parameters, sub)",
        "aten._foreach_lerp_.Scalar(exp_avgs, gradients, sub_0)",
        "aten._foreach_addcmul_.Scalar(exp_avg_sqs, gradients, gradients, sub_1)",
        "sqrt = aten._foreach_sqrt.default(exp_avg_sqs)",
        "aten._foreach_addcdiv_.ScalarList(parameters, exp_avgs, div, neg)",
    ):
        assert line in rule, rule


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_the_cpu_lists_are_not_for_16_bits_which_they_round_otherwise(dtype: torch.dtype):
    model = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 10)).to(dtype)
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = fxcomp.compile_step(
        model, lambda m, b: m(b).float().square().mean(), optimizer, batch, checks=fxcomp.Checks(verify=1)
    )
    for _ in range(3):
        step(batch)
    assert "_foreach_" not in step.source
