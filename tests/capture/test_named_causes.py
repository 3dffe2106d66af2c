"""Errors name the cause as it is: the user's own error, a hook's draw, torch's counter of operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
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


class OutOfPatience(Exception):
    """An exception of the user's own, which a text alone does not make."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def loses_patience() -> Tensor:
    raise OutOfPatience(3, "enough")


MISTAKES: dict[type[Exception], Callable[[Any], Any]] = {
    KeyError: lambda out: out.mean() * {"a": 1}["b"],
    IndexError: lambda out: out.mean() * [1][4],
    AttributeError: lambda out: out.there_is_no_such_thing.mean(),
    TypeError: lambda out: out.mean() + "x",
    NameError: lambda _: there_is_no_such_thing,  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    ZeroDivisionError: lambda out: out.mean() * (1 // 0),
    ValueError: lambda out: torch.distributions.Normal(0.0, -1.0, validate_args=True).log_prob(out.mean()),
    AssertionError: lambda _: torch._assert(False, "never"),
    FileNotFoundError: lambda _: Path("/there/is/no/such/file").read_text(),
    OutOfPatience: lambda _: loses_patience(),
}
BY_OPERATORS: dict[str, Callable[[Any], Any]] = {
    "index": lambda out: out[9, 0],
    "dimension": lambda out: out.sum(7),
    "module": lambda _: nn.ModuleList()[4],
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_an_error_of_the_users_code_comes_out_itself(kind: type[Exception]):
    line = r"(?s)loss_fn raised this while it was traced.*test_named_causes\.py:\d+: "
    with pytest.raises(kind, match=line) as told:
        compiled(lambda m, x: MISTAKES[kind](m(x)), torch.ones(5, 4))
    assert type(told.value) is kind
    assert "checkpointing" not in str(told.value)


@pytest.mark.parametrize("name", BY_OPERATORS)
def test_an_index_out_of_range_is_an_index_error(name: str):
    with pytest.raises(IndexError, match="loss_fn raised this"):
        compiled(lambda m, x: BY_OPERATORS[name](m(x)), torch.ones(5, 4))


def test_an_error_that_a_later_batch_leads_to_comes_out_itself():
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if batch.shape[0] > 6 or batch[0, 0] < 0:
            raise OutOfPatience(len(batch), "enough")
        return model(batch).mean()

    step = compiled(loss, torch.ones(5, 4))
    for batch in (torch.ones(5, 4), torch.ones(4, 4), torch.ones(3, 4), torch.ones(2, 4)):
        step(batch)
    for batch in (torch.ones(7, 4), -torch.ones(5, 4), -torch.ones(8, 4)):
        with pytest.raises(OutOfPatience) as told:
            step(batch)
        assert told.value.code == len(batch)
        step(torch.ones(6, 4))


def test_a_number_for_a_loss_is_told_about_item():
    with pytest.raises(errors.Unsupported, match=r"a number that it read from a tensor.*\n.*Leave out \.item\(\)"):
        compiled(lambda m, x: m(x).mean().item(), torch.ones(5, 4))


@pytest.mark.parametrize("logs", [float, lambda loss: f"{loss.item():.3f}", lambda loss: round(float(loss), 3)])
def test_a_number_for_a_log_is_told_to_be_returned(logs: Callable[[Tensor], Any]):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch).mean()
        logs(found)
        return found

    with pytest.raises(errors.CaptureFailed, match="return the tensor beside the loss"):
        compiled(loss, torch.ones(5, 4))


def test_a_tensor_outside_that_begins_to_require_a_gradient_is_named_by_its_shape():
    outside = torch.ones(3)
    step = compiled(lambda m, x: (m(x) * outside).mean(), torch.ones(5, 4))
    outside.requires_grad_()
    with pytest.raises(errors.CaptureFailed, match=r"(?s)a tensor of shape \[3\] that requires a gradient.*detach"):
        step(torch.ones(5, 4))


@pytest.mark.parametrize("hook", [lambda g: g + torch.rand_like(g), functional.dropout])
def test_a_gradient_hook_that_draws_is_told_about_hooks(hook: Callable[[Tensor], Tensor]):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        out.register_hook(hook)
        return out.square().mean()

    with pytest.raises(errors.CaptureFailed, match=r"(?s)a gradient hook that draws.*draw in the forward pass"):
        compiled(loss, torch.ones(5, 4))


def test_torchs_counter_of_operations_around_a_step_is_named():
    batch = torch.ones(5, 4)
    step = compiled(lambda m, x: m(x).mean(), batch)
    with FlopCounterMode(display=False), pytest.raises(errors.Unsupported, match="FlopCounterMode is on around"):
        step(batch)
    with FlopCounterMode(display=False), pytest.raises(errors.Unsupported, match="FlopCounterMode is on around"):
        compiled(lambda m, x: m(x).mean(), batch)
    assert step(batch).isfinite()
