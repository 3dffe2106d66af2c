"""Read the optimizer's state of a parameter whose mean ranks exchange, by the formula of its divisor.

m     the shared mean of gradients                     `exp_avg`, `momentum_buffer`
d     sqrt(v / (1 - beta2^t)) + eps, or 1              v is the second moment, `exp_avg_sq`
s     the part of a gradient that m takes in           1 - beta1; 1 for SGD without dampening
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxcomp.capture.optimizer import Owned
from fxcomp.capture.shadow import plain_options, shadow_of, step_alone, unseen
from fxcomp.graph.info import info
from fxcomp.graph.moments import updates_of
from fxcomp.plan.plan import Plan

_AT_ONCE = 1 << 20
"""Elements that are looked at in one go: what is made beside the state stays small."""


@dataclass(frozen=True, slots=True)
class MovedState:
    """The keys of a parameter's state whose mean is exchanged, and whose second moment is frozen."""

    mean: str
    magnitude: str | None

    @property
    def is_known(self) -> bool:
        """Return whether a plain formula says what the mean is divided by."""
        return self.magnitude in (None, "exp_avg_sq")

    def divisor(self, owner: Owned, magnitude: Tensor) -> Tensor:
        """Return what the mean is divided by before it is sent: Adam's sqrt(v / (1 - beta2^t)) + eps."""
        return (magnitude / correction(owner)).sqrt() + owner.options["eps"]

    def energy(self, owner: Owned) -> Tensor:
        """Return the sum of the squares of the shared mean, in units of what it is divided by."""
        assert self.magnitude is not None, "there is something to divide by"
        mean, magnitude = (owner.state[key].reshape(-1).split(_AT_ONCE) for key in (self.mean, self.magnitude))
        parts = [(m / self.divisor(owner, v)).square().sum() for m, v in zip(mean, magnitude, strict=True)]
        return torch.stack(parts).sum()

    def slope(self, owner: Owned) -> float:
        """Ask the user's optimizer for how much of a gradient it takes into its mean."""
        found: list[Tensor] = []
        with unseen():
            for gradient in (0.0, 1.0):
                stand_in = nn.Parameter(owner.parameter.detach().clone())
                stand_in.grad = torch.full_like(stand_in, gradient)
                state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in owner.state.items()}
                state[self.mean].zero_()
                made = step_alone(shadow_of(owner.optimizer), stand_in, plain_options(owner.options), state)
                found.append(made[self.mean].reshape(-1)[:1])
        return float((found[1] - found[0]).sum())

    def to_gradients(self, owner: Owned) -> Tensor:
        """Return what a residual of the exchanged mean is multiplied by to be one of gradients: d / s, flat."""
        slope = self.slope(owner)
        if self.magnitude is None:
            return torch.ones_like(owner.state[self.mean]).reshape(-1) / slope
        return self.divisor(owner, owner.state[self.magnitude]).reshape(-1) / slope


def moved_states(graph: GraphModule, plan: Plan) -> dict[str, MovedState]:
    """Find the parameters of which ranks exchange the momentum by a plan."""
    if not plan.moves_exchange:
        return {}
    found: dict[str, MovedState] = {}
    updates = updates_of(graph)
    for name in plan.moved:
        moment = updates[name].moment()
        found[name] = MovedState(_key(moment.state), moment.magnitude and _key(moment.magnitude.state))
    return found


def _key(state: Node) -> str:
    source = info(state).source
    assert source is not None, "a state is an input"
    return source.key


def correction(owner: Owned, later: int = 0) -> float:
    """Return Adam's 1 - beta2^t, for the steps that an update has counted so far, and some."""
    return 1 - owner.options["betas"][1] ** (float(owner.state["step"]) + later)
