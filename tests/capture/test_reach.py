"""Python is followed through decorators, deep configurations, wrappers of collections and methods nobody names."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import ChainMap, UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.followed import BATCH, assert_followed, compiled, count_captures, small
from helpers.jobs import cross_entropy
from torch import Tensor, nn

Made = tuple[Any, Callable[[Any], None]]
"""A loss function, and what changes it."""


def scaled_by(weight: Callable[[], Any]) -> Callable[..., Tensor]:
    return lambda model, batch: weight() * cross_entropy(model, batch)


def setting(owner: Any, key: str, value: Any = 0.5) -> Callable[[Any], None]:
    return lambda _: owner.__setitem__(key, value) if hasattr(owner, "__setitem__") else setattr(owner, key, value)


# Decorators of libraries


def without_gradients() -> Made:
    table = {"w": 1.0}

    @torch.no_grad()
    def target(x: Tensor) -> Tensor:
        return table["w"] * x[:, :10]

    return lambda model, batch: (model(batch[0]) - target(batch[0])).square().mean(), setting(table, "w")


def in_a_context() -> Made:
    table = {"w": 1.0}

    @contextlib.contextmanager
    def weight() -> Any:
        yield table["w"]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with weight() as w:
            return w * cross_entropy(model, batch)

    return loss, setting(table, "w")


def cached() -> Made:
    table = {"w": 1.0}

    @functools.cache
    def weight() -> float:
        return table["w"]

    def change(_: Any) -> None:
        table["w"] = 0.5
        weight.cache_clear()

    return scaled_by(weight), change


class Partly:
    weight = 1.0

    def _loss(self, model: nn.Module, batch: Any, factor: float) -> Tensor:
        return factor * self.weight * cross_entropy(model, batch)

    loss = functools.partialmethod(_loss, factor=2.0)


def partial_method_that_hides_a_class_attribute() -> Made:
    partly = Partly()
    return partly.loss, lambda _: setattr(partly, "weight", 0.5)


# What holds values


def deep() -> Made:
    inner = types.SimpleNamespace(w=1.0)
    outer: Any = inner
    for _ in range(4):
        outer = types.SimpleNamespace(next=[outer])
    return scaled_by(lambda: outer.next[0].next[0].next[0].next[0].w), setting(inner, "w")


def a_user_dict() -> Made:
    table = UserDict(w=1.0)
    return scaled_by(lambda: table["w"]), setting(table, "w")


def a_chain() -> Made:
    table = ChainMap({"v": 2.0}, {"w": 1.0})
    return scaled_by(lambda: table["w"]), lambda _: table.maps[1].update(w=0.5)


def a_proxy() -> Made:
    table = {"w": 1.0}
    proxy = types.MappingProxyType(table)
    return scaled_by(lambda: proxy["w"]), setting(table, "w")


def globals_without_a_name() -> Made:
    table: dict[str, Any] = {"w": 1.0, "cross_entropy": cross_entropy}
    exec("def loss(model, batch): return w * cross_entropy(model, batch)", table)
    return table["loss"], setting(table, "w")


# Methods that nobody names


class Number:
    def __init__(self) -> None:
        self.value = 1.0

    def __mul__(self, other: Tensor) -> Tensor:
        return self.value * other

    def __float__(self) -> float:
        return self.value

    def __bool__(self) -> bool:
        return self.value > 0.7

    def __get__(self, owner: Any, kind: Any) -> float:
        return self.value


def an_operator() -> Made:
    number = Number()
    return lambda model, batch: number * cross_entropy(model, batch), setting(number, "value")


def a_float() -> Made:
    number = Number()
    return scaled_by(lambda: float(number)), setting(number, "value")


def a_truth() -> Made:
    number = Number()
    return scaled_by(lambda: 1.0 if number else 0.3), setting(number, "value")


def a_descriptor() -> Made:
    number = Number()
    owner = type("Owner", (), {"weight": number, "__module__": __name__})()
    return scaled_by(lambda: owner.weight), setting(number, "value")


def a_property_of_a_metaclass() -> Made:
    kind = type("Kind", (type,), {"weight": property(lambda cls: cls._weight), "__module__": __name__})
    owner = kind("Owner", (), {"_weight": 1.0, "__module__": __name__})
    return scaled_by(lambda: owner.weight), lambda _: setattr(owner, "_weight", 0.5)


class Made_:
    scale = 1.0

    def __init__(self) -> None:
        self.weight = 2 * self.scale


def a_constructor() -> Made:
    kind = type("Own", (Made_,), {"__module__": __name__})
    return scaled_by(lambda: kind().weight), lambda _: setattr(kind, "scale", 0.5)


@pytest.mark.parametrize(
    "made",
    [without_gradients, in_a_context, cached, partial_method_that_hides_a_class_attribute, deep, a_user_dict, a_chain,
     a_proxy, globals_without_a_name, an_operator, a_float, a_truth, a_descriptor, a_property_of_a_metaclass,
     a_constructor],
)  # fmt: skip
def test_what_a_loss_function_reaches_in_other_ways_is_followed(made: Callable[[], Made]):
    loss, change = made()
    done: list[None] = []
    assert_followed(small(), loss, lambda model: done or (change(model), done.append(None)))


# What is not the step's business


class Trainer:
    """Names in its constructor, and as keys of what it returns, what changes at every step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.loss, self.step = model, None, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        self.criterion, self.history = nn.CrossEntropyLoss(), [self.loss, self.step]

    def compute(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch[0])
        loss = self.criterion(logits, batch[1])
        return loss, {"loss": loss, "step": logits.mean()}


def test_what_a_trainer_sets_up_and_returns_is_not_what_the_loss_reads():
    trainer: Any = Trainer(small())
    step = compiled(trainer.model, trainer.compute)
    built = count_captures(step)
    for i in range(4):
        trainer.loss, trainer.step = step(BATCH)[0].item(), i
        trainer.history.append(trainer.loss)
        trainer.optimizer.step()
        trainer.scheduler.step()
    assert built == []


def test_a_learning_rate_of_numpys_is_live():
    model = small()
    step = compiled(model)
    moved: list[float] = []
    for rate in (0.1, 0.2, 0.0):
        step.training.optimizers[0].param_groups[0]["lr"] = np.float32(rate)
        before = model.bias.detach().clone()
        step(BATCH)
        moved.append((model.bias - before).abs().sum().item())
    assert moved[2] == 0 < moved[0] < moved[1]


class Registry(dict[str, float]):
    """Has its own ways to be read and written, as registries of libraries have."""

    def get(self, key: object) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__getitem__(str(key))

    def __setitem__(self, key: object, value: float) -> None:
        super().__setitem__(str(key), value)

    def __delitem__(self, key: object) -> None:
        raise TypeError("nothing leaves")


REGISTRY = Registry(w=1.0)


def test_a_dict_with_methods_of_its_own_is_read_past_them():
    assert_followed(small(), scaled_by(lambda: REGISTRY.get("w")), lambda _: REGISTRY.update(w=0.5))
