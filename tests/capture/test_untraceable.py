"""A refusal names the user's line, what Python looked at there, and a way out; the user's own errors stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.followed import compile_alone
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fxcomp import errors
from fxcomp.errors import CaptureFailed


def by_a_truth(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return out.sum() if (out > 0).all() else out.mean()


def by_a_number(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return out.sum() if out.argmax().item() > 2 else out.mean()


def by_a_draw(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return out.sum() if torch.rand([]) < 0.5 else out.mean()


def by_a_size(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return torch.stack([out[int(row)].sum() for row in (out[:, 0] > 0).nonzero()]).sum()


def by_a_picked_size(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    picked = out[out > 0]
    return picked.sum() if len(picked) > 3 else out.mean()


def by_a_distribution(model: nn.Module, batch: Tensor) -> Tensor:
    made: Any = torch.distributions.Normal(model(batch), 1.0, validate_args=True)
    return made.log_prob(0.0).sum()


def wrongly(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.reshape(7, 7)).sum()


@pytest.mark.parametrize(
    ("loss", "line", "seen", "remedy"),
    [
        (by_a_truth, r"if \(out > 0\)\.all\(\)", r"the truth that aten\.all\.default gives", "pass the decision"),
        (by_a_number, r"argmax\(\)\.item\(\) > 2", r"the number that aten\.argmax\.default gives", "torch.where"),
        (by_a_draw, r"torch\.rand\(\[\]\) < 0\.5", r"by a draw.*the truth that aten\.lt", "probability to 0"),
        (by_a_size, r"for row in", r"the size of the output of aten\.nonzero\.default", "Keep the size fixed"),
        (
            by_a_picked_size,
            r"if len\(picked\) > 3",
            r"the size of the output of aten\.index\.Tensor",
            "Keep the size fixed",
        ),
        (by_a_distribution, r"Normal\(", r"torch\.distributions checks", "validate_args=False"),
        (wrongly, r"reshape\(7, 7\)", "RuntimeError: shape", "does not trace|one above"),
    ],
)
def test_a_refusal_names_the_line_the_value_and_a_way_out(loss: Any, line: str, seen: str, remedy: str):
    model = nn.Linear(6, 4)
    with pytest.raises(CaptureFailed) as caught:
        compile_alone(model, loss, batch=torch.randn(3, 6))
    text = str(caught.value)
    assert caught.match(rf"(?s)test_untraceable\.py:\d+: .*{line}"), text
    assert caught.match(f"(?s){seen}"), text
    assert caught.match(f"(?s){remedy}"), text


# The user's own errors


def compiled(loss_fn: Any, batch: Tensor) -> Any:
    return compile_alone(nn.Linear(4, 3), loss_fn, batch=batch, verify="never", compress="dense")


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
    line = r"(?s)loss_fn raised this while it was traced.*test_untraceable\.py:\d+: "
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
