"""Norms of every order, covariances and what checks values inside of one operator train as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxcomp
from fxcomp.errors import CaptureFailed

linalg: Any = torch.linalg
INF = float("inf")


def compiled(model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any) -> Any:
    optimizer, checks = torch.optim.SGD(model.parameters(), lr=0.1), fxcomp.Checks(verify="never")
    return fxcomp.compile_step(model, loss, optimizer, batch, compress="dense", checks=checks)


def check_as_eager(of_rows: Callable[[Tensor], Tensor]) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        rows = model(x)
        return of_rows(rows).square().sum() + rows.sum()

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    eager = copy.deepcopy(model)
    batches = [torch.randn(6, 4) for _ in range(2)]
    step, optimizer = compiled(model, loss, batches[0]), torch.optim.SGD(eager.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        expected = loss(eager, x)
        expected.backward()
        optimizer.step()
        assert torch.equal(step(x), expected)
        assert all(map(torch.equal, model.parameters(), eager.parameters()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("order", [-INF, -2, -1, 0, 0.5, 1, 1.5, 2, 3, 4.0, 5, INF])
def test_norms_of_all_orders(order: float, dim: Any):
    check_as_eager(lambda rows: linalg.vector_norm(rows, ord=order, dim=dim, keepdim=True))
    check_as_eager(lambda rows: rows.norm(order, dim))


@pytest.mark.parametrize("order", [1.0, 3.0, 4.0, INF])
def test_rows_are_normalized(order: float):
    check_as_eager(lambda rows: functional.normalize(rows, p=order))


WRITES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.pow_(2.0), lambda x: x.pow_(torch.full((4,), 3.0)), lambda x: x.ldexp_(torch.ones(4)),
    lambda x: x.floor_divide_(torch.ones(4)), lambda x: x.float_power_(2), lambda x: x.mul_(2.0).transpose_(0, 1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_operators_in_place_of_numbers_and_of_tensors(number: int):
    check_as_eager(lambda rows: rows + WRITES[number]((rows.detach().abs() + 1).double()).sum().float())


OF_ROWS: list[Callable[[Tensor], Tensor]] = [
    lambda rows: torch.cov(rows.T), lambda rows: torch.corrcoef(rows.T), lambda rows: rows.T.cov(correction=0),
    lambda rows: torch.cov(rows.T, fweights=torch.arange(6), aweights=torch.ones(6)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OF_ROWS)))
def test_covariances(number: int):
    check_as_eager(OF_ROWS[number])


def test_weights_of_a_covariance_may_come_in_the_batch():
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cov(model(batch[0]).T, fweights=batch[1]).square().sum()

    model, weights = nn.Linear(4, 4), torch.arange(6)
    step = compiled(model, loss, (torch.randn(6, 4), weights))
    x = torch.randn(6, 4)
    expected = loss(model, (x, weights + 1))
    assert torch.equal(step((x, weights + 1)), expected)
    with pytest.raises(CaptureFailed, match="fweights cannot be negative"):
        step((x, weights - 3))


def of_singular_vectors(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows = model(batch[0])
    left = linalg.svd(torch.complex(rows, batch[0]), full_matrices=False)[0]
    return (left.abs().square() + batch[1] * left.real).sum() + rows.square().sum()


def test_the_backward_pass_of_a_complex_svd_checks_as_in_eager():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4).double(), torch.randn(6, 4).double()
    good, bad = (x, torch.zeros(6, 4).double()), (x, torch.arange(24.0).view(6, 4).double())
    step, eager = compiled(model, of_singular_vectors, good), copy.deepcopy(model)
    expected = of_singular_vectors(eager, good)
    expected.backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    assert torch.equal(step(good), expected)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    with pytest.raises(RuntimeError, match="phase"):
        of_singular_vectors(eager, bad).backward()
    with pytest.raises(RuntimeError, match="phase"):
        step(bad)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_results_of_sizes_that_values_tell_are_named():
    with pytest.raises(CaptureFailed, match=r"the sizes of what aten\.linalg_lstsq(?s:.*)linalg\.pinv"):
        compiled(nn.Linear(4, 4), lambda m, x: linalg.lstsq(m(x), x[:, :2]).solution.sum(), torch.randn(6, 4))
