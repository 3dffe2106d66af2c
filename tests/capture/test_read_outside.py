"""Values of tensors outside the model that Python reads while tracing: asked again before each step, or refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eager import trains_as_eager
from helpers.followed import compile_alone
from torch import Tensor, nn
from torch.nn import functional

from fxcomp.errors import CaptureFailed

Read = Callable[[Tensor], Any]

STATES = ([1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 3.0, 4.0], [3.0, 5.0, 1.0, 2.0], [2.0, 1.0, 4.0, 3.0])


class Holder:
    """Has a tensor as a plain attribute."""

    def __init__(self, tensor: Tensor):
        self.c = tensor


def in_place(holder: Holder, value: Tensor) -> None:
    with torch.no_grad():
        holder.c.copy_(value)


def another(holder: Holder, value: Tensor) -> None:
    holder.c = value


def nothing(holder: Holder, value: Tensor) -> None:
    pass


CHANGES = (
    (nothing, 0), (nothing, 0), (in_place, 1), (in_place, 2), (in_place, 0), (another, 3), (another, 1), (another, 0),
)  # fmt: skip
"""The changes before each step, and the state that is put: each way makes values that are new, and some seen before."""


def check(read: Read, make: Callable[[list[float]], Tensor] = torch.tensor) -> None:
    """Compare a compiled step with eager PyTorch, for a tensor that is changed before each step."""
    holder = Holder(make(STATES[0]))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).mean() + 1) * read(holder.c)

    def change(model: nn.Module, _: Any, number: int) -> None:  # noqa: ARG001
        how, state = CHANGES[number]
        how(holder, make(STATES[state]))

    batches = [torch.ones(5, 4)] * len(CHANGES)
    trains_as_eager(nn.Linear(4, 3), loss_fn, batches, still, change=change, tolerance=1e-5, verify="never")


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _number(text: str) -> int:
    return sum(map(ord, text))


READERS: dict[str, Read] = {
    "item": lambda c: c[0].item(),
    "int": lambda c: int(c[0]),
    "float": lambda c: float(c[1]),
    "bool": lambda c: 2 if bool(c[0] > 2) else 1,
    "truth": lambda c: 2 if c[0] > 2 else 1,
    "index": lambda c: [3, 1, 4, 1, 5][c[0].long()],
    "math": lambda c: math.sqrt(c[0]),
    "is_nonzero": lambda c: 2 if torch.is_nonzero(c[0] > 2) else 3,
    "tolist": lambda c: c.tolist()[0],
    "tolist of two dimensions": lambda c: c.view(2, 2).tolist()[1][0],
    "sum of a list": lambda c: sum(c.tolist()),
    "key of a list": lambda c: {1.0: 1, 3.0: 2}.get(c.tolist()[0], 4),
    "tensor of a list": lambda c: torch.tensor(c.tolist()).sum(),
    "array of a list": lambda c: float(np.array(c.tolist()).sum()),
    "list": lambda c: sum(list(c)),
    "for": lambda c: sum(v.item() for v in c),
    "in": lambda c: 2 if 1.0 in c else 3,
    "equal": lambda c: 2 if torch.equal(c, torch.tensor(STATES[0])) else 3,
    "allclose": lambda c: 2 if torch.allclose(c, torch.arange(1.0, 5.0), atol=0.5) else 3,
    "nonzero": lambda c: (c > 2).nonzero().shape[0],
    "unique": lambda c: len(c.unique()),
    "one_hot": lambda c: functional.one_hot(c.long()).shape[-1],
    "repeat_interleave": lambda c: torch.ones(4).repeat_interleave(c.long()).shape[0],
    "sizes": lambda c: torch.ones(c[0].long(), c[1].long()).sum(),
    "arange": lambda c: torch.arange(c[0]).sum(),
    "alpha": lambda c: torch.add(torch.ones(3), torch.ones(3), alpha=c[0]).sum(),
    "pad": lambda c: functional.pad(torch.ones(3), (0, int(c[0])), value=1.0).sum(),
    "format": lambda c: float(f"{c[0]:.2f}"),
    "str": lambda c: _number(str(c)),
    "f-string": lambda c: _number(f"{c}"),
    "clone": lambda c: c.clone().sum(),
    "an operator": lambda c: (c * 2).norm(),
}


@pytest.mark.filterwarnings("ignore:fxcomp. the answer", "ignore:To copy construct")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_reader_sees_a_tensor_outside_the_model_as_it_is(read: Read):
    check(read)


def _tagged(value: Any) -> int:
    return _number(str(value))


KINDS: dict[str, Callable[[list[float]], Tensor]] = {
    "bf16": lambda v: torch.tensor(v).bfloat16(),
    "double": lambda v: torch.tensor(v).double(),
    "whole": lambda v: torch.tensor(v).long(),
    "truths": lambda v: torch.tensor(v) > 2,
    "nan": lambda v: torch.where(torch.tensor(v) > 2, math.nan, torch.tensor(v)),
    "minus zero": lambda v: torch.where(torch.tensor(v) > 2, -0.0, 0.0),
    "complex": lambda v: torch.complex(torch.tensor(v), torch.tensor(v)),
    "conjugated": lambda v: torch.complex(torch.tensor(v), torch.tensor(v)).conj(),
    "parameter": lambda v: nn.Parameter(torch.tensor(v), requires_grad=False),
    "strided": lambda v: torch.tensor([v, v]).t()[:, 0],
    "one": lambda v: torch.tensor(v[0]),
    "none": lambda _: torch.zeros(0),
    "many": lambda v: torch.tensor(v).repeat(1000),
}


@pytest.mark.filterwarnings("ignore:fxcomp. the answer")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("read", [lambda c: _tagged(c.tolist()), _tagged, lambda c: _tagged(f"{c}")])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_lists_and_texts_of_every_kind_of_tensor(kind: Callable[[list[float]], Tensor], read: Read):
    check(read, kind)


# Written and read in one step


def written_and_read(use: Callable[[Tensor, Tensor], Any]) -> None:
    """Compare losses and a tensor outside the model over four steps of a loss that writes and reads it."""
    torch.manual_seed(0)
    batches, (ours, theirs) = [torch.rand(5, 4) for _ in range(4)], (torch.tensor(STATES[0]) for _ in range(2))

    def loss_of(c: Tensor) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda model, batch: model(batch).mean() + use(c, batch)

    options: Any = {"eager_loss": loss_of(theirs), "tolerance": 1e-5, "verify": "never"}
    trains_as_eager(nn.Linear(4, 3), loss_of(ours), batches, still, **options)
    torch.testing.assert_close(ours, theirs)


ORDERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a list after a number": lambda c, _: sum(c.mul_(0.5).tolist()),
    "a list before a number": lambda c, _: c.tolist()[0] + c.mul_(0.5).sum(),
    "a list after the batch": lambda c, batch: sum(c.add_(batch.mean()).tolist()),
    "a list after an element": lambda c, _: (operator.setitem(c, 0, 7.0), sum(c.tolist()))[1],
    "a text after a number": lambda c, _: _number(str(c.mul_(0.5))),
}


@pytest.mark.filterwarnings("ignore:fxcomp. the answer")
@pytest.mark.parametrize("use", ORDERS.values(), ids=ORDERS)
def test_what_the_step_writes_is_read_as_it_is_then(use: Callable[[Tensor, Tensor], Any]):
    written_and_read(use)


def test_a_text_of_what_the_batch_has_written_is_refused():
    with pytest.raises(CaptureFailed, match=r"(?s)makes a text .*test_read_outside\.py:\d+"):
        written_and_read(lambda c, batch: _number(str(c.add_(batch.mean()))))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda a: a[1:3],
    "view": lambda a: a.view(2, 2),
    "detached": lambda a: a.detach(),
    "storage": lambda a: torch.empty(0).set_(a.untyped_storage(), 0, (2,), (1,)),
    "numpy": lambda a: torch.from_numpy(a.numpy()),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("read", [lambda c: c.sum(), lambda c: sum(c.view(-1).tolist())], ids=["sum", "tolist"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_written_tensor_outside_the_model_lies_alone(view: Callable[[Tensor], Tensor], swapped: bool, read: Read):
    a = torch.tensor(STATES[0])
    written, other = (view(a), a) if swapped else (a, view(a))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        written.mul_(0.5)
        return model(batch).mean() + read(other)

    model = nn.Linear(4, 3)
    with pytest.raises(CaptureFailed, match=r"(?s)writes a tensor outside the model .*with a tensor .*clone"):
        compile_alone(model, loss_fn, batch=torch.ones(5, 4))
    assert a.tolist() == STATES[0]


def test_a_written_tensor_that_shares_a_buffers_memory_is_refused():
    model = nn.BatchNorm1d(4)
    outside = model.running_mean

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() + view.sum()

    assert outside is not None
    view = outside[:2]
    with pytest.raises(CaptureFailed, match=r"(?s)writes .*running_mean.*with a tensor outside the model"):
        compile_alone(model, loss_fn, batch=torch.rand(5, 4))
