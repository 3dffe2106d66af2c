"""Guards see the values that a loss function reads, wherever they lie: a change is followed as in eager."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.followed import assert_followed, small
from helpers.jobs import cross_entropy
from torch import Tensor, nn

WEIGHT = 0.5
TABLE = {"kl": [1.0, 2.0]}


def helper(model: nn.Module, batch: Any) -> Tensor:
    return WEIGHT * cross_entropy(model, batch) * TABLE["kl"][1] * CRITERION.factor


class Criterion(nn.Module):
    def __init__(self, factor: float = 1.0, smoothing: float = 0.0) -> None:
        super().__init__()
        self.factor, self.inner = factor, nn.CrossEntropyLoss(label_smoothing=smoothing)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.factor * self.inner(logits, target)


CRITERION = Criterion()


def global_loss(model: nn.Module, batch: Any) -> Tensor:
    return helper(model, batch)


def test_globals_of_functions_that_the_loss_calls_are_followed(monkeypatch: pytest.MonkeyPatch):
    def set_global(name: str, value: Any) -> Callable[[Any], None]:
        return lambda _: monkeypatch.setitem(globals(), name, value)

    assert_followed(
        small(),
        global_loss,
        set_global("WEIGHT", 0.25),
        set_global("TABLE", {"kl": [1.0, 3.0]}),
        set_global("CRITERION", Criterion(2.0)),
        set_global("helper", lambda model, batch: 3 * cross_entropy(model, batch)),
    )


def with_closure() -> tuple[Any, Callable[[Any], None]]:
    weight = 0.5

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return weight * cross_entropy(model, batch)

    def change(_: Any) -> None:
        nonlocal weight
        weight = 0.25

    return loss, change


def with_criterion() -> tuple[Any, Callable[[Any], None]]:
    criterion = Criterion()

    def change(_: Any) -> None:
        criterion.inner.label_smoothing = 0.2

    return lambda model, batch: criterion(model(batch[0]), batch[1]), change


def with_teacher() -> tuple[Any, Callable[[Any], None]]:
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(20, 10), nn.Threshold(0.0, 0.0)).requires_grad_(False)
    teacher.register_forward_pre_hook(lambda module, args: (args[0] * (2.0 if module.training else 1.0),))
    return (
        lambda model, batch: (model(batch[0]) - teacher(batch[0])).square().mean(),
        lambda _: teacher.eval(),
    )  # fmt: skip


def with_partial() -> tuple[Any, Callable[[Any], None]]:
    loss = functools.partial(lambda model, batch, *, weight: weight * cross_entropy(model, batch), weight=0.5)
    return loss, lambda _: loss.keywords.update(weight=0.25)


def with_default() -> tuple[Any, Callable[[Any], None]]:
    def loss(model: nn.Module, batch: Any, weight: float = 0.5) -> Tensor:
        return weight * cross_entropy(model, batch)

    return loss, lambda _: setattr(loss, "__defaults__", (0.25,))


class Trainer:
    """Holds much that the loss does not read, and a weight that a property returns."""

    def __init__(self) -> None:
        self.state = types.SimpleNamespace(weight=0.5)
        self.history: list[float] = []
        self.steps = 0

    @property
    def weight(self) -> float:
        return self.state.weight

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.weight * cross_entropy(model, batch)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss(model, batch)


def with_method() -> tuple[Any, Callable[[Any], None]]:
    trainer = Trainer()
    return trainer.loss, lambda _: setattr(trainer.state, "weight", 0.25)


def with_callable() -> tuple[Any, Callable[[Any], None]]:
    trainer = Trainer()
    return trainer, lambda _: setattr(trainer.state, "weight", 0.25)


def with_module() -> tuple[Any, Callable[[Any], None]]:
    conf = types.ModuleType("conf_of_test_step_guard")
    conf.KL = 0.5
    return lambda model, batch: conf.KL * cross_entropy(model, batch), lambda _: setattr(conf, "KL", 0.25)


def with_array() -> tuple[Any, Callable[[Any], None]]:
    weights = np.array([0.5, 1.0])
    return (
        lambda model, batch: float(weights[0]) * cross_entropy(model, batch),
        lambda _: weights.__setitem__(0, 0.25),
    )  # fmt: skip


def with_number() -> tuple[Any, Callable[[Any], None]]:
    weight = torch.tensor(0.5)
    return lambda model, batch: weight.item() * cross_entropy(model, batch), lambda _: weight.fill_(0.25)


@pytest.mark.parametrize(
    "made",
    [with_closure, with_criterion, with_teacher, with_partial, with_default, with_method, with_callable, with_module,
     with_array],
)  # fmt: skip
def test_what_a_loss_function_reads_is_followed(made: Callable[[], tuple[Any, Callable[[Any], None]]]):
    loss, change = made()
    done: list[None] = []
    assert_followed(small(), loss, lambda model: done or (change(model), done.append(None)))


def test_a_number_read_from_a_tensor_is_read_in_each_step_and_captures_nothing():
    loss, change = with_number()
    assert_followed(small(), loss, change, captures=0)


def test_what_a_trainer_notes_beside_the_loss_is_not_the_steps_business():
    trainer = Trainer()

    def change(_: Any) -> None:
        trainer.history.append(1.0)
        trainer.steps += 1

    assert_followed(small(), trainer.loss, change, captures=0)
