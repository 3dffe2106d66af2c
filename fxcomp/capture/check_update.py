"""Check a traced update against the class it was traced from: numbers that change later must not be constants of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from fxcomp import errors
from fxcomp.capture.optimizer import Owned, is_torchs, refused, state_tensors, with_live
from fxcomp.capture.probe import Draws, Habits, copied, probe_options, stand_in_for
from fxcomp.capture.shadow import plain_options, shadow_of, step_alone, unseen

KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Classes whose numbers are known to stay live where the graph uses them."""

_CHANGE = 0.75
"""Numbers are checked at this multiple of what they were traced with."""

_LATER = 7
"""Counters are checked so many steps later than they were traced."""

_RELATIVE = 1e-5
"""Of the largest element: traced arithmetic of numbers may round otherwise."""


def check_decisions(owner: Owned, decisions: Sequence[tuple[str, bool]]) -> None:
    """Refuse an update that compares a number with another one: the graph has one of the two ways."""
    for text, is_sign in decisions:
        if not is_sign and not is_torchs(owner.optimizer):
            raise refused(
                owner.optimizer,
                f"decides by a number that changes ({text}) while it updates {owner.name!r}, and a graph has one way",
                "Use torch.where with a tensor in the state",
            )


def check_update(traced: GraphModule, owner: Owned, habits: Habits, numbers: Mapping[str, float]) -> None:
    """Compare a traced update with the class's own where all numbers have changed. Raises UnsupportedOptimizer."""
    unused = _without_users(traced, len(numbers) + len(habits.counters))
    if (type(owner.optimizer) in KNOWN and not unused) or owner.parameter.is_meta:
        return
    with unseen():
        trial = _Trial(traced, owner, habits, numbers)
        if trial.agrees({key: value * _CHANGE for key, value in numbers.items()}, _LATER):
            return
        if habits.counters and not trial.agrees(numbers, _LATER):
            raise refused(
                owner.optimizer,
                f"was traced with {', '.join(map(repr, habits.counters))} of the state of {owner.name!r} as a constant",
                "Keep it in a tensor, or use it without float() and math functions: x ** 0.5 is followed",
            )
        for key, value in numbers.items():
            if not trial.agrees({**numbers, key: value * _CHANGE}, 0):
                raise errors.UnsupportedOptimizer(
                    f"the update of {owner.name!r} was traced with {key} of parameter group {owner.group} as a"
                    " constant, so that a schedule would be ignored.\n  Let the optimizer's step use it as it is,"
                    " without float() or math functions."
                )
        raise refused(owner.optimizer, f"does something to {owner.name!r} that its trace does not")


def _without_users(traced: GraphModule, last: int) -> list[str]:
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return [node.name for node in placeholders[len(placeholders) - last :] if not node.users]


class _Trial:
    """A traced update and the class's own, from the same state."""

    def __init__(self, traced: GraphModule, owner: Owned, habits: Habits, numbers: Mapping[str, float]):
        self._traced, self._owner, self._habits, self._numbers = traced, owner, habits, numbers
        self._shadow = shadow_of(owner.optimizer)
        draw = Draws(owner.parameter)
        self._gradient = draw()
        self._value, self._state = draw(0.1), copied(owner.state)
        for _ in range(2):  # of fresh states nothing can be told: they are zero
            self._value, self._state = self._own(probe_options(owner), self._state, draw())

    def agrees(self, numbers: Mapping[str, float], later: int) -> bool:
        """Compare the two with other numbers, and so many steps later."""
        counters = self._habits.counters
        state = copied(self._state)
        state |= {key: state[key] + later * growth for key, growth in counters.items()}
        given = copied(state)
        value = self._value.clone()
        counts = [float(given[key]) for key in counters]
        live = [numbers[key] for key in self._numbers]
        Interpreter(self._traced).run(
            value, self._gradient.clone(), *state_tensors(given).values(), *live, *counts, enable_io_processing=False
        )
        options = plain_options(with_live(self._owner.options, numbers))
        expected, own = self._own(options, state, self._gradient)
        tensors = state_tensors(own)
        return _are_close(value, expected) and all(_are_close(given[key], tensors[key]) for key in tensors)

    def _own(
        self, options: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        stand_in = stand_in_for(self._value, gradient)
        after = step_alone(self._shadow, stand_in, options, copied(state))
        return stand_in.detach(), after


def _are_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = float(other.abs().max()) if other.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=_RELATIVE, atol=_RELATIVE * largest, equal_nan=True))
