"""Captured steps train as eager PyTorch does: models, batches, losses, parameter groups and optimizer state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy, mlp
from torch import Tensor, nn

import fxcomp


def steps_like_eager(model: nn.Module, loss: Any, batches: list[Any], tolerance: float = 0.0) -> list[Any]:
    """Train compiled and eager side by side; returns what the compiled steps returned."""
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, reference))
    step = fxcomp.compile_step(model, loss, optimizer, batches[0], checks=fxcomp.Checks(verify=1))
    torch.manual_seed(3)
    results = [step(batch) for batch in batches]
    torch.manual_seed(3)
    for batch in batches:
        reference_optimizer.zero_grad()
        result = loss(reference, batch)
        (result[0] if isinstance(result, tuple) else result).backward()
        reference_optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=0, atol=tolerance, msg=name)
    return results


def with_aux(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    out = model(batch["x"])
    loss = nn.functional.cross_entropy(out, batch["labels"][0])
    return loss, {
        "logits": out,
        "right": (out.argmax(1) == batch["labels"][0]).sum(),
        "pair": [out.max(), batch["scale"]],
    }


def test_a_loss_may_return_more_and_a_batch_may_be_any_tree():
    rows = [JOBS["mlp"].batch(i) for i in range(3)]
    batches = [{"x": x, "labels": [y], "scale": 2.0, "name": "train", "nothing": None} for x, y in rows]
    results = steps_like_eager(mlp(), with_aux, batches)
    for loss, aux in results:
        assert loss.dim() == 0
        assert not loss.requires_grad
        assert set(aux) == {"logits", "right", "pair"}
        assert aux["logits"].shape == (4, 10)
        assert float(aux["pair"][1]) == 2.0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(20, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(1))[0][:, -1])


class Branching(nn.Module):
    """Control flow over plain attributes and shapes is Python's, and specialised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.deep = nn.Linear(20, 10), nn.Linear(10, 10), True
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out = self.a(x)
        return self.b(out) if self.deep else out + 0 * self.b(out)


class PlainConstant(nn.Module):
    """A tensor that is no buffer is a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(20, 10), torch.full((10,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


def test_a_recurrent_model_trains_as_eager_up_to_rounding():
    """Eager PyTorch runs oneDNN's fused LSTM, a compiled step its plain operators."""
    torch.manual_seed(0)
    steps_like_eager(Recurrent(), cross_entropy, [JOBS["mlp"].batch(i) for i in range(3)], tolerance=1e-6)


@pytest.mark.parametrize("build", [Branching, PlainConstant])
def test_models_of_many_kinds_train_as_eager(build: Any):
    torch.manual_seed(0)
    steps_like_eager(build(), cross_entropy, [JOBS["mlp"].batch(i) for i in range(3)])


def test_autocast_inside_the_loss_is_captured():
    torch.manual_seed(0)
    steps_like_eager(mlp(), autocast_loss, [JOBS["mlp"].batch(i) for i in range(3)])


def test_a_plain_attribute_that_changes_is_followed():
    torch.manual_seed(0)
    model = Branching()
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        OPTIMIZERS["plain"](model.parameters()),
        JOBS["mlp"].batch(0),
        checks=fxcomp.Checks(verify=1),
    )
    step(JOBS["mlp"].batch(0))
    first = step.source
    model.deep = False
    step(JOBS["mlp"].batch(0))
    assert step.source != first
    assert model.seen == 2


def test_parameter_groups_keep_their_own_numbers():
    torch.manual_seed(0)
    model = mlp()
    reference = copy.deepcopy(model)

    def two_groups(m: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in m.parameters() if p.dim() > 1]
        plain = [p for p in m.parameters() if p.dim() == 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}], lr=0.01
        )

    optimizer, other = two_groups(model), two_groups(reference)
    step = fxcomp.compile_step(model, cross_entropy, optimizer, JOBS["mlp"].batch(0), checks=fxcomp.Checks(verify=1))
    for i in range(4):
        optimizer.param_groups[1]["lr"] = other.param_groups[1]["lr"] = 0.02 / (1 + i)
        step(JOBS["mlp"].batch(i))
        other.zero_grad()
        cross_entropy(reference, JOBS["mlp"].batch(i)).backward()
        other.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_optimizer_state_goes_to_eager_and_back():
    """The state stays the optimizer's own: save it, load it elsewhere, go on."""
    torch.manual_seed(0)
    model = mlp()
    reference = copy.deepcopy(model)
    batches = [JOBS["mlp"].batch(i) for i in range(6)]
    eager = OPTIMIZERS["adamw"](reference.parameters())

    def eager_step(batch: Any) -> None:
        eager.zero_grad()
        cross_entropy(reference, batch).backward()
        eager.step()

    for batch in batches:
        eager_step(batch)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = fxcomp.compile_step(model, cross_entropy, optimizer, batches[0], checks=fxcomp.Checks(verify=1))
    for batch in batches[:3]:
        step(batch)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in batches[3:]:
        step(batch)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
