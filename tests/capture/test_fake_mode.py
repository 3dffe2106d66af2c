"""Fakes know what a draw can be, and what operators make of their arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager import trains_as_eager
from torch import Tensor, nn

import fxcomp
from fxcomp.capture.fake_mode import StepFakes
from fxcomp.errors import CaptureFailed


class Layers(nn.Module):
    """A stack whose layers are left out by a draw, with dropout after them: a draw too few or too many would show."""

    def __init__(self, skips: Callable[[], Any]):
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Dropout(0.5)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.skips():
                x = self.dropout(layer(x))
        return x


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


NEVER = {
    "tensor": lambda: torch.rand([]) < 0.0,
    "number": lambda: torch.rand(1).item() < 0.0,
    "in place": lambda: torch.empty(()).uniform_(0, 1) < 0.0,
    "negated": lambda: not torch.rand([]) >= 0.0,
    "scaled": lambda: torch.rand(1) * 2 - 1 > 1.0,
    "all": lambda: (torch.rand(3) >= 1.0).any(),
    "arithmetic of Python": lambda: torch.rand(1).item() * 2 + 1 > 4.0,
}


@pytest.mark.parametrize("skips", NEVER.values(), ids=NEVER.keys())
def test_a_comparison_that_no_draw_can_change_is_decided_and_drawn_for_all_the_same(skips: Any):
    torch.manual_seed(0)
    trains_as_eager(Layers(skips), square, [torch.randn(3, 4) for _ in range(2)])


def outgrown() -> Tensor:
    """A draw that is written to afterwards, through another view of it."""
    draw = torch.rand(2)
    draw.view(-1).sub_(1.0)
    return draw[0] < 0.0


DRAWN = {
    "rarely": lambda: torch.rand([]) < 0.1,
    "as a number": lambda: torch.rand(1).item() < 0.1,
    "beside other data": lambda: torch.rand([]) * torch.randn([]) < 0.0,
    "written later": outgrown,
}


@pytest.mark.parametrize("skips", DRAWN.values(), ids=DRAWN.keys())
def test_a_comparison_that_a_draw_decides_is_refused(skips: Any):
    model = Layers(skips)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureFailed, match="values of tensors"):
        fxcomp.compile_step(model, square, optimizer, torch.randn(3, 4))


class Experts(nn.Module):
    """Rows sorted by expert, and one product for all groups of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, self.weight, offs=offsets)


def test_a_grouped_product_in_fp32_trains_as_eager():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.tensor(ends, dtype=torch.int32)) for ends in ([2, 5, 8], [0, 3, 8])]
    trains_as_eager(Experts(), lambda model, batch: model(*batch).square().mean(), batches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("a", "b"), [((8, 16), (3, 16, 5)), ((3, 8, 16), (3, 16, 5)), ((16, 8), (8, 16))])
def test_a_fake_grouped_product_lies_in_memory_as_the_real_one(a: Any, b: Any, dtype: torch.dtype):
    offsets = torch.tensor([2, 5, 8], dtype=torch.int32) if len(a) == 2 else None
    arguments = torch.randn(a, dtype=dtype), torch.randn(b, dtype=dtype)
    if len(b) == 3:
        arguments = arguments[0], arguments[1].transpose(1, 2).contiguous().transpose(1, 2)
    real = torch.nn.functional.grouped_mm(*arguments, offs=offsets)
    with StepFakes() as mode:
        fake = torch.nn.functional.grouped_mm(
            *(mode.from_tensor(tensor) for tensor in arguments), offs=mode.from_tensor(offsets) if len(a) == 2 else None
        )
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 2, 0), (0, 1, 2), (0, 3, 1, 2), (2, 3, 0, 1), (3, 0, 1, 2)])
@pytest.mark.one_in(3)
def test_batch_norm_lies_as_its_kernel_lays_it_out(order: tuple[int, ...]):
    x = torch.randn(4, 5, 8, 3)[(..., 0) if len(order) == 3 else ...].permute(order)
    weight, mean, var = (make(x.shape[1]) for make in (torch.ones, torch.zeros, torch.ones))

    def strides(*values: Any) -> list[Any]:
        out, *saved = torch.ops.aten.native_batch_norm.default(*values, weight, mean, mean, var, True, 0.1, 1e-5)
        args = weight, mean, var, *saved, True, 1e-5, [True, True, True]
        back = torch.ops.aten.native_batch_norm_backward.default(values[0], values[0], *args)[0]
        return [out.stride(), back.stride()]

    fakes = StepFakes()
    with fakes:
        faked = strides(fakes.from_tensor(x))
    assert faked == strides(x)


def test_a_bf16_linear_behind_a_transposed_batch_norm_rounds_as_in_eager():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)).float().square().mean()

    torch.manual_seed(0)
    model, batch = Normed(), torch.randn(4, 5, 8)
    expected = copy.deepcopy(model)(batch)
    step = fxcomp.compile_step(model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=0.1), batch)
    assert torch.equal(step(batch), expected.detach())
