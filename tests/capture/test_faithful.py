"""A forward pass is traced as eager PyTorch runs it, where tracing by itself would do otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxcomp
from fxcomp.errors import CaptureFailed


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Repeated(nn.Module):
    """One weight, used several times under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(4):
                x = torch.tanh(self.layer(x))
        return x.float()


class Normed(nn.Module):
    """Assigns to `.data`, of a parameter or a buffer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.name = nn.Parameter(torch.randn(4)), name
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        tensor: Any = getattr(self, self.name)
        tensor.data = tensor.data * 0.9 + 0.1
        return x * self.weight + self.mean


def test_a_weight_that_autocast_casts_once_sums_its_gradient_as_eager_does():
    torch.manual_seed(0)
    model, batch = Repeated(), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    step = fxcomp.compile_step(model, squares, sgd(model), batch)
    optimizer = sgd(reference)
    for _ in range(3):
        step(batch)
        optimizer.zero_grad()
        squares(reference, batch).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_assigning_to_the_data_of_a_trained_parameter_in_the_forward_pass_is_refused():
    model = Normed("weight")
    with pytest.raises(CaptureFailed, match=r"(?s)assigns to `\.data` of 'weight'.*\n  Write in place instead"):
        fxcomp.compile_step(model, squares, sgd(model), torch.randn(3, 4))


def test_assigning_to_the_data_of_a_buffer_writes_it_as_eager_does():
    torch.manual_seed(0)
    model, batch = Normed("mean"), torch.randn(3, 4)
    reference = copy.deepcopy(model)
    step = fxcomp.compile_step(model, squares, sgd(model), batch, checks=fxcomp.Checks(verify=1))
    optimizer = sgd(reference)
    for _ in range(3):
        step(batch)
        optimizer.zero_grad()
        squares(reference, batch).backward()
        optimizer.step()
    assert torch.equal(model.mean, reference.mean)
    assert torch.equal(model.weight, reference.weight)


@pytest.mark.parametrize("read", [lambda scale: scale.numpy(), np.asarray, np.sqrt, np.from_dlpack])
def test_reading_values_with_numpy_is_refused_whoever_owns_the_tensor(read: Callable[[Any], Any]):
    scale, model = torch.tensor(0.5), nn.Linear(4, 4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() * float(read(scale))

    with pytest.raises(
        CaptureFailed, match=r"values with \.\w+\(\), which one graph cannot.\n  test_faithful.py:\d+\n"
    ):
        fxcomp.compile_step(model, loss, sgd(model), torch.randn(3, 4))


def test_an_operator_that_autocast_reaches_into_is_refused():
    model = nn.Bilinear(4, 4, 4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=batch.shape[0] > 2):
            return model(batch, batch).float().mean()

    with pytest.raises(
        CaptureFailed, match=r"bilinear runs under autocast, .*\n  test_faithful.py:\d+\n  Run it outside"
    ):
        fxcomp.compile_step(model, loss, sgd(model), torch.randn(3, 4))
    fxcomp.compile_step(model, loss, sgd(model), torch.randn(2, 4), checks=fxcomp.Checks(verify=1))(torch.randn(2, 4))


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad])
def test_a_step_may_be_compiled_with_gradients_off(around: Any):
    model, batch = nn.Linear(4, 4), torch.randn(3, 4)
    before = model.weight.detach().clone()
    with around():
        step = fxcomp.compile_step(model, squares, sgd(model), batch)
    step(batch)
    assert not torch.equal(model.weight, before)


class Sparse(nn.Module):
    """Two tables whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(9, 4, sparse=True)

    def forward(self, places: Tensor) -> Tensor:
        return self.words(places).sum(1) * self.bags(places)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adagrad"])
def test_sparse_gradients_become_dense_and_update_as_in_eager(kind: str):
    torch.manual_seed(0)
    model = Sparse()
    reference = copy.deepcopy(model)
    make: Any = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }[kind]
    mine, theirs = make(model.parameters()), make(reference.parameters())
    batches = [torch.randint(0, 9, (3, 2)) for _ in range(3)]
    step = fxcomp.compile_step(model, squares, mine, batches[0], checks=fxcomp.Checks(verify=1))
    assert "'words.weight' is sparse in eager PyTorch (sparse=True) and dense here: 36 elements" in step.notes[0]
    for batch in batches:
        step(batch)
        theirs.zero_grad()
        squares(reference, batch).backward()
        theirs.step()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
