"""Operators in place whose result is of another type: they raise as eager does, or run as eager does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcomp
from fxcomp import errors

ROWS = torch.linspace(-1, 1, 18).view(3, 6)
WRITTEN = {"bool": ROWS > 0, "long": ROWS.mul(9).long(), "float": ROWS, "half": ROWS.bfloat16(), "complex": ROWS + 0j}
OTHERS = {**WRITTEN, "True": True, "2": 2, "2.5": 2.5, "2j": 2j, "of no dimension": torch.tensor(1.5)}
METHODS = ["add_", "sub_", "mul_", "div_"]


def trained(method: str, written: Tensor, others: tuple[Any, ...], compile_it: bool) -> Tensor | Exception:
    """The loss of one step that writes a copy of a tensor of the batch, or what it raises."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = batch[0].clone()
        getattr(value, method)(*batch[1:])
        return (model(ROWS) * value.to(torch.complex64).abs().mean()).mean()

    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    batch = copy.deepcopy((written, *others))
    try:
        if not compile_it:
            return loss(model, batch).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return fxcomp.compile_step(model, loss, optimizer, batch, checks=fxcomp.Checks(verify="never"))(batch)
    except Exception as error:
        return error


def same(method: str, written: Tensor, *others: Any) -> bool:
    """Compare a step with eager's; say if it ran."""
    ours, theirs = (trained(method, written, others, compile_it) for compile_it in (True, False))
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), (method, ours)
        assert torch.allclose(ours, theirs, equal_nan=True), method
    else:
        assert isinstance(ours, Exception), (method, theirs)
        assert isinstance(ours, errors.CaptureFailed) or str(theirs) == str(ours), (method, ours)
    return isinstance(theirs, Tensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.one_in(3)
def test_a_result_goes_into_the_types_that_eager_lets_it_into(name: str):
    ran = [same(method, WRITTEN[name], other) for method in METHODS for other in OTHERS.values()]
    assert any(ran)
    assert not all(ran)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITTEN)
def test_logit_goes_into_the_types_that_eager_lets_it_into(name: str):
    assert same("logit_", WRITTEN[name]) == (name in ("float", "half"))
