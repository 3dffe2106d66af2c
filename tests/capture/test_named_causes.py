"""Errors name the cause as it is: the user's own error, a hook's draw, torch's counter of operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import fxcomp
from fxcomp import errors


def compiled(loss_fn: Any, batch: Tensor, model: nn.Module | None = None) -> Any:
    model = model or nn.Linear(4, 3)
    optimizer, checks = torch.optim.SGD(model.parameters(), lr=0.1), fxcomp.Checks(verify="never")
    return fxcomp.compile_step(model, loss_fn, optimizer, batch, compress="dense", checks=checks)


OF_NOTHING: list[Callable[..., Tensor]] = [
    functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss, functional.l1_loss,
    functional.binary_cross_entropy_with_logits, functional.soft_margin_loss, functional.poisson_nll_loss,
]  # fmt: skip


@pytest.mark.parametrize("loss", OF_NOTHING)
def test_the_mean_of_nothing_trains_as_in_eager(loss: Callable[..., Tensor]):
    model, batch = nn.Linear(4, 3), torch.ones(0, 4)
    eager = copy.deepcopy(model)
    step = compiled(lambda m, x: loss(m(x), torch.zeros(x.shape[0], 3)), batch, model)
    assert step(batch).isnan()
    loss(eager(batch), torch.zeros(0, 3)).backward()
    expected = [p - 0.1 * p.grad for p in eager.parameters() if p.grad is not None]
    assert all(map(torch.equal, model.parameters(), expected))


MISTAKES: dict[str, Callable[[Tensor], Any]] = {
    "KeyError": lambda out: out.mean() * {"a": 1}["b"],
    "IndexError": lambda out: out.mean() * [1][4],
    "AttributeError": lambda out: out.there_is_no_such_thing.mean(),
    "TypeError": lambda out: out.mean() + "x",
    "NameError": lambda _: there_is_no_such_thing,  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    "ZeroDivisionError": lambda out: out.mean() * (1 // 0),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_of_the_users_code_is_told_with_its_line(name: str):
    with pytest.raises(
        errors.CaptureFailed, match=rf"(?s)loss_fn raised {name} while.*test_named_causes\.py:\d+: "
    ) as told:
        compiled(lambda m, x: MISTAKES[name](m(x)), torch.ones(5, 4))
    assert type(told.value.__cause__).__name__ == name
    assert "checkpointing" not in str(told.value)


@pytest.mark.parametrize("hook", [lambda g: g + torch.rand_like(g), functional.dropout])
def test_a_gradient_hook_that_draws_is_told_about_hooks(hook: Callable[[Tensor], Tensor]):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        out.register_hook(hook)
        return out.square().mean()

    with pytest.raises(errors.RandomRecomputation, match=r"(?s)a gradient hook that draws.*draw in the forward pass"):
        compiled(loss, torch.ones(5, 4))


def test_torchs_counter_of_operations_around_a_step_is_named():
    batch = torch.ones(5, 4)
    step = compiled(lambda m, x: m(x).mean(), batch)
    with FlopCounterMode(display=False), pytest.raises(errors.UnsupportedMode, match="FlopCounterMode is on around"):
        step(batch)
    with FlopCounterMode(display=False), pytest.raises(errors.UnsupportedMode, match="FlopCounterMode is on around"):
        compiled(lambda m, x: m(x).mean(), batch)
    assert step(batch).isfinite()
