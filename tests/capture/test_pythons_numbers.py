"""Numbers that are read while a step is traced are Python's: as text, keys, by type and identity, nan and -0.0 too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.followed import compile_alone
from torch import Tensor, nn

import fxcomp
from fxcomp.errors import CaptureFailed

Claim = Callable[[Any], bool]


def losses(claim: Claim, values: Sequence[Tensor]) -> list[tuple[float, float]]:
    """The losses of a compiled step and of eager PyTorch, for a loss that is twice as large where a claim is true."""
    model = nn.Linear(4, 3)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).mean() * (2 if claim(batch[1]) else 1)

    batches = [(torch.ones(5, 4), value) for value in values]
    step = compiled(model, loss_fn, batches[0])
    return [(step(batch).item(), loss_fn(model, batch).item()) for batch in batches]


def compiled(model: nn.Module, loss_fn: Any, batch: Any) -> fxcomp.CompiledStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return compile_alone(model, loss_fn, optimizer, batch, compress="dense", verify="never")


def check(claim: Claim, values: Sequence[Tensor]) -> None:
    found = losses(claim, values)
    assert [one for one, _ in found] == pytest.approx([other for _, other in found])
    assert len({claim(value) for value in values}) == 2, "eager takes both branches"


WHOLE: dict[str, Claim] = {
    "str": lambda t: str(t.item()) == "1",
    "f-string": lambda t: f"{t.item()}" == "1",
    "f-string of a tensor": lambda t: f"{t}" == "1",
    "percent": lambda t: "%s" % t.item() == "1",  # noqa: UP031
    "key": lambda t: {1: True}.get(t.item(), False),
    "set": lambda t: t.item() in {1, 5},
    "equal to True": lambda t: t.item() == True,  # noqa: E712
    "type": lambda t: type(t.item()) is int and t.item() == 1,
    "JSON": lambda t: json.dumps({"n": t.item()}) == '{"n": 1}',
    "divmod": lambda t: divmod(t.item(), 2) == (0, 1),
    "divmod by it": lambda t: divmod(3, t.item()) == (3, 0),
    "comparison as key": lambda t: {True: False, False: True}[t.item() > 1],
    "comparison is": lambda t: (t.item() > 1) is False,
    "comparisons, exclusive": lambda t: (t.item() > 1) ^ (t.item() > 0),
    "comparisons, sorted": lambda t: sorted([t.item() > 1, t.item() > 0])[0] == 0,
    "isinstance": lambda t: isinstance(t.item(), int) and t.item() == 1,
}

TRUTHS: dict[str, Claim] = {
    "is": lambda t: t.item() is True,
    "str": lambda t: str(t.item()) == "True",
    "isinstance": lambda t: isinstance(t.item(), bool) and t.item(),
}

LISTS: dict[str, Claim] = {
    "str": lambda t: str(t.tolist()) == "[1, 2, 3]",
    "len of a set": lambda t: len(set(t.tolist())) == 3,
    "size that is data": lambda t: str(t.unique().shape[0]) == "3",
    "shape that is data": lambda t: str(t.unique().shape) == "torch.Size([3])",
}

FLOATS: dict[str, Claim] = {
    "v != v": lambda v: v != v,
    "v >= v": lambda v: v >= v,
    "v - v == 0": lambda v: v - v == 0,
    "v * 0 == 0": lambda v: v * 0 == 0,
    "copysign": lambda v: math.copysign(1, v) < 0,
    "min": lambda v: min(v, 5) == v,
    "or": lambda v: bool((v != v) | (v > 1e30)),
    "second branch": lambda v: False if v > 0 else v != v,
    "text": lambda v: str(v) == "-0.0",
    "key": lambda v: v in {2.5, 1.0},
    "is_integer": lambda v: v.is_integer(),
}

SIZES: dict[str, Claim] = {
    "shape": lambda t: str(t.shape) == "torch.Size([2])",
    "size": lambda t: f"{t.shape[0]}" == "2",
    "format": lambda t: f"{t.shape[0]:03d}" == "002",
    "isinstance": lambda t: isinstance(t.shape[0], int) and t.shape[0] == 2,
    "round": lambda t: round(t.shape[0] * 0.5) == 2,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("claim", WHOLE.values(), ids=WHOLE)
def test_a_whole_number(claim: Claim):
    check(claim, [torch.tensor(n) for n in (1, 2, 1)])


@pytest.mark.parametrize("claim", TRUTHS.values(), ids=TRUTHS)
def test_a_truth(claim: Claim):
    check(claim, [torch.tensor(truth) for truth in (True, False, True)])


@pytest.mark.parametrize("claim", LISTS.values(), ids=LISTS)
def test_numbers_of_a_list(claim: Claim):
    check(claim, [torch.tensor(each) for each in ([1, 2, 3], [1, 1, 4], [2, 1, 2])])


def test_a_long_list_is_one_question() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).mean() * sum(batch[1].tolist())

    model, first = nn.Linear(4, 3), (torch.ones(5, 4), torch.arange(1000))
    step = compiled(model, loss_fn, first)
    prelude = step.in_force.program.captured.prelude
    assert prelude is not None
    assert len(prelude) == 1
    for batch in (first, (first[0], first[1].flip(0) + 1), first):
        assert step(batch).item() == pytest.approx(loss_fn(model, batch).item())


OTHERS = {"shape": torch.ones(3), "dimensions": torch.ones(1, 2), "dtype": torch.ones(2).double()}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_tensors_of_other_kinds_are_compared_as_in_eager(other: Tensor) -> None:
    check(lambda t: torch.equal(t, other) or t[0].item() > 2, [torch.full((2,), n) for n in (3.0, 1.0, 0.0)])


def test_a_tensor_with_nan_is_not_equal_to_itself() -> None:
    check(lambda t: torch.equal(t, t), [torch.ones(2), torch.tensor([math.nan, 1.0])])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("claim", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("reads", [lambda t: t[1].item(), lambda t: t.tolist()[1]], ids=["item", "tolist"])
def test_a_float_may_be_nan_infinite_or_minus_zero(claim: Claim, reads: Callable[[Tensor], float]):
    values = [1.0, math.nan, -0.0, 0.0, math.inf, 2.5]
    check(lambda t: claim(reads(t)), [torch.tensor([1.0, value]) for value in values])


@pytest.mark.filterwarnings("ignore:fxcomp. the shape of batch")  # text of a size takes a capture for each
@pytest.mark.parametrize("claim", SIZES.values(), ids=SIZES)
def test_a_size_that_varies(claim: Claim):
    check(claim, [torch.zeros(n) for n in (5, 3, 7, 2, 4)])


def test_a_rounded_size_is_computed_in_the_step():
    rounded = losses(lambda t: round(t.shape[0] * 0.5) > 1, [torch.zeros(n) for n in (5, 3, 7, 2, 9)])
    assert [one for one, _ in rounded] == pytest.approx([other for _, other in rounded])


def test_elements_picked_by_what_nonzero_gives():
    def picks(t: Tensor) -> bool:
        found = (t == 3).nonzero()
        return bool(found.numel()) and int(found[0, 0]) == 1

    check(picks, [torch.tensor(each) for each in ([1, 3, 2], [1, 2, 3], [1, 1, 1], [3, 3, 1])])


UNKNOWN: dict[str, Callable[[Tensor], object]] = {
    "key": lambda loss: loss.item() in {1.0},
    "larger": lambda loss: bool(loss.item() > 100),
}


@pytest.mark.parametrize("asks", UNKNOWN.values(), ids=UNKNOWN)
def test_what_only_the_step_tells_is_refused_with_the_line(asks: Callable[[Tensor], object]):
    model = nn.Linear(4, 3)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).mean()
        asks(loss)
        return loss

    with pytest.raises(CaptureFailed, match=r"test_pythons_numbers\.py:\d+") as refused:
        compiled(model, loss_fn, torch.ones(5, 4))
    assert "values of tensors" in str(refused.value) or "a tensor's values" in str(refused.value)


def test_a_number_of_the_loss_may_be_returned():
    model = nn.Linear(4, 3)

    def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        loss = model(batch).mean()
        return loss, loss.item() * 2

    batch = torch.ones(5, 4)
    expected = loss_fn(model, batch)[1]
    assert compiled(model, loss_fn, batch)(batch)[1] == pytest.approx(expected)
