"""Models that keep tensors, count calls or draw in Python are refused, and stay as they were before tracing."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.followed import BATCH, compiled, small
from torch import Tensor, nn

from fxcomp import errors


class Noting(nn.Module):
    """Keeps something of every call, where and what `keep` says."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.keep, self.aux, self.cfg = nn.Linear(20, 10), keep, ["before"], types.SimpleNamespace()
        self.table = {"known": 1}
        self.register_buffer("offset", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        self.keep(self, x)
        return x + self.offset + OUTSIDE.sum()

    def content(self) -> list[Any]:
        marks = [dict(vars(each)) for each in (self.fc.bias, self.offset, OUTSIDE)]
        return [dict(vars(self)), list(self.aux), dict(self.table), dict(vars(self.cfg)), list(NOTED), marks]


NOTED: list[Any] = []
OUTSIDE: Any = torch.ones(3)

PLACES: dict[str, Callable[[Any, Any], Any]] = {
    r"model\.aux.": lambda model, kept: setattr(model, "aux", [kept]),
    r"model\.aux\[1\]": lambda model, kept: model.aux.append({"x": (kept,)}),
    r"model\.table\['known'\]": lambda model, kept: model.table.update(known=kept),
    r"model\.cfg\.last": lambda model, kept: setattr(model.cfg, "last", kept),
    r"test_left_by_tracing\.NOTED\[0\]": lambda _, kept: NOTED.append(kept),
    r"model\.last": lambda model, kept: setattr(model, "last", kept),
    r".*fc\.bias\.last": lambda model, kept: setattr(model.fc.bias, "last", kept),
    r".*offset\.last": lambda model, kept: setattr(model.offset, "last", kept),
    r".*OUTSIDE\.last": lambda _, kept: setattr(OUTSIDE, "last", kept),
}
KEPT: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a tensor": ("tensor", lambda x: x),
    "a number": ("number", lambda x: x.pow(2).mean().item()),
    "an average": ("number", lambda x: 0.9 + 0.1 * x.detach().sum().item()),
    "a count": ("number", lambda x: (x > 0).sum().item()),
    "a list": ("number", lambda x: x.abs().max().detach().tolist()),
    "a table": ("number", lambda x: {"norm": [x.detach().norm().item()]}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("where", PLACES)
def test_what_a_forward_pass_keeps_is_taken_out_and_refused_by_name(where: str, kept: str):
    kind, read = KEPT[kept]
    model = Noting(lambda model, x: PLACES[where](model, read(x)))
    before = model.content()
    with pytest.raises(errors.CaptureFailed, match=f"(?s)stores a {kind} in .{where}.*return it with the loss"):
        compiled(model)
    assert model.content() == before


def test_python_that_counts_its_calls_outside_the_model_is_refused_and_the_count_is_put_back():
    calls, seen, largest = [0], set[int](), {"size": 0}

    def keep(model: Any, x: Tensor) -> None:
        calls[0] += 1
        seen.add(calls[0])
        largest["size"] = calls[0] * x.shape[0]
        model.last = calls[0]
        model.fc.bias.calls = model.offset.calls = calls[0]

    model = Noting(keep)
    before = model.content()
    with pytest.raises(errors.StepChanged, match=r"itself changes the model: .* changed from 1 to 2"):
        compiled(model)
    assert (calls, seen, largest, model.content()) == ([0], set(), {"size": 0}, before)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.fc, self.draw = nn.Linear(20, 10), draw
        self.own = random.Random(1)
        self.modern = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return 2 * x if self.draw(self) < 0.5 else x


DRAWS: dict[str, Callable[[Any], float]] = {
    "random": lambda _: random.random(),
    "numpy.random": lambda _: np.random.rand(),
    "model.own": lambda model: model.own.gauss(0, 1),
    "model.modern": lambda model: model.modern.random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_drawing_with_python_or_numpy_is_refused_and_leaves_their_states(name: str):
    model = Drawing(DRAWS[name])
    model(BATCH[0])  # sets up what gauss keeps

    def states() -> list[str]:
        own = model.own.getstate(), model.modern.bit_generator.state
        return [str(random.getstate()), str(own), str(np.random.get_state()[1].tolist())]

    before = states()
    with pytest.raises(errors.CaptureFailed, match=f"draws from {name}: "):
        compiled(model)
    assert states() == before


def test_tracing_does_not_count_the_batches_of_a_teacher():
    teacher = nn.Sequential(nn.Linear(20, 10), nn.BatchNorm1d(10)).requires_grad_(False)
    step = compiled(small(), lambda model, batch: (model(batch[0]) - teacher(batch[0])).square().mean())
    assert teacher[1].num_batches_tracked == 0
    step(BATCH)
    assert teacher[1].num_batches_tracked == 1
