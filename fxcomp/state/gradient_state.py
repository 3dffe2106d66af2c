"""The state of gradients on one rank: what compression left out, momentum before compression, compressors' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.runtime.arena import Residuals, Velocities
from fxcomp.runtime.compressor_states import CompressorStates
from fxcomp.site import Site
from fxcomp.state.handover import Exchange, Holding, hand_over
from fxcomp.state.layouts import residual_layout, state_layout, velocity_layout
from fxcomp.state.memories import share_memories

Shapes = Mapping[str, Sequence[int]]
"""The shape of each parameter, by name."""


@dataclass(slots=True)
class GradientState:
    """Everything that a rank keeps of gradients from one step to the next, laid out for one plan."""

    residuals: Residuals
    compressor_states: CompressorStates
    velocities: Velocities | None = None
    """This rank's own momentum; None where it is the optimizer's."""
    owed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Flat values by parameter that no compressor feeds back any more: the next gradients bring them."""
    rates: dict[int, float] = field(default_factory=dict[int, float])
    """The learning rate of each parameter group that residuals have been scaled to."""

    @classmethod
    def fresh(cls, plan: Plan, shapes: Shapes, site: Site, feedback: ErrorFeedback, seed: int = 0) -> GradientState:
        """Start with nothing left out. Random compressors draw from `seed`, which all ranks share."""
        state = cls(
            Residuals(residual_layout(plan, site.cluster, site.rank, feedback), site.device),
            CompressorStates(state_layout(plan, shapes, site.cluster, site.rank), site.device, seed),
        )
        return replace(state, velocities=_velocities(plan, site)) if feedback.momentum else state

    @property
    def keeps_something(self) -> bool:
        """Steps leave something behind here: a residual, a velocity, what a compressor remembers."""
        return bool(self.residuals.layout) or self.velocities is not None or not self.compressor_states.is_empty

    def enter_stage(self, plan: Plan, site: Site) -> None:
        """Follow a plan of the same buckets, in whose units velocities go on."""
        if self.velocities is not None:
            before, self.velocities = self.velocities, _velocities(plan, site)
            self.velocities.take_over(before)

    def compressor_states_for(self, plan: Plan, shapes: Shapes, site: Site, seed: int) -> CompressorStates:
        """What compressors remember, for a plan with other parameters of the same ones. No rank asks another."""
        states = CompressorStates(state_layout(plan, shapes, site.cluster, site.rank), site.device, seed)
        if states.is_empty:
            return self.compressor_states
        states.take_over(self.compressor_states)
        return states

    def carry_to(self, fresh: GradientState, sizes: Mapping[str, int], exchange: Exchange) -> None:
        """Hand everything on to the fresh state of another plan, nothing owed is lost; every rank calls it.

        `sizes` has each parameter that gets a gradient, in the same order on all ranks.
        """
        ranks = exchange.peers.world_size
        residuals = Holding.of(ranks, self.residuals.slices, self.owed)
        fresh.owed = hand_over(residuals, fresh.residuals, sizes, exchange)
        if self.velocities is not None and fresh.velocities is not None:
            velocities = Holding.of(ranks, self.velocities.slices)
            hand_over(velocities, fresh.velocities, sizes, exchange, "velocities")
        if fresh.compressor_states.is_empty:  # a plan that is followed after a dense one goes on from them
            fresh.compressor_states = self.compressor_states
        else:
            before, now = self.compressor_states, fresh.compressor_states
            anew = exchange.attempt("going on with what compressors remember", lambda: now.take_over(before))
            share_memories(now, anew, exchange)
        fresh.rates = dict(self.rates)

    def owed_here(self, sizes: Mapping[str, int], ranks: int) -> dict[str, Tensor]:
        """Copy what this rank's next gradients must bring if this state goes on no more, flat, by parameter.

        What a gradient brings counts 1/ranks of the mean, so ranks need not talk about it. The parameters are the same
        on all of them.
        """
        owed = {name: value.clone() for name, value in self.owed.items()}
        for name in self.residuals.covered:
            whole = owed.setdefault(name, torch.zeros(sizes[name], device=self.residuals.device))
            for piece in self.residuals.slices.get(name, ()):
                piece.add_to(whole, times=ranks)
        return owed

    def also_owe(self, others: Mapping[str, Tensor]) -> None:
        """Let the next gradients bring what another state owed."""
        for name, value in others.items():
            known = self.owed.get(name)
            self.owed[name] = value if known is None else known + value

    def settle(self) -> None:
        """Forget what a step's gradients have delivered. It was no gradient of that step, so no velocity keeps it."""
        if self.velocities is not None:
            for name, value in self.owed.items():
                self.velocities.forget(name, value)
        self.owed.clear()

    def multiply(self, factor: float) -> None:
        """Follow gradients whose unit has changed: what is kept of them is so many times as large as before."""
        for pieces in self.residuals.slices.values():
            for piece in pieces:
                piece.values.mul_(factor)
        for value in self.owed.values():
            value.mul_(factor)

    def scale_to_rates(self, rates: Mapping[int, float], names: Mapping[int, Sequence[str]]) -> None:
        """Multiply what was left out by the learning rate then over the one now, so that it weighs what it weighed.

        `names` has the parameters of each parameter group. A rate of zero is passed over.
        """
        for group, rate in rates.items():
            if rate <= 0:
                continue
            before = self.rates.get(group, rate)
            self.rates[group] = rate
            if before == rate:
                continue
            for name in names.get(group, ()):
                for piece in self.residuals.slices.get(name, ()):
                    piece.values.mul_(before / rate)
                if name in self.owed:
                    self.owed[name].mul_(before / rate)


def _velocities(plan: Plan, site: Site) -> Velocities:
    return Velocities(velocity_layout(plan, site.cluster, site.rank), site.device)
