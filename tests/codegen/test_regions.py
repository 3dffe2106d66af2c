"""Inductor may compile regions; what they compute stays the same."""

import warnings

import pytest
import torch
from jobs import cross_entropy, mlp, rows
from torch import Tensor, nn

import fxcomp
from fxcomp import pipeline


def trained(backend: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters after a few steps with regions run by `backend`."""
    monkeypatch.setattr(pipeline, "INDUCTOR_DEVICES", ("cpu",) if backend == "inductor" else ())
    torch.manual_seed(0)
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [rows(torch.Generator().manual_seed(i), 8) for i in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own
        step = fxcomp.compile_step(model, cross_entropy, optimizer, batches[0], verify_every=1)
        torch.manual_seed(1)
        return [step(batch).item() for batch in batches], list(model.parameters())


@pytest.mark.slow
def test_regions_compiled_by_inductor_train_the_same(monkeypatch: pytest.MonkeyPatch):
    losses, parameters = trained("eager", monkeypatch)
    compiled_losses, compiled_parameters = trained("inductor", monkeypatch)
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    for parameter, other in zip(compiled_parameters, parameters, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-6)
