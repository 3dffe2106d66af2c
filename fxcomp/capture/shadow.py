"""Step a copy of the user's optimizer (a shadow) on other tensors."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.optimizer import refused

_NOT_COPIED = ("param_groups", "state", "step")
"""Attributes that are not copied. Schedulers set `step` to a method of the user's optimizer."""


def shadow_of(optimizer: torch.optim.Optimizer, *, knows_parameters: bool = False) -> torch.optim.Optimizer:
    """Make an optimizer of the same class and attributes without parameters.

    The constructor does not run, because it may need more arguments. Attributes that refer to the user's parameters
    refer to empty tensors in the copy, so that steps of the shadow cannot change a parameter. With `knows_parameters`
    they keep the parameters. Raises Unsupported for an attribute that cannot be copied.
    """
    shadow: Any = object.__new__(type(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(p): p if knows_parameters else p.detach().new_empty(0) for p in parameters}
    for key, value in vars(optimizer).items():
        if key not in _NOT_COPIED:
            vars(shadow)[key] = _copied(optimizer, key, value, memo)
    shadow.state = defaultdict(dict)
    shadow.param_groups = []
    compat.begin_in_step(shadow)
    return shadow


def _copied(optimizer: torch.optim.Optimizer, name: str, value: object, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # user classes may raise anything
        raise refused(
            optimizer,
            f"is tried on a copy, and its attribute {name!r} cannot be copied ({type(error).__name__}: {error})",
            f"Keep the {type(value).__name__} outside of the optimizer, or give it a __deepcopy__",
        ) from error


@contextmanager
def unseen() -> Generator[None]:
    """Disable autograd and inference mode for steps of shadows; restore torch's CPU generator at the end."""
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]  # untyped
        yield


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group's options, with foreach and fused off."""
    plain = {key: False for key in ("foreach", "fused") if key in options}
    return {key: value for key, value in options.items() if key != "params"} | plain


def step_alone(
    shadow: torch.optim.Optimizer, parameter: Tensor, options: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Step a shadow for one parameter. Return the parameter's new state."""
    return step_together(shadow, [(options, [(parameter, state)])])[0]


def step_together(
    shadow: torch.optim.Optimizer,
    groups: Sequence[tuple[Mapping[str, Any], Sequence[tuple[Tensor, Mapping[str, Any]]]]],
) -> list[dict[str, Any]]:
    """Step a shadow for groups of parameters. Return the parameters' new states."""
    pairs = [pair for _, members in groups for pair in members]
    shadow.param_groups = [
        {**options, "params": [parameter for parameter, _ in members]} for options, members in groups
    ]
    shadow.state.clear()
    shadow.state.update({parameter: dict(state) for parameter, state in pairs if state})
    shadow.step()
    states = [dict(shadow.state[parameter]) for parameter, _ in pairs]
    shadow.state.clear()
    shadow.param_groups = []
    return states
