"""The optimizer in a capture: numbers that stay live, state tensors, and refused options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp import compat, errors
from fxcomp.graph.work import is_sequence

OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

LIVE_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "betas")
"""Hyper-parameters that are inputs of the graph, unless they are zero: zeros are baked in."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A trainable parameter: its first name in the model, and the optimizer's group that updates it."""

    name: str
    parameter: nn.Parameter
    group: int


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedOptimizer for a class, a hook or an option that is not captured."""
    known = ", ".join(cls.__name__ for cls in OPTIMIZERS)
    if type(optimizer) not in OPTIMIZERS:
        raise errors.UnsupportedOptimizer(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is not an optimizer that fxcomp captures.\n"
            f"  Use torch.optim's {known}, or torch.compile(model, backend='fxcomp'), which leaves the optimizer yours."
        )
    if hooks := compat.optimizer_hooks(optimizer):
        raise errors.UnsupportedOptimizer(
            f"the optimizer has a {' and a '.join(hooks)}, which a captured step would not call.\n"
            "  Remove it, or do its work around step(batch)."
        )
    for option in ("differentiable", "capturable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise errors.UnsupportedOptimizer(f"{option}=True is not captured: build the optimizer without it")


def live_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Read the numbers of a parameter group that are inputs of the graph; betas count as two."""
    found: dict[str, float] = {}
    for key in LIVE_NUMBERS:
        if key == "dampening" and not group.get("momentum"):
            continue  # it dampens momentum
        value = group.get(key)
        values = value if is_sequence(value) else (value,)
        for i, number in enumerate(values):
            if hasattr(number, "item"):  # a tensor, or a number of NumPy's
                number = number.item()
            if isinstance(number, int | float) and not isinstance(number, bool) and (key == "lr" or number != 0):
                found[f"{key}_{i}" if len(values) > 1 else key] = float(number)
    return found


def with_live(group: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group's options with other numbers in place of the live ones."""
    options = {key: value for key, value in group.items() if key != "params"}
    for key, value in options.items():
        if is_sequence(value):
            options[key] = tuple(numbers.get(f"{key}_{i}", item) for i, item in enumerate(value))
        elif key in numbers:
            options[key] = numbers[key]
    return options


def state_keys(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Name the optimizer's state tensors of a parameter."""
    return tuple(key for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor))


def fresh_optimizer(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> torch.optim.Optimizer:
    """Make an optimizer of the same class and options over one parameter."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {key: _number(value) for key, value in group.items() if key in accepted and key != "params"}
    make: Any = type(optimizer)
    return make([parameter], **options)


def step_alone(
    shadow: torch.optim.Optimizer, parameter: Tensor, options: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Step a fresh optimizer for one parameter that has a gradient, with other options and from another state."""
    shadow.param_groups[0].update(options, params=[parameter])
    shadow.state.clear()
    shadow.state[parameter] = dict(state)
    shadow.step()


def _number(value: Any) -> Any:
    """Turn a tensor that holds a learning rate into its present number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def materialize_state(optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> dict[str, object]:
    """Create the optimizer's state where its first step would, all zero; returns the fresh states by parameter name.

    The optimizer's own class steps once on a zero parameter with a zero gradient, for all that are alike.
    """
    fresh: dict[str, object] = {}
    of_likeness: dict[Any, dict[str, Any]] = {}
    for owner in owned:
        parameter = owner.parameter
        if has_tensors(optimizer.state.get(parameter, {})):
            continue
        likeness = (owner.group, parameter.shape, parameter.stride(), parameter.device)
        if likeness not in of_likeness:
            of_likeness[likeness] = _zero_state(optimizer, owner)
        alike = of_likeness[likeness].items()
        with torch.inference_mode(False):
            state = {key: torch.zeros_like(value) if isinstance(value, Tensor) else value for key, value in alike}
        optimizer.state[parameter] = state
        fresh[owner.name] = state
    return fresh


def _zero_state(optimizer: torch.optim.Optimizer, owner: Owned) -> dict[str, Any]:
    """Make the state that a step makes for a parameter like this one."""
    with torch.inference_mode(False), torch.enable_grad():
        stand_in = nn.Parameter(torch.zeros_like(owner.parameter))
        stand_in.grad = torch.zeros_like(stand_in)
        shadow = fresh_optimizer(optimizer, optimizer.param_groups[owner.group], stand_in)
        shadow.step()
    return dict(shadow.state[stand_in])


def has_tensors(state: Mapping[str, Any]) -> bool:
    """Ask if the optimizer keeps tensors for a parameter; SGD without momentum keeps a None."""
    for value in state.values():  # noqa: SIM110  # sooner than any() before every step
        if isinstance(value, Tensor):
            return True
    return False
