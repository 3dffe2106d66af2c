"""Optimizers in a capture: parameters, live numbers (hyper-parameters as graph inputs), unsupported features."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fxcomp import compat, errors
from fxcomp.graph.work import is_sequence

LIVE_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "betas")
"""Hyper-parameters that are inputs of the graph. A zero is a constant, except for `lr`."""

GivenOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Owned:
    """A trainable parameter: its first name in the model, and its optimizer."""

    name: str
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer
    place: int = 0
    """Index of the parameter group within its optimizer."""
    group: int = 0
    """Index of the parameter group over all optimizers."""

    @property
    def options(self) -> dict[str, Any]:
        return self.optimizer.param_groups[self.place]

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state.get(self.parameter, {})


@dataclass(frozen=True, slots=True)
class FreshState:
    """State made for a parameter before its first step."""

    state: Mapping[str, Any]
    begun: Mapping[str, Any]
    """Initial values of `state`."""


_FRESH: MutableMapping[torch.optim.Optimizer, dict[Tensor, FreshState]] = WeakIdKeyDictionary()


def fresh_states(optimizer: torch.optim.Optimizer) -> dict[Tensor, FreshState]:
    """Return the fresh states of an optimizer's parameters that have not been stepped yet.

    All compiled steps share this table. An eager `optimizer.step()` removes the parameters that it updates;
    `load_state_dict` removes all.
    """
    if optimizer not in _FRESH:
        _FRESH[optimizer] = {}
        compat.watch_optimizer(optimizer, forget_written)
    return _FRESH[optimizer]


def forget_written(optimizer: torch.optim.Optimizer, *of_step: object) -> None:
    """Empty `fresh_states` after state was loaded; after an eager step, remove parameters with a gradient only."""
    known = _FRESH.get(optimizer, {})
    for parameter in [each for each in known if not of_step or each.grad is not None]:
        del known[parameter]


def all_optimizers(given: GivenOptimizers) -> tuple[torch.optim.Optimizer, ...]:
    """List a model's optimizers. Raises Unsupported for an empty list or a non-optimizer."""
    found: tuple[Any, ...] = tuple(given) if is_sequence(given) else (given,)
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise errors.Unsupported(
                f"optimizer= got a {type(each).__name__}, which is no torch.optim.Optimizer.\n"
                "  Give one optimizer, or a list of optimizers that update different parameters of the model."
            )
    if not found:
        raise errors.Unsupported("optimizer= is an empty list.\n  Give the optimizers of the model.")
    return found


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def class_name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if is_torchs(optimizer) else f"{kind.__module__}.{kind.__qualname__}"


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class is torch's. Updates by torch's classes read one parameter only."""
    return type(optimizer).__module__.startswith("torch.optim")


def refused(optimizer: torch.optim.Optimizer, why: str, remedy: str = "") -> errors.Unsupported:
    """Return the error for an optimizer whose step cannot be captured."""
    alternative = "fxcomp.ddp_hook and fxcomp.compile_model(model) leave the optimizer yours."
    return errors.Unsupported(
        f"the step of {class_name(optimizer)} {why}.\n  {remedy}{'. Or: ' if remedy else ''}{alternative}"
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise Unsupported for hooks, options or inner optimizers that a captured step would ignore.

    Also starts watching the optimizer for eager steps and loaded states.
    """
    fresh_states(optimizer)
    if hooks := compat.optimizer_hooks(optimizer, forget_written):
        raise errors.Unsupported(
            f"the optimizer has a {' and a '.join(hooks)}, which a captured step would not call.\n"
            "  Remove it, or do its work around step(batch)."
        )
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise refused(optimizer, f"calls the step of another optimizer, its {name!r} of {class_name(value)}")
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise errors.Unsupported("differentiable=True is not captured: build the optimizer without it")
        on_cpu = any(parameter.device.type == "cpu" for parameter in group["params"]) and not compat.imagined_device()
        if group.get("capturable") and on_cpu:
            raise errors.Unsupported(
                "capturable=True is for parameters on an accelerator, and these are on the CPU, where PyTorch refuses"
                " it too.\n  Build the optimizer without it."
            )


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is an int or float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


NOT_OF_THE_UPDATE = ("param_groups", "state", "defaults", "step", "_opt_called", "_warned_capturable_if_run_uncaptured")
"""Optimizer attributes that are checked elsewhere, or that PyTorch and schedulers write in each step."""

_MANY = 1000
"""Maximum size of a collection compared by content."""


def baked(value: Any) -> Hashable:
    """Return a key to compare a value that is a constant of the graph.

    Plain values and collections are compared by value; tensors and collections of more than _MANY items by identity;
    other objects not at all (None).
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    items: Any = value
    if isinstance(value, Tensor) or (isinstance(value, dict | list | tuple) and len(items) > _MANY):
        return type(items).__name__, id(items)
    if isinstance(value, dict):
        return tuple((str(key), baked(item)) for key, item in items.items())
    if isinstance(value, np.generic):
        return items.item()
    return tuple(map(baked, items)) if is_sequence(value) else None


def _read(number: Any) -> Any:
    return number.item()


def read_together(groups: Sequence[Mapping[str, Any]]) -> Callable[[Any], Any]:
    """Return a function that reads a live number of `groups`. Numbers on a device are copied in one transfer."""
    given = [group.get(key) for group in groups for key in LIVE_NUMBERS]
    flat = chain.from_iterable(value if is_sequence(value) else (value,) for value in given)
    there = [value for value in flat if isinstance(value, Tensor) and compat.works_later(value.device)]
    if not there:
        return _read
    values: list[float] = cast("Any", torch.stack([value.detach().double().view(()) for value in there])).tolist()
    known = dict(zip(map(id, there), values, strict=True))
    return lambda number: known[id(number)] if id(number) in known else _read(number)


def live_numbers(group: Mapping[str, Any], read: Callable[[Any], Any] = _read) -> dict[str, float]:
    """Return the numbers of a group that are inputs of the graph, with `betas` as `betas_0` and `betas_1`."""
    found: dict[str, float] = {}
    for key in LIVE_NUMBERS:
        if key == "dampening" and not group.get("momentum"):
            continue  # unused without momentum
        value = group.get(key)
        values = value if is_sequence(value) else (value,)
        for i, number in enumerate(values):
            if hasattr(number, "item"):  # a tensor or NumPy number
                number = read(number)
            if is_number(number) and (key == "lr" or number != 0):
                found[f"{key}_{i}" if len(values) > 1 else key] = float(number)
    return found


def with_live(group: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group's options, with live numbers replaced by `numbers`."""
    options = {key: value for key, value in group.items() if key != "params"}
    for key, value in options.items():
        if is_sequence(value):
            options[key] = tuple(numbers.get(f"{key}_{i}", item) for i, item in enumerate(value))
        elif key in numbers:
            options[key] = numbers[key]
    return options


def state_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def is_kept(state: Mapping[str, Any]) -> bool:
    """Return whether a state has a value other than None. SGD without momentum stores only None."""
    for value in state.values():  # noqa: SIM110  # faster than any(), and called before every step
        if value is not None:
            return True
    return False
