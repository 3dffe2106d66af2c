"""An optimizer that knows a parameter by more than its values and options is refused; the parameter stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.followed import compile_alone
from torch import Tensor, nn

from fxcomp.errors import Unsupported


class Scaled(torch.optim.Optimizer):
    """Scales each gradient by what `scale` says of its parameter."""

    def __init__(self, parameters: Any, chosen: Any, scale: Callable[[Any, Tensor], float]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.chosen, self.scale = chosen, scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.scale(self.chosen, p))


def model_and_batch() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 3), torch.ones(2, 3)


def by_attribute(_: Any, p: Any) -> float:
    return getattr(p, "lr_scale", 1.0)


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], float]]] = {
    "attribute": (lambda model: setattr(model.bias, "lr_scale", 0.5), by_attribute),
    "id": (lambda model: {id(model.bias)}, lambda chosen, p: 0.5 if id(p) in chosen else 1.0),
    "key": (lambda model: {model.bias: 0.5}, lambda chosen, p: chosen.get(p, 1.0)),
    "identity": (lambda model: [model.bias], lambda chosen, p: 0.5 if chosen[0] is p else 1.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_knows_its_parameters_is_refused(way: str) -> None:
    mark, scale = WAYS[way]
    model, batch = model_and_batch()
    optimizer = Scaled(model.parameters(), mark(model), scale)
    model.bias.grad = torch.ones(3)
    before, memory = model.bias.detach().clone(), model.bias.data_ptr()
    with pytest.raises(Unsupported, match="Scaled knows 'bias' by an attribute, its identity or a table"):
        compile_alone(model, lambda model, x: model(x).square().mean(), optimizer, batch)
    assert torch.equal(model.bias, before)
    assert model.bias.data_ptr() == memory
    assert torch.equal(model.bias.grad, torch.ones(3))


def test_marks_that_change_no_update_are_accepted() -> None:
    model, batch = model_and_batch()
    model.bias.no_decay = True
    optimizer = Scaled(model.parameters(), {model.bias: "bias"}, by_attribute)
    compile_alone(model, lambda model, x: model(x).square().mean(), optimizer, batch)(batch)
