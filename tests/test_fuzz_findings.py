"""What random training programs have shown: each was wrong, or refused for no reason, when it was found."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxcomp


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def beside_eager(
    model: nn.Module,
    batches: Sequence[Any],
    between: Callable[[nn.Module, int], None] = lambda model, step: None,  # noqa: ARG005
    loss_fn: Callable[[nn.Module, Any], Any] = squares,
) -> tuple[nn.Module, nn.Module]:
    """Train the model compiled and a copy of it by eager PyTorch; both are changed before each step."""
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    step = fxcomp.compile_step(model, loss_fn, optimizer, batches[0])
    for number, batch in enumerate(batches):
        between(model, number)
        between(reference, number)
        step(batch)
        reference_optimizer.zero_grad()
        loss_fn(reference, batch).backward()
        reference_optimizer.step()
    return model, reference


def assert_alike(models: tuple[nn.Module, nn.Module], tolerance: float = 0.0) -> None:
    pairs = zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True)
    for (name, ours), theirs in pairs:
        assert (ours - theirs).abs().max().item() <= tolerance, name


class First(nn.Module):
    """A recurrent layer's outputs, without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def test_batch_first_recurrent_layers_follow_changing_batch_sizes():
    torch.manual_seed(0)
    sizes = [(3, 4), (5, 4), (6, 4), (2, 4), (4, 4)]
    model = First(nn.RNN(8, 8, batch_first=True))
    assert_alike(beside_eager(model, [torch.randn(*size, 8) for size in sizes]), 1e-7)


class ByTable(nn.Module):
    """Looks a size up in a dict, which symbols do not do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * {3: 0.5, 5: 0.25}.get(x.shape[0], 1.0)


def test_a_size_that_does_not_trace_as_a_symbol_is_captured_as_it_is():
    assert_alike(beside_eager(ByTable(), [torch.randn(size, 4) for size in (2, 3, 4, 5, 6)]))
