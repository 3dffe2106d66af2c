"""Values that traced Python can read are watched: a change is followed as eager follows it, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.followed import BATCH, assert_followed, compiled, small
from helpers.jobs import cross_entropy, mlp
from torch import Tensor, nn

from fxcomp import errors
from fxcomp.capture import watch
from fxcomp.capture.step_guard import StepGuard
from fxcomp.capture.training import Training


class Configured(nn.Module):
    """Reads everything that a configuration has, but `unread`."""

    def __init__(self) -> None:
        super().__init__()
        inner = SimpleNamespace(gains=[1.0, {"x": 2.0}])
        self.cfg = SimpleNamespace(scale=1.0, dtype=torch.float32, act=torch.relu, inner=inner, unread=0)
        self.flags, self.long = {"a"}, [1.0] * 200
        self.body, self.head = nn.Sequential(nn.Linear(20, 8), nn.Tanh()), nn.Linear(8, 10)
        self.register_buffer("offset", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        cfg = self.cfg
        x = cfg.act(self.body(x).to(cfg.dtype).float()) * cfg.scale
        x = self.head(x) * cfg.inner.gains[0] * cfg.inner.gains[1]["x"] * self.long[150]
        return self.offset + (2 * x if "b" in self.flags else x)


def seeded() -> Configured:
    torch.manual_seed(0)
    return Configured()


# The model and its configuration


def set_on(path: str, value: Any) -> Callable[[nn.Module], None]:
    """Set an attribute at the end of a path of attributes and keys."""
    *way, last = path.split(".")

    def change(model: Any) -> None:
        for step in way:
            model = model[int(step)] if step.isdigit() else getattr(model, step)
        if isinstance(model, list | dict):
            model[int(last) if last.isdigit() else last] = value
        else:
            setattr(model, last, value)

    return change


def another_configuration(model: Any) -> None:
    model.cfg = SimpleNamespace(**{**vars(model.cfg), "scale": 4.0})


def patch_forward(model: Any) -> None:
    inner = model.head.forward
    model.head.forward = lambda x: 2 * inner(x)


def test_what_a_forward_pass_reads_is_followed(monkeypatch: pytest.MonkeyPatch):
    before = Configured.forward
    assert_followed(
        seeded(),
        cross_entropy,
        set_on("cfg.scale", 2.0),
        set_on("cfg.dtype", torch.bfloat16),
        set_on("cfg.act", torch.tanh),
        set_on("cfg.inner.gains.0", 3.0),
        set_on("cfg.inner.gains.1", {"x": 5.0}),
        another_configuration,
        set_on("long.150", 7.0),
        lambda model: model.flags.add("b"),
        patch_forward,
        lambda _: monkeypatch.setattr(Configured, "forward", lambda s, x: 2 * before(s, x)),
        lambda model: model.register_buffer("offset", torch.ones(1)),
    )


def test_evaluation_mode_is_captured_apart_from_training_mode():
    model = nn.Sequential(nn.BatchNorm1d(20), small())
    assert_followed(model, cross_entropy, lambda m: m.eval(), lambda m: m.train(), captures=1)


def test_hooks_that_come_later_run():
    handles: list[Any] = []

    def everywhere(_: nn.Module) -> None:
        if not handles:
            hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: 1.5 * out)  # noqa: ARG005
            handles.append(hook)

    try:
        assert_followed(
            seeded(),
            cross_entropy,
            lambda model: model.head.register_forward_hook(lambda module, args, out: 2 * out),  # noqa: ARG005
            lambda model: model.body[0].register_forward_pre_hook(lambda module, args: (2 * args[0],)),  # noqa: ARG005
            lambda model: model.head.register_full_backward_hook(lambda module, before, after: (2 * before[0],)),  # noqa: ARG005
            everywhere,
        )
    finally:
        handles[0].remove()


def test_what_changes_nothing_is_not_captured_again():
    assert_followed(
        seeded(),
        cross_entropy,
        set_on("cfg.unread", 5),
        lambda model: setattr(model.head.bias, "note", 1),
        set_on("cfg.scale", float("1")),
        lambda model: model.register_buffer("offset", torch.ones(10)),
        lambda model: setattr(model, "long", list(model.long)),
        captures=0,
    )


class Fixed(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.fc, self.value = nn.Linear(20, 10), value

    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if self.value is True else 3 if isinstance(self.value, int) else math.copysign(4, self.value)
        return self.fc(x) * factor


def test_values_that_only_compare_as_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "LIVE_AFTER", 100)
    values = (1, 1.0, 0.0, -0.0, float("nan"))
    with pytest.warns(UserWarning, match=r"model\.value changed: True, 1, 1\.0, 0\.0"):
        assert_followed(Fixed(True), cross_entropy, *(set_on("value", value) for value in values))


def test_not_a_number_equals_itself():
    assert_followed(Fixed(float("nan")), cross_entropy, set_on("value", float("nan")), captures=0)


# The default dtype and backends


def test_a_default_dtype_is_baked_in_and_watched():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * torch.tensor(1 / 3)

    step = compiled(small(), loss)
    step(BATCH)
    torch.set_default_dtype(torch.float64)
    try:
        step(BATCH)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(step.in_force.programs) == 2


# What needs another plan


def late_hook(model: Any, _: Any) -> None:
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)  # noqa: ARG005


REFUSED = [
    (lambda model, _: model.append(nn.ReLU()), "the module '3' was not there.*changing the model's structure"),
    (lambda model, _: model.pop(2), "the parameter '2.weight' is there no more"),
    (lambda model, _: setattr(model, "w", nn.Parameter(torch.ones(1))), "the parameter 'w' was not there"),
    (late_hook, "the parameter '0.weight' has a gradient hook that was added after"),
    (
        lambda _, sgd: sgd.register_step_post_hook(lambda *_: None),
        "the optimizer has a step post-hook that was added after",
    ),
    (
        lambda _, sgd: setattr(sgd, "step", lambda: None),
        "the optimizer has a step method of its own that was added after",
    ),
]
"""tests/helpers/refused_optimizers.py has more, with what each error advises."""


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_what_another_capture_would_not_be_enough_for_is_refused_by_name(change: Any, text: str):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(Training.of(model, cross_entropy, optimizer))
    assert guard.key() == guard.key()
    change(model, optimizer)
    with pytest.raises(errors.StepChanged, match=f"(?s){text}"):
        guard.key()


def test_parameters_whose_memory_is_exchanged_train_on():
    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    assert_followed(small(), cross_entropy, change, captures=0)
