"""The optimizers in a capture: whose parameters they update, numbers that stay live, and what is refused."""

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
"""Hyper-parameters that are inputs of the graph, unless they are zero: zeros are baked in."""

GivenOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer of a model, or several of different parameters."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A trainable parameter: its first name in the model, and who updates it."""

    name: str
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer
    place: int = 0
    """Its group among those of its optimizer."""
    group: int = 0
    """Its group among those of all optimizers."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of its group as they are now."""
        return self.optimizer.param_groups[self.place]

    @property
    def state(self) -> dict[str, Any]:
        """Its optimizer's state for it."""
        return self.optimizer.state.get(self.parameter, {})


@dataclass(frozen=True, slots=True)
class FreshState:
    """State that was made for a parameter before its first step."""

    state: Mapping[str, Any]
    """The optimizer's own."""
    begun: Mapping[str, Any]
    """The values with which it was made."""


_FRESH: MutableMapping[torch.optim.Optimizer, dict[Tensor, FreshState]] = WeakIdKeyDictionary()


def fresh_states(optimizer: torch.optim.Optimizer) -> dict[Tensor, FreshState]:
    """Return the record of an optimizer's parameters that no step has updated yet, which all steps share.

    An eager `optimizer.step()` takes out the parameters with a gradient, and `load_state_dict` takes out all.
    """
    if optimizer not in _FRESH:
        _FRESH[optimizer] = {}
        compat.watch_optimizer(optimizer, forget_written)
    return _FRESH[optimizer]


def forget_written(optimizer: torch.optim.Optimizer, *of_step: object) -> None:
    """Take what an eager step updates out of the record, or all if a state was loaded; shadows have no record."""
    known = _FRESH.get(optimizer, {})
    for parameter in [each for each in known if not of_step or each.grad is not None]:
        del known[parameter]


def all_optimizers(given: GivenOptimizers) -> tuple[torch.optim.Optimizer, ...]:
    """List the optimizers of a model. Raises Unsupported where there are none, or what is none."""
    found: tuple[Any, ...] = tuple(given) if is_sequence(given) else (given,)
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise errors.Unsupported(
                f"optimizer= got a {type(each).__name__}, which is no torch.optim.Optimizer.\n"
                "  Give one optimizer, or a list of those that update different parameters of the model."
            )
    if not found:
        raise errors.Unsupported("optimizer= is an empty list.\n  Give the optimizers of the model.")
    return found


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """List the parameter groups of several optimizers, in order."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Name an optimizer's class as people write it."""
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if is_torchs(optimizer) else f"{kind.__module__}.{kind.__qualname__}"


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Tell torch's own classes: each of their updates looks at one parameter."""
    return type(optimizer).__module__.startswith("torch.optim")


def refused(optimizer: torch.optim.Optimizer, why: str, remedy: str = "") -> errors.Unsupported:
    """Make the error for an optimizer whose step is not captured."""
    alternative = "fxcomp.ddp_hook and fxcomp.compile_model(model) leave the optimizer yours."
    return errors.Unsupported(
        f"the step of {class_name(optimizer)} {why}.\n  {remedy}{'. Or: ' if remedy else ''}{alternative}"
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise Unsupported for hooks, an option or an optimizer inside that a captured step would not follow.

    From then on the optimizer is watched for eager steps and for states that are loaded.
    """
    fresh_states(optimizer)
    if hooks := compat.optimizer_hooks(optimizer, forget_written):
        raise errors.Unsupported(
            f"the optimizer has a {' and a '.join(hooks)}, which a captured step would not call.\n"
            "  Remove it, or do its work around step(batch)."
        )
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise refused(optimizer, f"calls that of another optimizer, its {name!r} of {class_name(value)}")
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
    """Tell a plain number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


NOT_OF_THE_UPDATE = ("param_groups", "state", "defaults", "step", "_opt_called", "_warned_capturable_if_run_uncaptured")
"""Attributes of an optimizer that are read elsewhere, or that PyTorch and schedulers write while it steps."""

_MANY = 1000
"""Of collections with more items only the identity counts."""


def baked(value: Any) -> Hashable:
    """Read what a capture bakes in: plain Python by its values, tensors by their identity; None for other objects."""
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
    """Return what reads numbers: of tensors on a device that the host would wait for, it has read all at once."""
    given = [group.get(key) for group in groups for key in LIVE_NUMBERS]
    flat = chain.from_iterable(value if is_sequence(value) else (value,) for value in given)
    there = [value for value in flat if isinstance(value, Tensor) and compat.works_later(value.device)]
    if not there:
        return _read
    values: list[float] = cast("Any", torch.stack([value.detach().double().view(()) for value in there])).tolist()
    known = dict(zip(map(id, there), values, strict=True))
    return lambda number: known[id(number)] if id(number) in known else _read(number)


def live_numbers(group: Mapping[str, Any], read: Callable[[Any], Any] = _read) -> dict[str, float]:
    """Read the numbers of a parameter group that are inputs of the graph; betas count as two."""
    found: dict[str, float] = {}
    for key in LIVE_NUMBERS:
        if key == "dampening" and not group.get("momentum"):
            continue  # it dampens momentum
        value = group.get(key)
        values = value if is_sequence(value) else (value,)
        for i, number in enumerate(values):
            if hasattr(number, "item"):  # a tensor, or a number of NumPy's
                number = read(number)
            if is_number(number) and (key == "lr" or number != 0):
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


def state_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Find the tensors among what an optimizer keeps for a parameter."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def is_kept(state: Mapping[str, Any]) -> bool:
    """Ask if the optimizer keeps anything for a parameter; SGD without momentum keeps a None."""
    for value in state.values():  # noqa: SIM110  # sooner than any() before every step
        if value is not None:
            return True
    return False
