"""Watch an optimizer's first step fill the state of a parameter: what it puts there first is how the state begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A first step of a stand-in."""

    value: Tensor
    """The parameter after the step."""
    begun: Mapping[str, Any]
    """The values that the state was given first."""
    state: Mapping[str, Any]
    """The state after the step."""
    group: Mapping[str, Any]
    """The options of its group after the step."""


def first_step(shadow: torch.optim.Optimizer, options: Mapping[str, Any], value: Tensor, gradient: Tensor) -> FirstStep:
    """Step a shadow for copies of a value and a gradient, without a state, by the implementation that is asked for."""
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient.clone()
    group: dict[str, Any] = {**options, "params": [parameter]}
    usual, recorders = shadow.state, _Recorders()
    shadow.state, shadow.param_groups = recorders, [group]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        shadow.step()
    finally:
        shadow.state, shadow.param_groups = usual, []
    recorder = recorders[parameter]
    return FirstStep(parameter.detach(), recorder.begun, dict(recorder), group)


class _StateRecorder(dict[str, Any]):
    """A parameter's state that remembers what it was given first."""

    def __init__(self, given: Mapping[str, Any] | None = None):
        super().__init__()
        self.begun: dict[str, Any] = {}
        self.update(given or {})

    def __setitem__(self, key: str, value: Any) -> None:
        self.begun.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *given: Any, **more: Any) -> None:
        for key, value in dict(*given, **more).items():
            self[key] = value


class _Recorders(dict[Tensor, _StateRecorder]):
    """The states of an optimizer, made of recorders."""

    def __missing__(self, key: Tensor) -> _StateRecorder:
        super().__setitem__(key, _StateRecorder())
        return self[key]

    def __setitem__(self, key: Tensor, value: Mapping[str, Any]) -> None:
        super().__setitem__(key, _StateRecorder(value))
