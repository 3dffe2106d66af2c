"""A step does not depend on where a fake says that its tensor lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.eager import trains_as_eager
from torch import Tensor, nn

import fxcomp
from fxcomp.errors import CaptureFailed


class Between(nn.Module):
    """Something done to a transposed tensor, between two linear layers."""

    def __init__(self, does: Callable[[Tensor], Tensor]):
        super().__init__()
        self.before, self.after, self.does = nn.Linear(6, 8), nn.Linear(8, 4), does

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.does(self.before(x).transpose(1, 2)).transpose(1, 2))


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def normed(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


LYING = {
    "batch norm": normed,
    "flattened": lambda x: normed(x).flatten(1).view(x.shape),
    "hardswish": F.hardswish,
    "dropout": lambda x: F.dropout(normed(x), 0.5),
    "power": lambda x: 2.0**x,
    "smooth loss": lambda x: x * F.smooth_l1_loss(x, x.detach() / 2),
}


@pytest.mark.parametrize("does", LYING.values(), ids=LYING.keys())
def test_operators_whose_fakes_lie_about_strides_train_as_eager(does: Any):
    torch.manual_seed(0)
    trains_as_eager(Between(does), square, [torch.randn(3, 5, 6) for _ in range(2)])


def targets(does: Any) -> list[str]:
    model = Between(does)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxcomp.compile_step(model, square, optimizer, torch.randn(3, 5, 6), compress="dense")
    return (
        [str(n.target) for n in step.in_force.program.captured.graph.graph.nodes]
        if step.in_force.program is not None
        else []
    )


def test_a_view_of_what_surely_lies_so_stays_a_view():
    found = targets(lambda x: (x * 2).tanh())
    assert "aten.view.default" in found
    assert "aten.reshape.default" not in found


def test_a_view_by_strides_of_what_may_lie_otherwise_is_refused():
    model = Between(lambda x: normed(x).as_strided((3, 8, 5), (40, 1, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureFailed, match=r"as_strided on the output of .*native_batch_norm"):
        fxcomp.compile_step(model, square, optimizer, torch.randn(3, 5, 6))
    trains_as_eager(Between(lambda x: (x * 2).as_strided((3, 8, 5), (40, 1, 8))), square, [torch.randn(3, 5, 6)])


def test_a_view_by_strides_of_a_padded_product_is_taken():
    """Whatever lies in front of the product: it lies row by row, and so does what is padded."""

    def windows(x: Tensor) -> Tensor:
        product = normed(x).flatten(0, 1) @ torch.ones(5, 4)
        return F.pad(product, (0, 0, 1, 1)).as_strided((3, 8, 5), (32, 4, 1))

    trains_as_eager(Between(windows), square, [torch.randn(3, 5, 6)])


def test_pooling_to_one_pixel_is_no_view_by_strides():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(model(batch).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), 1)
        return pooled.flatten(1).square().mean()

    trains_as_eager(model, loss, [torch.randn(2, 3, 6, 6)])


def test_torch_compile_runs_what_its_fakes_lie_about():
    torch.manual_seed(0)
    model, x = Between(lambda x: normed(x).flatten(1).view(x.shape)), torch.randn(3, 5, 6)
    expected = torch.autograd.grad(square(model, x), list(model.parameters()))
    compiled = torch.compile(model, backend="fxcomp", fullgraph=True)
    found = torch.autograd.grad(square(compiled, x), list(model.parameters()))
    assert all(map(torch.equal, expected, found))
