"""Random training programs have shown these cases: each was wrong, or refused for no reason, when it was found."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxcomp
from fxcomp.errors import CaptureFailed


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def beside_eager(
    model: nn.Module,
    batches: Sequence[Any],
    between: Callable[[nn.Module, int], None] = lambda model, step: None,  # noqa: ARG005
    *,
    verify: int | str = "never",
) -> tuple[nn.Module, nn.Module]:
    """Train the model compiled and a copy of it by eager PyTorch; both are changed before each step."""
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    step = fxcomp.compile_step(
        model, squares, optimizer, batches[0], max_grad_norm=1.0, checks=fxcomp.Checks(verify=verify)
    )
    for number, batch in enumerate(batches):
        between(model, number)
        between(reference, number)
        torch.manual_seed(number)
        step(batch)
        torch.manual_seed(number)
        reference_optimizer.zero_grad()
        squares(reference, batch).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
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
    assert_alike(beside_eager(ByTable(), [torch.randn(size, 4) for size in (2, 3, 5)]))


class Masked(nn.Module):
    """Fills in place what lies otherwise than in order, and draws like it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).transpose(1, 2) * 1.0
        x.masked_fill_(x.detach() > 0.5, 0.1)
        return functional.dropout(x, 0.5)


def test_what_is_masked_in_place_draws_random_numbers_in_its_own_order_of_memory():
    assert_alike(beside_eager(Masked(), [torch.randn(3, 5, 4)] * 2))


class Writing(nn.Module):
    """Writes its own parameters before it uses them."""

    def __init__(self, write: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write
        self.words = nn.Embedding(5, 4, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.layer.weight)
        return self.layer(x) + self.words(torch.tensor([0, 2, 4]))


@pytest.mark.parametrize("verify", ["never", 1])
@pytest.mark.parametrize(
    "write", [lambda w: w.data.mul_(0.9), lambda w: w.copy_(functional.normalize(w, dim=1))], ids=["data", "copy"]
)
def test_a_forward_pass_may_write_parameters(write: Callable[[nn.Parameter], Any], verify: int | str):
    assert_alike(beside_eager(Writing(write), [torch.randn(3, 4) for _ in range(3)], verify=verify))


class Overlapping(nn.Module):
    """Writes a buffer, in whose memory something else lies."""

    def __init__(self, part: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", self.layer.weight.detach()[0] if part is whole else torch.zeros(4))
        self.register_buffer("tail", part(self))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += 1
        return self.layer(x) + self.tail.sum()


def whole(_: Any) -> Tensor:
    return torch.zeros(4)


@pytest.mark.parametrize(
    ("part", "other"), [(lambda model: model.mean[2:], "tail"), (whole, r"layer\.weight")], ids=["buffer", "parameter"]
)
def test_writing_where_another_input_lies_is_refused(part: Callable[[Any], Tensor], other: str):
    model = Overlapping(part)
    with pytest.raises(CaptureFailed, match=f"writes 'mean', which shares memory with '{other}'"):
        fxcomp.compile_step(model, squares, sgd(model), torch.randn(3, 4))


class Sharing(nn.Module):
    """One buffer under two names, until somebody replaces one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(1))
        self.layer.register_buffer("offset", self.offset)

    def forward(self, x: Tensor) -> Tensor:
        self.offset += 0.5
        return self.layer(x) + self.layer.offset


def test_a_buffer_of_two_names_may_become_two():
    def part(model: nn.Module, step: int) -> None:
        if step == 2:
            model.offset = torch.full((1,), 3.0)

    assert_alike(beside_eager(Sharing(), [torch.randn(3, 4)] * 4, part))


class Unused(nn.Module):
    """Has a gradient of one number, spread over a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.1 * self.other.weight.sum() + 0 * self.other.bias.sum()


def test_a_gradient_that_is_one_number_spread_is_verified_and_clipped():
    assert_alike(beside_eager(Unused(), [torch.randn(3, 4)] * 2, verify=1))
