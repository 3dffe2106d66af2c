"""Values of tensors outside the model that Python reads while tracing: asked again before each step, or refused."""

from __future__ import annotations

import copy
import io
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxcomp
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
    """Compare losses of a compiled step and of eager PyTorch, for a tensor that is changed before each step."""
    model, holder, batch = nn.Linear(4, 3), Holder(make(STATES[0])), torch.ones(5, 4)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).mean() + 1) * read(holder.c)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    checks = fxcomp.Checks(verify="never")
    step = fxcomp.compile_step(model, loss_fn, optimizer, batch, compress="dense", checks=checks)
    for change, state in CHANGES:
        change(holder, make(STATES[state]))
        assert step(batch).item() == pytest.approx(loss_fn(model, batch).item(), nan_ok=True)


def _number(text: str) -> int:
    return sum(map(ord, text))


READERS: dict[str, Read] = {
    "item": lambda c: c[0].item(),
    "int": lambda c: int(c[0]),
    "float": lambda c: float(c[1]),
    "bool": lambda c: 2 if bool(c[0] > 2) else 1,
    "truth": lambda c: 2 if c[0] > 2 else 1,
    "complex": lambda c: complex(c[0]).real,
    "index": lambda c: [3, 1, 4, 1, 5][c[0].long()],
    "operator.index": lambda c: operator.index(c[0].long()),
    "range": lambda c: sum(range(c[0].long())),
    "math": lambda c: math.sqrt(c[0]),
    "is_nonzero": lambda c: 2 if torch.is_nonzero(c[0] > 2) else 3,
    "is_nonzero of a tensor": lambda c: 2 if (c[0] > 2).is_nonzero() else 3,
    "tolist": lambda c: c.tolist()[0],
    "tolist of one": lambda c: c[0].tolist(),
    "tolist of a comparison": lambda c: sum((c > 2).tolist()),
    "tolist of two dimensions": lambda c: c.view(2, 2).tolist()[1][0],
    "tolist of .data": lambda c: c.data.tolist()[0],
    "sum of a list": lambda c: sum(c.tolist()),
    "text of a list": lambda c: _number(str(c.tolist())),
    "key of a list": lambda c: {1.0: 1, 3.0: 2}.get(c.tolist()[0], 4),
    "list compared": lambda c: 2 if c.tolist() == [1.0, 2.0, 3.0, 4.0] else 3,
    "tensor of a list": lambda c: torch.tensor(c.tolist()).sum(),
    "tensor of a list by its class": lambda c: torch.Tensor(c.tolist()).sum(),
    "array of a list": lambda c: float(np.array(c.tolist()).sum()),
    "type of a list's item": lambda c: 2 if type(c.tolist()[0]) is float and c.tolist()[0] > 2 else 3,
    "list": lambda c: sum(list(c)),
    "map": lambda c: sum(map(float, c)),
    "for": lambda c: sum(v.item() for v in c),
    "unpacked": lambda c: (lambda first, *_: first)(*c),
    "in": lambda c: 2 if 1.0 in c else 3,
    "equal": lambda c: 2 if torch.equal(c, torch.tensor(STATES[0])) else 3,
    "equal of a tensor": lambda c: 2 if c.equal(torch.arange(1.0, 5.0)) else 3,
    "allclose": lambda c: 2 if torch.allclose(c, torch.arange(1.0, 5.0), atol=0.5) else 3,
    "allclose of a tensor": lambda c: 2 if c.allclose(torch.arange(1.0, 5.0)) else 3,
    "nonzero": lambda c: (c > 2).nonzero().shape[0],
    "argwhere": lambda c: torch.argwhere(c > 2).numel(),
    "where": lambda c: len(torch.where(c > 2)[0]),
    "unique": lambda c: len(c.unique()),
    "mask": lambda c: c[c > 2].numel(),
    "one_hot": lambda c: functional.one_hot(c.long()).shape[-1],
    "repeat_interleave": lambda c: torch.ones(4).repeat_interleave(c.long()).shape[0],
    "slice": lambda c: torch.ones(9)[: c[0].long()].sum(),
    "sizes": lambda c: torch.ones(c[0].long(), c[1].long()).sum(),
    "sizes of a list": lambda c: torch.ones(c.long().tolist()).sum(),
    "arange": lambda c: torch.arange(c[0]).sum(),
    "arange of a number": lambda c: torch.arange(c[0].item()).sum(),
    "alpha": lambda c: torch.add(torch.ones(3), torch.ones(3), alpha=c[0]).sum(),
    "split": lambda c: torch.ones(24).split([*c.long().tolist(), 24 - int(c.sum())])[0].sum(),
    "pad": lambda c: functional.pad(torch.ones(3), (0, int(c[0])), value=1.0).sum(),
    "format": lambda c: float(f"{c[0]:.2f}"),
    "str": lambda c: _number(str(c)),
    "repr": lambda c: _number(repr(c)),
    "f-string": lambda c: _number(f"{c}"),
    "clone": lambda c: c.clone().sum(),
    "torch.tensor": lambda c: torch.tensor(c).sum(),
    "an operator": lambda c: (c * 2).norm(),
}


@pytest.mark.filterwarnings("ignore:fxcomp. the answer", "ignore:To copy construct")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_reader_sees_a_tensor_outside_the_model_as_it_is(read: Read):
    check(read)


def _saved(c: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(c, buffer)
    buffer.seek(0)
    return torch.load(buffer).sum()


REFUSED: dict[str, tuple[Read, str]] = {
    "numpy": (lambda c: float(c.numpy()[0]), r"\.numpy\(\)"),
    "asarray": (lambda c: float(np.asarray(c)[0]), r"\.__array__\(\)"),
    "dlpack": (lambda c: float(np.from_dlpack(c)[0]), r"\.__dlpack__\(\)"),
    "apply_": (lambda c: c.clone().apply_(lambda v: v * 2).sum(), r"\.apply_\(\)"),
    "map_": (lambda c: torch.zeros(4).map_(c, lambda a, b: a + b).sum(), r"\.map_\(\)"),
    "storage": (lambda c: c.untyped_storage()[3], "past torch's operators"),
    "deepcopy": (lambda c: copy.deepcopy(c).sum(), "past torch's operators"),
    "pickle": (lambda c: pickle.loads(pickle.dumps(c)).sum(), "past torch's operators"),
    "save": (_saved, "past torch's operators"),
    "torch.tensor of tensors": (lambda c: torch.tensor([c[0], c[1]]).sum(), "past torch's operators.*torch.stack"),
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize(("read", "says"), REFUSED.values(), ids=REFUSED)
def test_readers_past_operators_are_refused_with_the_line(read: Read, says: str):
    with pytest.raises(CaptureFailed, match=rf"(?s){says}.*test_read_outside\.py:\d+|test_read_outside.*{says}"):
        check(read)


class Marked(Tensor):
    """A subclass without anything of its own."""


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


@pytest.mark.parametrize("read", [lambda c: c.tolist()[0], _tagged, lambda c: _tagged(f"{c}")])
def test_a_subclass_outside_the_model_is_not_read(read: Read):
    with pytest.raises(CaptureFailed, match=r"(?s)values of a Marked .*test_read_outside\.py.*as_subclass"):
        check(read, lambda v: torch.tensor(v).as_subclass(Marked))


# Written and read in one step


def written_and_read(use: Callable[[Tensor, Tensor], Any]) -> None:
    """Compare losses and a tensor outside the model over four steps of a loss that writes and reads it."""
    torch.manual_seed(0)
    model, batches = nn.Linear(4, 3), [torch.rand(5, 4) for _ in range(4)]
    found: dict[bool, list[Any]] = {}
    for compiled in (False, True):
        c = torch.tensor(STATES[0])

        def loss_fn(model: nn.Module, batch: Tensor, c: Tensor = c) -> Tensor:
            return model(batch).mean() + use(c, batch)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        checks = fxcomp.Checks(verify="never")
        step: Any = lambda batch, loss_fn=loss_fn: loss_fn(model, batch)  # noqa: E731
        if compiled:
            step = fxcomp.compile_step(model, loss_fn, optimizer, batches[0], compress="dense", checks=checks)
        found[compiled] = [value for batch in batches for value in (step(batch).item(), *c.tolist())]
    assert found[True] == pytest.approx(found[False])


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
    with pytest.raises(CaptureFailed, match=r"(?s)writes a tensor outside the model .*memory a tensor .*clone"):
        fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(5, 4))
    assert a.tolist() == STATES[0]


def test_a_written_tensor_that_shares_a_buffers_memory_is_refused():
    model = nn.BatchNorm1d(4)
    outside = model.running_mean

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() + view.sum()

    assert outside is not None
    view = outside[:2]
    with pytest.raises(CaptureFailed, match=r"(?s)writes .*running_mean.*memory a tensor outside the model"):
        fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(5, 4))
