"""A model or a loss function calls another callable of the same kind than a step before."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.followed import assert_followed, small
from helpers.jobs import cross_entropy
from torch import Tensor, nn
from torch.nn import functional


def twice(x: Tensor) -> Tensor:
    return 2 * x


def thrice(x: Tensor) -> Tensor:
    return 3 * x


class Scaling:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return self.factor * x

    def scaled(self, x: Tensor) -> Tensor:
        return self.factor * x

    def negated(self, x: Tensor) -> Tensor:
        return -self.factor * x


ONE = Scaling(1.5)
TABLE = {"w": 0.5}

OF_TENSORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "functions of C": (torch.relu, torch.sigmoid),
    "methods of tensors": (Tensor.relu, Tensor.sigmoid),
    "functions of a library": (functional.gelu, functional.softsign),
    "functions of both": (torch.tanh, functional.softsign),
    "overloaded functions of a library": (functional.max_pool1d, functional.avg_pool1d),
    "operators": (torch.ops.aten.relu, torch.ops.aten.sigmoid),
    "overloads": (torch.ops.aten.relu.default, torch.ops.aten.sigmoid.default),
    "functions": (twice, thrice),
    "lambdas": (lambda x: 2 * x, lambda x: 3 * x),
    "objects": (Scaling(2.0), Scaling(3.0)),
    "methods of two objects": (Scaling(2.0).scaled, Scaling(3.0).scaled),
    "methods of one object": (ONE.scaled, ONE.negated),
    "partials": (functools.partial(torch.mul, other=2.0), functools.partial(torch.mul, other=3.0)),
    "partials of functions of C": (functools.partial(torch.relu), functools.partial(torch.sigmoid)),
    "decorated": (torch.enable_grad()(twice), torch.enable_grad()(thrice)),
    "decorators of one function": (torch.no_grad()(twice), torch.enable_grad()(twice)),
    "methods by name": (operator.methodcaller("relu"), operator.methodcaller("sigmoid")),
    "operators of Python": (operator.neg, operator.pos),
    "method wrappers": (torch.ones(10).__add__, torch.ones(10).__mul__),
    "classes of modules": (nn.ReLU, nn.Sigmoid),
}


def apply(called: Callable[..., Any], x: Tensor) -> Tensor:
    if isinstance(called, type):
        return called()(x)
    return called(x, 1) if called in (functional.max_pool1d, functional.avg_pool1d) else called(x)


OF_NUMBERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "functions of C": (math.sin, math.cos),
    "functions of modules": (math.exp, abs),
    "functions of NumPy": (np.sin, np.cos),
    "methods of C of one object": (TABLE.__getitem__, lambda _: 0.25),
    "methods of C": ({0.5: 1.0}.get, {0.5: 2.0}.get),
    "methods of C of other names": ((3.0).__add__, (3.0).__mul__),
    "classes": (float, bool),
    "cached": (functools.cache(lambda v: 2 * v), functools.cache(lambda v: 3 * v)),
    "dispatched": (functools.singledispatch(lambda v: 2 * v), functools.singledispatch(lambda v: 3 * v)),
}
OF_PLACES = {
    "places": (operator.itemgetter(0), operator.itemgetter(1)),
    "attributes": (operator.attrgetter("real"), operator.attrgetter("imag")),
}


class Exchanging(nn.Module):
    def __init__(self, called: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.act = small(), called

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * apply(self.act, self.inner(x))


@pytest.mark.parametrize("pair", OF_TENSORS.values(), ids=OF_TENSORS)
def test_an_attribute_of_a_module(pair: tuple[Any, Any]):
    assert_followed(Exchanging(pair[0]), cross_entropy, lambda model: setattr(model, "act", pair[1]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pair", OF_TENSORS.values(), ids=OF_TENSORS)
def test_an_item_outside(pair: tuple[Any, Any]):
    held = [pair[0]]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return functional.cross_entropy(out + apply(held[0], out), batch[1])

    assert_followed(small(), loss, lambda _: held.__setitem__(0, pair[1]))


@pytest.mark.parametrize("pair", OF_NUMBERS.values(), ids=OF_NUMBERS)
def test_a_function_of_numbers(pair: tuple[Any, Any]):
    held = {"f": pair[0]}
    argument: Any = "w" if pair[0] == TABLE.__getitem__ else 0.5

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (1 + held["f"](argument)) * cross_entropy(model, batch)

    assert_followed(small(), loss, lambda _: held.update(f=pair[1]))


@pytest.mark.parametrize("pair", OF_PLACES.values(), ids=OF_PLACES)
def test_what_reads_an_item_or_an_attribute(pair: tuple[Any, Any]):
    held = {"f": pair[0]}
    values: Any = (2.0, 3.0) if isinstance(pair[0], operator.itemgetter) else complex(2.0, 3.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return held["f"](values) * cross_entropy(model, batch)

    assert_followed(small(), loss, lambda _: held.update(f=pair[1]))
