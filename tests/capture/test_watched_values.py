"""Watched values: a change of one is captured again. What else Python reads, only a verified step notices."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import itertools
import math
import operator
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.followed import BATCH, assert_followed, compiled, count_captures, small
from helpers.jobs import cross_entropy
from torch import Tensor, nn

from fxcomp import errors
from fxcomp.capture import watch

Case = tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]
"""An object that holds a value, a change of the value from 1.0 to 0.5, and its reading in the loss."""


def check(held: Any, change: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    """Five steps of which the third sees a change are eager's, and are captured once more."""
    steps: list[None] = []

    def between(_: Any) -> None:
        steps.append(None)
        if len(steps) == 3:  # once for the compiled and once for the eager model: the second sees it changed already
            change(held)

    assert_followed(
        small(), lambda model, batch: read(held) * cross_entropy(model, batch), between, between, captures=1
    )


class Owner:
    """Has one value, which it gives in several ways."""

    def __init__(self, value: Any = 1.0) -> None:
        self.value = value

    @property
    def by_property(self) -> Any:
        return self.value

    def by_method(self) -> Any:
        return self.value

    def __getitem__(self, key: int) -> Any:
        return self.value

    def __float__(self) -> float:
        return self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * other

    def __bool__(self) -> bool:
        return self.value > 0.7

    def twice(self, x: Any) -> Any:
        return 2 * self.value * x

    def __call__(self, x: Any) -> Any:
        return self.value * x


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Classed:
    value = 1.0
    table: dict[str, float] = {"w": 1.0}  # noqa: RUF012


class Mode(enum.Enum):
    WHOLE = 1.0
    HALF = 0.5


class Criterion(nn.Module):
    """A module outside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.inner = 1.0, nn.Dropout(0.0)

    def forward(self, x: float = 1.0) -> float:
        return self.value * (1.0 if self.training else 0.25) * x


def setting(key: str, value: Any = 0.5) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, value) if hasattr(held, "__setitem__") else setattr(held, key, value)


def nested(depth: int, make: Callable[[Any], Any]) -> Any:
    return functools.reduce(lambda inner, _: make(inner), range(depth), 1.0)


def attribute(o: Any) -> Any:
    return o.value


GLOBAL = 1.0
PLACE = Owner()
MODULE: Any = types.ModuleType("a_module_of_a_test")
MODULE.value = 1.0


def tensor_with(weight: float) -> Any:
    tensor: Any = torch.ones(1)
    tensor.weight = weight
    return tensor


def reads_a_global() -> float:
    return GLOBAL


def with_default(scale: float = 1.0) -> float:
    return scale


def five_calls(o: Any, calls: int = 5) -> Any:
    return attribute(o) if calls == 1 else five_calls(o, calls - 1)


WATCHED: dict[str, Case] = {
    "an attribute": (Owner(), setting("value"), attribute),
    "a slot": (Slotted(), setting("value"), attribute),
    "a namespace": (types.SimpleNamespace(value=1.0), setting("value"), attribute),
    "an attribute by its name": (Owner(), setting("value"), lambda o: getattr(o, "value")),  # noqa: B009
    "a property": (Owner(), setting("value"), lambda o: o.by_property),
    "a method": (Owner(), setting("value"), lambda o: o.by_method()),
    "an item of an object": (Owner(), setting("value"), lambda o: o[0]),
    "a number of an object": (Owner(), setting("value"), float),
    "a product with an object": (Owner(), setting("value"), lambda o: o * 1.0),
    "the truth of an object": (Owner(), setting("value"), lambda o: 1.0 if o else 0.5),
    "an attribute that appears": (Owner(), setting("late"), lambda o: getattr(o, "late", 1.0)),
    "an attribute of a class": (Classed(), lambda _: setattr(Classed, "value", 0.5), attribute),
    "a table of a class": (Classed(), lambda _: Classed.table.update(w=0.5), lambda o: o.table["w"]),
    "four objects": (
        nested(4, Owner), lambda o: setattr(o.value.value.value, "value", 0.5), lambda o: o.value.value.value.value,
    ),
    "a list": ([1.0], lambda o: o.__setitem__(0, 0.5), lambda o: o[0]),
    "a list that grows": ([1.0], lambda o: o.append(0.5), lambda o: o[-1]),
    "a dict": ({"w": 1.0}, setting("w"), lambda o: o["w"]),
    "the order of a dict": (
        {"a": 1.0, "b": 0.5}, lambda o: o.update(a=o.pop("a")), lambda o: next(iter(o.values())),
    ),
    "a deque": (collections.deque([1.0]), lambda o: o.__setitem__(0, 0.5), lambda o: o[0]),
    "a set": ({1}, lambda o: o.add(2), len),
    "three collections": ([[[1.0]]], lambda o: o[0][0].__setitem__(0, 0.5), lambda o: o[0][0][0]),
    "an array": (np.ones(2), lambda o: o.__setitem__(0, 0.5), lambda o: o[0]),
    "an enumeration": (Owner(Mode.WHOLE), setting("value", Mode.HALF), lambda o: o.value.value),
    "an integer in a float's place": (Owner(1.5), setting("value", 1), attribute),
    "a partial": (
        functools.partial(attribute, Owner()), lambda o: setting("value")(o.args[0]), lambda o: o(),
    ),
    "a default": (with_default, lambda o: setattr(o, "__defaults__", (0.5,)), lambda o: o()),
    "a call five deep": (Owner(), setting("value"), five_calls),
    "a function that is exchanged": (Owner(lambda: 1.0), setting("value", lambda: 0.5), lambda o: o.value()),
    "a module outside the model": (Criterion(), setting("value"), lambda o: o()),
    "its mode": (Criterion(), lambda o: o.eval(), lambda o: o()),
    "an attribute of a tensor": (
        tensor_with(1.0), lambda o: setattr(o, "weight", 0.5), lambda o: o.weight,
    ),
    "a keyword of a partial": (
        functools.partial(with_default, scale=1.0), lambda o: o.keywords.update(scale=0.5), lambda o: o(),
    ),
    "a module of Python": (MODULE, setting("value"), attribute),
    "a global object": (None, lambda _: setting("value")(PLACE), lambda _: attribute(PLACE)),
    "the number of threads": (
        None, lambda _: torch.set_num_threads(torch.get_num_threads() + 1), lambda _: torch.get_num_threads(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WATCHED)
def test_a_watched_value_is_followed(case: str, monkeypatch: pytest.MonkeyPatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(Classed, "value", 1.0)
    monkeypatch.setattr(Classed, "table", {"w": 1.0})
    monkeypatch.setattr(PLACE, "value", 1.0)
    monkeypatch.setattr(with_default, "__defaults__", (1.0,))
    try:
        check(*WATCHED[case])
    finally:
        torch.set_num_threads(threads)


ONE, OTHER = Owner(1.5), Owner(2.5)
EXCHANGED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "functions of C": (torch.relu, torch.sigmoid),
    "methods of tensors": (Tensor.relu, Tensor.sigmoid),
    "functions of a library": (nn.functional.gelu, nn.functional.softsign),
    "overloads": (torch.ops.aten.relu.default, torch.ops.aten.sigmoid.default),
    "lambdas": (lambda x: 2 * x, lambda x: 3 * x),
    "objects": (ONE, OTHER),
    "methods of two objects": (ONE.twice, OTHER.twice),
    "methods of one object": (ONE.twice, ONE.__call__),
    "partials": (functools.partial(torch.mul, other=2.0), functools.partial(torch.mul, other=3.0)),
    "decorated": (torch.no_grad()(with_default), torch.enable_grad()(lambda x: 3 * x)),
    "methods by name": (operator.methodcaller("relu"), operator.methodcaller("sigmoid")),
    "method wrappers": (torch.ones(1).__add__, torch.ones(1).__mul__),
    "functions of numbers": (lambda x: math.sin(x.shape[0]), lambda x: math.cos(x.shape[0])),
    "universal functions": (lambda x, f=np.sin: f(x.shape[0]), lambda x, f=np.cos: f(x.shape[0])),
    "cached": (functools.cache(lambda x: 2 * x.shape[0]), functools.cache(lambda x: 3 * x.shape[0])),
    "dispatched": (functools.singledispatch(lambda x: 2 * x), functools.singledispatch(lambda x: 3 * x)),
    "places": (operator.itemgetter(0), operator.itemgetter(1)),
    "attributes": (operator.attrgetter("T"), operator.attrgetter("H")),
    "classes of modules": (lambda x, kind=nn.ReLU: kind()(x), lambda x, kind=nn.Sigmoid: kind()(x)),
}


@pytest.mark.parametrize("kinds", EXCHANGED)
def test_a_callable_that_is_exchanged_for_another_is_followed(kinds: str):
    before, after = EXCHANGED[kinds]
    given = torch.tensor([[0.5, 0.5], [-0.25, 2.0]])
    check(Owner(before), setting("value", after), lambda o: torch.as_tensor(o.value(given)).sum())


def test_a_global_is_followed(monkeypatch: pytest.MonkeyPatch):
    check(None, lambda _: monkeypatch.setitem(globals(), "GLOBAL", 0.5), lambda _: reads_a_global())


def test_a_closure_that_another_function_changes_is_followed():
    value = 1.0

    def put(new: float) -> None:
        nonlocal value
        value = new

    check(None, lambda _: put(0.5), lambda _: value)


def test_a_function_behind_a_librarys_decorator_is_followed():
    table = {"w": 1.0}

    @contextlib.contextmanager
    def weight() -> Any:
        yield table["w"]

    @torch.no_grad()
    def read(_: Any) -> float:
        with weight() as w:
            return w

    check(None, lambda _: setting("w")(table), read)


def test_a_method_of_an_object_that_holds_a_trainers_history_is_not_captured_again():
    class Trainer:
        def __init__(self) -> None:
            self.model, self.loss, self.step, self.history = small(), None, 0, [0.0]
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def compute(self, model: nn.Module, batch: Any) -> Tensor:
            return cross_entropy(model, batch)

    trainer: Any = Trainer()
    step = compiled(trainer.model, trainer.compute)
    built = count_captures(step)
    for i in range(4):
        trainer.loss, trainer.step = step(BATCH).item(), i
        trainer.history.append(trainer.loss)
    assert built == []


def test_a_number_read_from_a_tensor_is_read_in_each_step_and_captures_nothing():
    weight = torch.tensor(0.5)
    change = lambda _: weight.fill_(0.25)  # noqa: E731
    assert_followed(small(), lambda m, b: weight.item() * cross_entropy(m, b), change, captures=0)


def test_equal_values_in_other_objects_are_no_change():
    held = {"w": float("1.5"), "rows": [1, 2]}

    def change(_: Any) -> None:
        held.update(w=float("1.5"), rows=[1, 2])

    assert_followed(small(), lambda m, b: held["w"] * sum(held["rows"]) * cross_entropy(m, b), change, captures=0)


def test_a_state_that_comes_again_is_not_captured_again():
    held = Owner()
    changes = [lambda _, v=v: setattr(held, "value", v) for v in (0.5, 1.0, 0.5, 0.25, 1.0)]
    assert_followed(small(), lambda m, b: held.value * cross_entropy(m, b), *changes, captures=2)


def test_more_values_than_are_watched_are_said_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "VALUES", 5)
    held = [Owner() for _ in range(9)]
    with pytest.warns(UserWarning, match="more than 5 values outside of modules"):
        step = compiled(small(), lambda m, b: held[-1].value * cross_entropy(m, b))
    built = count_captures(step)
    step(BATCH)
    held[-1].value = 0.5
    step(BATCH)
    assert built == []


# Read once: docs/contract.md names these

VARIABLE = contextvars.ContextVar("a variable of a test", default=1.0)
OWN = threading.local()


class Descriptor:
    value = 1.0

    def __get__(self, owner: Any, kind: Any) -> float:
        return self.value


DESCRIPTOR = Descriptor()
DESCRIBED = type("Described", (), {"weight": DESCRIPTOR, "__module__": __name__})()


def of_thread() -> float:
    return getattr(OWN, "weight", 1.0)


def cached() -> Case:
    table = [1.0]

    @functools.cache
    def weight() -> float:
        return table[0]

    weight()

    def change(_: Any) -> None:
        table[0] = 0.5
        weight.cache_clear()

    return None, change, lambda _: weight()


UNWATCHED: dict[str, Callable[[], Case]] = {
    "an iterator": lambda: (itertools.count(1), lambda _: None, next),
    "a clock": lambda: (itertools.count(1).__next__, lambda _: None, lambda o: o()),
    "a context variable": lambda: (VARIABLE, lambda o: o.set(0.5), lambda o: o.get()),
    "a thread's own value": lambda: (None, lambda _: setattr(OWN, "weight", 0.5), lambda _: of_thread()),
    "a cache of functools": cached,
    "a descriptor": lambda: (DESCRIBED, lambda _: setattr(DESCRIPTOR, "value", 0.5), lambda o: o.weight),
    "the environment": lambda: (
        None, lambda _: os.environ.__setitem__("WEIGHT_OF_A_TEST", "0.5"),
        lambda _: float(os.environ.get("WEIGHT_OF_A_TEST", "1")),
    ),
    "five objects": lambda: (
        nested(6, Owner), lambda o: setattr(o.value.value.value.value.value, "value", 0.5),
        lambda o: o.value.value.value.value.value.value,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNWATCHED)
def test_what_is_read_once_is_noticed_by_a_verified_step(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WEIGHT_OF_A_TEST", raising=False)
    monkeypatch.setattr(Descriptor, "value", 1.0)
    held, change, read = UNWATCHED[case]()
    token = VARIABLE.set(1.0)
    try:
        step = compiled(small(), lambda m, b: read(held) * cross_entropy(m, b), verify=2)
        with pytest.raises(errors.VerificationFailed):
            [step(BATCH), change(held), step(BATCH), step(BATCH)]
    finally:
        VARIABLE.reset(token)
