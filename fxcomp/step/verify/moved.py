"""Say what an update should do of which ranks exchange the momentum, by the user's own optimizer and plain formulas.

    x = m(g) / d              what a rank sends: the mean that its optimizer makes of its own gradient
    m <- d M                  what the shared mean M becomes
    g = (d M - m(0)) / (m(1) - m(0))    the gradient of which the optimizer would make it: m is linear
    v <- v growth             d stays what it is

So the user's optimizer, given that gradient and a second moment that it makes v of, does to a copy what the emitted
step should do. Source: docs/where_the_mean_stands.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxcomp.capture.optimizer import Owned
from fxcomp.graph.info import info
from fxcomp.graph.moments import updates_of
from fxcomp.plan.plan import Plan

State = Mapping[str, Any]
StepOwn = Callable[[Owned, State, Mapping[str, Tensor], Tensor], dict[str, Any]]
"""Lets the user's optimizer update a copy: of whom, its state, the tensors to begin with, a gradient."""


@dataclass(frozen=True, slots=True)
class MovedUpdate:
    """The keys of a parameter's state whose mean is exchanged, and whose second moment is frozen."""

    mean: str
    magnitude: str | None

    @property
    def is_known(self) -> bool:
        """Return whether a plain formula says what the mean is divided by."""
        return self.magnitude in (None, "exp_avg_sq")

    def expected_mean(self, step_own: StepOwn, owner: Owned, before: Mapping[str, Tensor], gradient: Tensor) -> Tensor:
        """Return the mean that a rank makes of its own gradient."""
        return step_own(owner, owner.state, before, gradient)[self.mean]

    def divisor(self, owner: Owned, before: Mapping[str, Tensor]) -> Tensor | None:
        """Return what the mean is divided by before it is sent: Adam's sqrt(v / (1 - beta2^t)) + eps."""
        if self.magnitude is None:
            return None
        return (before[self.magnitude] / _correction(owner, before, 0)).sqrt() + owner.options["eps"]

    def expected(self, step_own: StepOwn, owner: Owned, before: Mapping[str, Tensor], shared: Tensor) -> dict[str, Any]:
        """Return a parameter, under the key "", and its state after an update that gets the shared mean."""
        state, divisor = owner.state, self.divisor(owner, before)
        target = shared if divisor is None else shared * divisor
        nothing, ones = torch.zeros_like(shared), torch.ones_like(shared)
        of_nothing = self.expected_mean(step_own, owner, before, nothing)
        slope = self.expected_mean(step_own, owner, before, ones) - of_nothing
        gradient = (target - of_nothing) / slope
        if self.magnitude is None:
            return step_own(owner, state, before, gradient)
        frozen = before[self.magnitude] * (_correction(owner, before, 1) / _correction(owner, before, 0))
        squares = step_own(owner, state, {**before, self.magnitude: nothing}, gradient)[self.magnitude]
        kept = step_own(owner, state, {**before, self.magnitude: ones}, nothing)[self.magnitude]
        found = step_own(owner, state, {**before, self.magnitude: (frozen - squares) / kept}, gradient)
        return {**found, self.magnitude: frozen}


def moved_updates(graph: GraphModule, plan: Plan) -> dict[str, MovedUpdate]:
    """Find the parameters of which ranks exchange the momentum by a plan."""
    if not plan.moves_exchange:
        return {}
    found: dict[str, MovedUpdate] = {}
    updates = updates_of(graph)
    for name in plan.moved:
        moment = updates[name].moment()
        magnitude = moment.magnitude and _key(moment.magnitude.state)
        found[name] = MovedUpdate(_key(moment.state), magnitude)
    return found


def _key(state: torch.fx.Node) -> str:
    source = info(state).source
    assert source is not None, "a state is an input"
    return source.key


def _correction(owner: Owned, before: Mapping[str, Tensor], later: int) -> float:
    """Return 1 - beta2^t, for the steps that an update has counted so far, and some."""
    return 1 - owner.options["betas"][1] ** (float(before["step"]) + later)
