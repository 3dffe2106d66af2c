"""Inductor may compile regions; what they compute stays the same, and what they draw."""

import warnings
from collections.abc import Callable

import pytest
import torch
from jobs import cross_entropy
from torch import Tensor, nn

import fxcomp
from fxcomp.codegen import program


class Attending(nn.Module):
    """Attention, and every kind of draw: fills of fresh memory, transposed ones, and dropout that is one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        inner = nn.functional.dropout(self.embed(tokens), 0.3).transpose(0, 1)
        inner = nn.functional.dropout(inner, 0.3).transpose(0, 1)
        inner = inner + self.attend(inner, inner, inner, need_weights=False)[0]
        return self.head(inner)


class Dropping(Attending):
    """Two draws that Inductor keeps inside its code."""

    def forward(self, tokens: Tensor) -> Tensor:
        inner = torch.native_dropout(self.embed(tokens), 0.3, True)[0]
        return self.head(torch.native_dropout(inner, 0.5, True)[0])


class Mixed(Dropping):
    """Draws of both kinds: this region stays as it is."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(tokens), 0.1)


def trained(
    make: Callable[[], nn.Module], backend: str, monkeypatch: pytest.MonkeyPatch, accumulate: int = 1
) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters after a few steps with regions run by `backend`."""
    monkeypatch.setattr(program, "INDUCTOR_DEVICES", ("cpu",) if backend == "inductor" else ())
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tokens = [torch.randint(0, 20, (3, 6)) for _ in range(3)]
    batches = [(each, each) for each in tokens]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own
        step = fxcomp.compile_step(model, cross_entropy, optimizer, batches[0], verify_every=1, accumulate=accumulate)
        torch.manual_seed(1)
        return [step(batch, last=batch is batches[-1]).item() for batch in batches], list(model.parameters())


@pytest.mark.parametrize("make", [pytest.param(Attending, marks=pytest.mark.slow), Dropping, Mixed])
def test_regions_compiled_by_inductor_train_the_same(make: type[nn.Module], monkeypatch: pytest.MonkeyPatch):
    losses, parameters = trained(make, "eager", monkeypatch)
    compiled_losses, compiled_parameters = trained(make, "inductor", monkeypatch)
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    for parameter, other in zip(compiled_parameters, parameters, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_sums_are_written_by_inductor_too(monkeypatch: pytest.MonkeyPatch):
    losses, parameters = trained(Dropping, "eager", monkeypatch, accumulate=2)
    compiled_losses, compiled_parameters = trained(Dropping, "inductor", monkeypatch, accumulate=2)
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    for parameter, other in zip(compiled_parameters, parameters, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-6)
