"""Say what an update should do of which ranks exchange the momentum, by the user's own optimizer and plain formulas.

    x = m(g) / d              what a rank sends: the mean that its optimizer makes of its own gradient
    m <- d M                  what the shared mean M becomes, cut off at LARGEST_MEAN
    g = (d M - m(0)) / (m(1) - m(0))    the gradient of which the optimizer would make it: m is linear
    v <- v growth             d stays what it is

So the user's optimizer, given that gradient and a second moment that it makes v of, does to a copy what the emitted
step should do. Source: docs/where_the_mean_stands.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxcomp.capture.optimizer import Owned
from fxcomp.graph.moments import LARGEST_MEAN
from fxcomp.state.moved_state import MovedState, correction

State = Mapping[str, Any]
StepOwn = Callable[[Owned, State, Mapping[str, Tensor], Tensor], dict[str, Any]]
"""Lets the user's optimizer update a copy: of whom, its state, the tensors to begin with, a gradient."""


def expected_mean(
    moved: MovedState, step_own: StepOwn, owner: Owned, before: Mapping[str, Tensor], gradient: Tensor
) -> Tensor:
    """Return the mean that a rank makes of its own gradient."""
    return step_own(owner, owner.state, before, gradient)[moved.mean]


def expected_update(
    moved: MovedState, step_own: StepOwn, owner: Owned, before: Mapping[str, Tensor], shared: Tensor
) -> dict[str, Any]:
    """Return a parameter, under the key "", and its state after an update that gets the shared mean.

    In double precision: the squares of a gradient that jumps are far larger than the second moment that stays.
    """
    given, state, key = before, owner.state, moved.magnitude
    before = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    shared = shared.double()
    target = shared if key is None else shared.clamp(-LARGEST_MEAN, LARGEST_MEAN) * moved.divisor(owner, before[key])
    nothing, ones = torch.zeros_like(shared), torch.ones_like(shared)
    of_nothing = expected_mean(moved, step_own, owner, before, nothing)
    slope = expected_mean(moved, step_own, owner, before, ones) - of_nothing
    gradient = (target - of_nothing) / slope
    if key is None:
        return _like(given, step_own(owner, state, before, gradient))
    frozen = before[key] * (correction(owner, 1) / correction(owner))
    squares = step_own(owner, state, {**before, key: nothing}, gradient)[key]
    kept = step_own(owner, state, {**before, key: ones}, gradient)[key] - squares
    found = step_own(owner, state, {**before, key: (frozen - squares) / kept}, gradient)
    return _like(given, {**found, key: frozen})


def _like(given: Mapping[str, Tensor], found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to(given[name].dtype) if name in given else value for name, value in found.items()}
