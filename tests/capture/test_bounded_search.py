"""Captures look at a bounded part of Python, whatever the process has done before and whatever hangs together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.followed import BATCH, compiled, small
from helpers.jobs import cross_entropy
from torch import Tensor, nn

from fxcomp import errors
from fxcomp.capture.reach import restore
from fxcomp.capture.reach.walk import PLACES, Reach, walk

KEPT: dict[str, Any] = {}


def keeping(make: Callable[[nn.Module, Tensor], Any]) -> Callable[..., Tensor]:
    """Make a loss function that keeps a new value in each call."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = cross_entropy(model, batch)
        KEPT["new"] = make(model, value)
        return value

    return loss


def nested(inside: Any) -> list[Any]:
    """A hundred million ways to one object."""
    for _ in range(8):
        inside = [inside] * 10
    return inside


def in_a_circle(inside: Any) -> list[Any]:
    around: list[Any] = [inside]
    around.append({"around": around, "again": [around]})
    return around


@pytest.mark.parametrize("make", [nested, in_a_circle])
def test_each_new_object_is_looked_into_once(make: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch):
    looked_into: list[int] = []
    parts = restore._parts  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(restore, "_parts", lambda value: looked_into.append(id(value)) or parts(value))
    compiled(small(), keeping(lambda _, value: make(tuple(value.shape))))
    assert 0 < len(looked_into) < 100
    with pytest.raises(errors.CaptureFailed, match=r"stores a tensor in .*new"):
        compiled(small(), keeping(lambda _, value: make(value)))


def test_what_was_reached_before_tracing_is_not_searched_again(monkeypatch: pytest.MonkeyPatch):
    looked_into: list[Any] = []
    parts = restore._parts  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(restore, "_parts", lambda value: looked_into.append(value) or parts(value))
    compiled(small(), keeping(lambda model, _: {"holder": model}))
    assert looked_into
    assert not any(isinstance(each, nn.Module) for each in looked_into)


# Caches of functools


@functools.cache
def table(size: int) -> tuple[int, ...]:
    """A user's cache of plain values."""
    return tuple(range(size))


@functools.cache
def constant(size: int) -> Tensor:
    """A user's cache of tensors."""
    return torch.ones(size)


def test_a_cache_keeps_what_it_computed_of_plain_values_while_tracing():
    table.cache_clear()
    table(3)
    compiled(small(), lambda model, batch: cross_entropy(model, batch) * table(5)[-1])
    assert table.cache_info().currsize == 2


def test_a_cache_that_computed_nothing_while_tracing_is_left_alone():
    constant.cache_clear()
    kept = constant(1)
    compiled(small(), lambda model, batch: cross_entropy(model, batch) * constant(1)[0])
    assert constant(1) is kept


def test_a_cache_that_got_a_tensor_of_the_trace_forgets_it():
    constant.cache_clear()
    compiled(small(), lambda model, batch: cross_entropy(model, batch) * constant(2)[0])
    assert torch.equal(constant(2), torch.ones(2))


# Walks


def described(reach: Reach) -> list[tuple[str, list[str]]]:
    pairs = zip(reach.places, reach.facts, strict=True)
    return [(f"{type(place).__name__} {place.name}", [label for label, _ in facts]) for place, facts in pairs]


class Chain:
    """A configuration that leads to the next one, by an attribute whose name code uses first in the last one."""

    def __init__(self, after: Any) -> None:
        self.after = after

    def scale(self) -> float:
        return 1.0 if self.after is None else self.after.scale()


def test_walks_from_one_model_find_the_same_places_in_one_order():
    chain = Chain(Chain(Chain(None)))
    model = small()
    first, *later = (walk(model, {"loss_fn": lambda m, b: cross_entropy(m, b) * chain.scale()}) for _ in range(3))
    assert any("after" in label for _, labels in described(first) for label in labels)
    for each in later:
        assert described(each) == described(first)


def test_walks_are_bounded_by_the_number_of_places():
    many = {i: {j: [j] for j in range(100)} for i in range(100)}
    reach = walk(small(), {"loss_fn": lambda model, batch: many[0][0][0] * cross_entropy(model, batch)})
    assert 1000 < len(reach.places) <= PLACES + len(list(small().modules()))


def function_in(file: str, source: str) -> Callable[..., Any]:
    """Define a function `called` as a file does."""
    names: dict[str, Any] = {"__name__": "a_package", "deep": {"w": 1.0}}
    exec(compile(source, file, "exec"), names)
    called: Callable[..., Any] = names["called"]
    return called


NESTED = "\n".join([
    "def last(): return deep['w']",
    *(f"def call_{i}(): return {f'call_{i - 1}' if i else 'last'}()" for i in range(3)),
    "def called(): return call_2()",
])  # fmt: skip


def test_an_installed_package_is_followed_less_deep_than_the_users_files():
    for file, is_followed in (
        ("/home/user/loss.py", True),
        ("/usr/lib/python3/site-packages/a_package/loss.py", False),
    ):
        called = function_in(file, NESTED)
        reach = walk(small(), {"loss_fn": lambda model, batch, called=called: called() * cross_entropy(model, batch)})
        assert any("deep" in label for _, labels in described(reach) for label in labels) is is_followed


def test_a_batch_is_still_trained_after_a_refused_capture():
    model = small()
    with pytest.raises(errors.CaptureFailed):
        compiled(model, keeping(lambda _, value: [value]))
    assert not isinstance(KEPT.get("new"), Tensor)
    compiled(model, cross_entropy)(BATCH)
