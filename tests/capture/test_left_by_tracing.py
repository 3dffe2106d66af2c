"""Models that keep tensors, count calls or draw in Python are refused, and stay as they were before tracing."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.followed import BATCH, compiled, small
from torch import Tensor, nn

from fxcomp import errors

# Tensors that a forward pass keeps


class Noting(nn.Module):
    """Keeps something of every call, where and what `keep` says."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.keep, self.aux, self.cfg = nn.Linear(20, 10), keep, ["before"], types.SimpleNamespace()
        self.table = {"known": 1}

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        self.keep(self, x)
        return x


NOTED: list[Any] = []


def in_a_list(model: Any, x: Tensor) -> None:
    model.aux = [x]


def on_a_list(model: Any, x: Tensor) -> None:
    model.aux.append({"x": (x,)})


def in_a_dict(model: Any, x: Tensor) -> None:
    model.table["known"] = x


def on_a_configuration(model: Any, x: Tensor) -> None:
    model.cfg.last = x


def in_a_global(_: Any, x: Tensor) -> None:
    NOTED.append(x)


@pytest.mark.parametrize(
    ("keep", "where"),
    [
        (in_a_list, r"model\.aux"),
        (on_a_list, r"model\.aux\[1\]"),
        (in_a_dict, r"model\.table\['known'\]"),
        (on_a_configuration, r"model\.cfg\.last"),
        (in_a_global, r"test_left_by_tracing\.NOTED\[0\]"),
        (lambda model, x: setattr(model, "last", x), r"model\.last"),
    ],
)
def test_a_tensor_that_the_forward_pass_keeps_is_taken_out_and_refused_by_name(keep: Any, where: str):
    model = Noting(keep)
    before = [dict(vars(model)), list(model.aux), dict(model.table), dict(vars(model.cfg)), list(NOTED)]
    text = f"(?s)stores a tensor in .{where}.*Register it as a buffer, or return it beside the loss"
    with pytest.raises(errors.CaptureFailed, match=text):
        compiled(model)
    assert [dict(vars(model)), list(model.aux), dict(model.table), dict(vars(model.cfg)), list(NOTED)] == before


@pytest.mark.parametrize("read", [
    lambda x: x.pow(2).mean().item(),
    lambda x: 0.9 + 0.1 * x.detach().sum().item(),
    lambda x: (x > 0).sum().item(),
    lambda x: x.abs().max().detach().tolist(),
    lambda x: {"norm": [x.detach().norm().item()]},
])  # fmt: skip
@pytest.mark.parametrize(("keep", "where"), [
    (in_a_list, r"model\.aux"),
    (on_a_list, r"model\.aux\[1\]"),
    (in_a_dict, r"model\.table\['known'\]"),
    (on_a_configuration, r"model\.cfg\.last"),
    (in_a_global, r"test_left_by_tracing\.NOTED\[0\]"),
])  # fmt: skip
def test_a_number_that_the_forward_pass_reads_and_keeps_is_refused_by_name(keep: Any, where: str, read: Any):
    model = Noting(lambda model, x: keep(model, read(x)))
    before = [dict(vars(model)), list(model.aux), dict(model.table), dict(vars(model.cfg)), list(NOTED)]
    with pytest.raises(errors.CaptureFailed, match=f"(?s)stores a number in .{where}.*return it beside the loss"):
        compiled(model)
    assert [dict(vars(model)), list(model.aux), dict(model.table), dict(vars(model.cfg)), list(NOTED)] == before


def test_a_moving_average_of_losses_in_python_is_refused():
    kept = {"mean": 1.0}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = model(batch[0]).pow(2).mean()
        scaled = loss / kept["mean"]
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * loss.item()
        return scaled

    with pytest.raises(errors.CaptureFailed, match=r"stores a number in .*kept\['mean'\]"):
        compiled(nn.Linear(20, 10), loss_fn)
    assert kept == {"mean": 1.0}


def test_python_that_counts_its_calls_outside_the_model_is_refused_and_the_count_is_put_back():
    calls, seen, largest = [0], set[int](), {"size": 0}

    def keep(model: Any, x: Tensor) -> None:
        calls[0] += 1
        seen.add(calls[0])
        largest["size"] = calls[0] * x.shape[0]
        model.last = calls[0]

    model = Noting(keep)
    before = dict(vars(model))
    with pytest.raises(errors.StepChanged, match=r"itself changes the model: .* changed from 1 to 2"):
        compiled(model)
    assert (calls, seen, largest, dict(vars(model))) == ([0], set(), {"size": 0}, before)


# Random numbers of Python and NumPy


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.fc, self.draw = nn.Linear(20, 10), draw
        self.own = random.Random(1)
        self.modern = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return 2 * x if self.draw(self) < 0.5 else x


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (lambda _: random.random(), r"draws from random: .*Draw outside and pass"),
        (lambda _: np.random.rand(), r"draws from numpy.random: .*torch.rand"),
        (lambda model: model.own.gauss(0, 1), r"draws from model.own: "),
        (lambda model: model.modern.random(), r"draws from model.modern: "),
    ],
)
def test_drawing_with_python_or_numpy_is_refused_and_leaves_their_states(draw: Any, text: str):
    model = Drawing(draw)
    model(BATCH[0])  # sets up what gauss keeps

    def states() -> list[str]:
        own = model.own.getstate(), model.modern.bit_generator.state
        return [str(random.getstate()), str(own), str(np.random.get_state()[1].tolist())]

    before = states()
    with pytest.raises(errors.CaptureFailed, match=f"(?s){text}"):
        compiled(model)
    assert states() == before


def test_tracing_does_not_count_the_batches_of_a_teacher():
    teacher = nn.Sequential(nn.Linear(20, 10), nn.BatchNorm1d(10)).requires_grad_(False)
    step = compiled(small(), lambda model, batch: (model(batch[0]) - teacher(batch[0])).square().mean())
    assert teacher[1].num_batches_tracked == 0
    step(BATCH)
    assert teacher[1].num_batches_tracked == 1
