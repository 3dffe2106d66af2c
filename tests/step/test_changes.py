"""Changes between steps are followed, bit for bit as by eager PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.followed import BATCH, assert_eager, compile_alone
from helpers.jobs import OPTIMIZERS, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxcomp import errors


def item_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).sum() * batch[1][0].item()


def selecting_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return out[out > 0].sum()


def group_option(**options: Any) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    return lambda model, optimizer: optimizer.param_groups[0].update(options)  # noqa: ARG005


@pytest.mark.parametrize(
    ("change", "options", "programs"),
    [
        (group_option(lr=0.01), {}, 1),
        (group_option(lr=0.0), {}, 1),
        (group_option(weight_decay=0.2), {"weight_decay": 0.1}, 1),
        (group_option(weight_decay=0.2), {}, 2),
        (group_option(weight_decay=0.0), {"weight_decay": 0.1}, 2),
        (group_option(momentum=0.5), {"momentum": 0.9}, 1),
        (group_option(momentum=0.5, dampening=0.3), {"momentum": 0.9}, 2),
        (group_option(nesterov=True), {"momentum": 0.9}, 2),
        (group_option(nesterov=False), {"momentum": 0.9, "nesterov": True}, 2),
        (group_option(maximize=True), {}, 2),
        (lambda model, _: model.eval(), {}, 2),
    ],
)  # fmt: skip
def test_a_changed_option_is_followed(change: Any, options: dict[str, Any], programs: int):
    torch.manual_seed(0)
    step = assert_eager(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)), change, **options)
    assert len(step.in_force.programs) == programs


def test_switching_dropout_off_between_steps_is_followed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.5), nn.Linear(30, 10))
    step = compile_alone(model, optimizer="plain")
    train = step.source
    step(BATCH)
    model.eval()
    step(BATCH)
    assert "bernoulli" in train
    assert "bernoulli" not in step.source
    model.train()
    step(BATCH)
    assert step.source == train


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG001
    model[0].bias.requires_grad_(False)


def replace_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG001
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG001
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (freeze, "requires_grad of '0.bias' changed from True to False.*Call compile_step again"),
        (
            replace_parameter,
            r"'0.weight' is another object than when the step was compiled.*Change parameters in place",
        ),
        (add_group, "groups hold other parameters than when the step was compiled.*after add_param_group"),
    ],
)
def test_a_change_that_cannot_be_followed_is_refused_by_name(change: Any, text: str):
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = compile_alone(model, optimizer=optimizer)
    step(BATCH)
    change(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(errors.StepChanged, match=f"(?s){text}"):
        step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


# Values that stay inside the graph


@pytest.mark.parametrize("loss", [item_loss, selecting_loss])
def test_a_value_or_size_that_the_data_tells_stays_live(loss: Any):
    assert_eager(mlp(), lambda *_: None, loss=loss)


def test_checkpointing_without_dropout_is_eager_exactly():
    assert_eager(Checkpointed(), lambda *_: None)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(20, 30), nn.Tanh()), nn.Linear(30, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


class SetsUp(nn.Module):
    """Prepares itself at its first call, as lazy modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(20, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 2
        return self.fc(x) * self.calls


def test_a_model_that_sets_itself_up_at_its_first_call_is_followed():
    step = assert_eager(SetsUp(), lambda *_: None)
    assert len(step.in_force.programs) == 1
