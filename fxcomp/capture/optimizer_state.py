"""Create an optimizer's state before its first step, with the values that the first step would start from.

`habits` maps group numbers to the rules by which a step initializes and updates state (`probe.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxcomp.capture.optimizer import FreshState, Owned, fresh_states, is_kept, refused
from fxcomp.capture.probe import Habits, copied, first_step, same
from fxcomp.capture.shadow import plain_options, shadow_of, unseen


def materialize_state(owned: Sequence[Owned], habits: Mapping[int, Habits]) -> None:
    """Create missing state, and record it in `fresh_states`.

    A copied optimizer's first step yields the values, once for all similar parameters.
    """
    missing = [owner for owner in owned if not is_kept(owner.state)]
    for owner in missing:
        if not habits[owner.group].is_like_others:
            raise refused(
                owner.optimizer,
                f"treats {owner.name!r} in its first step as in no other, so that the state before it is not known",
                "Take the first step eagerly (loss.backward(), optimizer.step()), and call compile_step then",
            )
    for owner, begun in zip(missing, _beginnings(missing, habits), strict=True):
        owner.optimizer.state[owner.parameter] = state = copied(begun)
        if is_kept(state):
            fresh_states(owner.optimizer)[owner.parameter] = FreshState(state, begun)


def renew_state(owned: Sequence[Owned], habits: Mapping[int, Habits]) -> None:
    """Recompute fresh states in place, because parameters or options may have changed and states may depend on them."""
    for owner, begun in zip(owned, _beginnings(owned, habits), strict=True):
        for key, value in owner.state.items():
            if isinstance(value, Tensor):
                value.copy_(begun[key])
        fresh_states(owner.optimizer)[owner.parameter] = FreshState(owner.state, begun)


def is_fresh(owner: Owned) -> bool:
    """Return whether a parameter's state still has the values that `materialize_state` gave it."""
    known = fresh_states(owner.optimizer).get(owner.parameter)
    if known is None or known.state is not owner.state:
        return False
    return all(same(value, owner.state.get(key)) for key, value in known.begun.items())


def may_change(state: Mapping[str, Any]) -> bool:
    """Return whether initial `state` is not zero, so that it may depend on parameters or options."""
    return any(bool(value.any()) for value in state.values() if isinstance(value, Tensor))


def _beginnings(owned: Sequence[Owned], habits: Mapping[int, Habits]) -> list[dict[str, Any]]:
    shadows = {id(owner.optimizer): owner.optimizer for owner in owned}
    shadows = {key: shadow_of(optimizer) for key, optimizer in shadows.items()}
    of_likeness: dict[Any, dict[str, Any]] = {}
    made: list[dict[str, Any]] = []
    with unseen():
        for owner in owned:
            parameter, known = owner.parameter.detach(), habits[owner.group]
            likeness = (owner.group, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if likeness not in of_likeness or known.follows_parameter:
                value = parameter if known.follows_parameter else torch.zeros_like(parameter)
                # torch has no meta kernels for some fused updates; unfused ones make the same state.
                options = plain_options(owner.options) if parameter.is_meta else owner.options
                step = first_step(shadows[id(owner.optimizer)], options, value, torch.zeros_like(parameter))
                of_likeness[likeness] = known.beginning(step)
            made.append(of_likeness[likeness])
    return made
