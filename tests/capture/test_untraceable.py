"""A refusal names the user's line, what Python looked at there, and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcomp
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
        (by_a_truth, r"if \(out > 0\)\.all\(\)", r"the truth that aten\.all\.default gives", "pass what is decided"),
        (by_a_number, r"argmax\(\)\.item\(\) > 2", r"the number that aten\.argmax\.default gives", "torch.where"),
        (by_a_draw, r"torch\.rand\(\[\]\) < 0\.5", r"by a draw.*the truth that aten\.lt", "probability to 0"),
        (by_a_size, r"for row in", r"the size of what aten\.nonzero\.default gives", "Keep the size fixed"),
        (
            by_a_picked_size,
            r"if len\(picked\) > 3",
            r"the size of what aten\.index\.Tensor gives",
            "Keep the size fixed",
        ),
        (by_a_distribution, r"Normal\(", r"torch\.distributions checks", "validate_args=False"),
        (wrongly, r"reshape\(7, 7\)", "RuntimeError: shape", "does not trace|one above"),
    ],
)
def test_a_refusal_names_the_line_the_value_and_a_way_out(loss: Any, line: str, seen: str, remedy: str):
    model = nn.Linear(6, 4)
    with pytest.raises(CaptureFailed) as caught:
        fxcomp.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 6))
    text = str(caught.value)
    assert caught.match(rf"(?s)test_untraceable\.py:\d+: .*{line}"), text
    assert caught.match(f"(?s){seen}"), text
    assert caught.match(f"(?s){remedy}"), text


def test_writing_into_a_tensor_that_is_not_the_models_is_refused_where_a_graph_cannot_follow():
    queue = torch.zeros(6, 4, requires_grad=True)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        with torch.no_grad():
            queue.copy_(torch.cat([queue[3:], out.detach()]))
        return (out @ queue.detach().T).mean()

    model = nn.Linear(6, 4)
    with pytest.raises(CaptureFailed, match=r"(?s)not belong to the model.*buffer of the model"):
        fxcomp.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 6))
    assert not queue.any()


class Replacing(nn.Module):
    """Put something else where a buffer was."""

    def __init__(self, start: Tensor | None, change: Callable[[Tensor | None, Tensor], Tensor | None]):
        super().__init__()
        self.body, self.change = nn.Linear(4, 4), change
        self.register_buffer("kept", start)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.change(self.kept, x.detach())
        return self.body(x)


@pytest.mark.parametrize(
    ("start", "change", "text"),
    [
        (torch.ones(3), lambda _, x: x.mean(), r"puts float32\[\] where 'inner\.kept' was float32\[3\]"),
        (torch.ones(2, 4), lambda _, x: x.mean(0), r"puts float32\[4\] where 'inner\.kept' was float32\[2, 4\]"),
        (torch.ones(3), lambda kept, _: kept.double(), r"puts float64\[3\] where"),
        (torch.ones((), dtype=torch.long), lambda kept, _: kept * 1.5, r"puts float32\[\] where .* was int64\[\]"),
        (torch.ones(1), lambda kept, x: torch.cat((kept, x[0])), r"puts float32\[5\] where"),
        (None, lambda _, x: x.mean(0), r"where 'inner\.kept' was nothing"),
        (torch.ones(3), lambda kept, x: None, r"puts nothing where"),  # noqa: ARG005
    ],
)
def test_another_kind_of_tensor_in_a_buffers_place_is_refused(start: Any, change: Any, text: str):
    model = nn.Sequential()
    model.add_module("inner", Replacing(start, change))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureFailed, match=text):
        fxcomp.compile_step(model, lambda m, x: m(x).square().sum(), optimizer, torch.ones(2, 4))


def test_a_buffer_registered_in_the_forward_pass_is_refused():
    class Late(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.register_buffer("late", input.detach().mean(0))
            return super().forward(input)

    model = Late(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureFailed, match=r"puts float32\[4\] where 'late' was nothing"):
        fxcomp.compile_step(model, lambda m, x: m(x).square().sum(), optimizer, torch.ones(2, 4))
