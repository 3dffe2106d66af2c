"""Own the plan that steps follow, or a few that take turns, each with its state of gradients.

carry_to            another decision: all that is kept changes hands           every rank talks
line_up             other plans, to take turns with the one in force
take_turn           one of them, with a state of its own                       no rank talks
settle_on           the one that stays: it takes over what others owe
state_dict, load    on any ranks, under any plan
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

from torch import Tensor

from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.runtime.arena import Key, SlotLayout
from fxcomp.search.decision import Decision
from fxcomp.site import Site
from fxcomp.state.checkpoint import SCALE
from fxcomp.state.gradient_state import GradientState, Shapes, residual_layout, state_layout
from fxcomp.state.handover import Sharing
from fxcomp.state.inputs import Inputs
from fxcomp.state.saved_state import Given, read_together, restore, scale_of, state_dict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trained:
    """The parameters that gradients are of, whatever the plan: states are laid out for it."""

    site: Site
    shapes: Shapes
    """Of all parameters."""
    names: Sequence[str]
    """Those that get a gradient, in an order that all ranks share."""
    feedback: ErrorFeedback
    seed: int

    @property
    def sizes(self) -> dict[str, int]:
        """The elements of all parameters."""
        return {name: prod(shape) for name, shape in self.shapes.items()}

    def fresh(self, plan: Plan) -> GradientState:
        """Make a state under a plan, with nothing left out."""
        return GradientState.fresh(plan, self.shapes, self.site, self.feedback, self.seed)

    def keeps_something(self, plan: Plan) -> bool:
        """Return whether a plan keeps something for the next step: a residual, or what a compressor remembers."""
        return bool(self.residual_layout(plan) or state_layout(plan, self.shapes, self.site.cluster, self.site.rank))

    def residual_layout(self, plan: Plan) -> dict[Key, SlotLayout]:
        """Lay out the residuals of a plan."""
        return residual_layout(plan, self.site.cluster, self.site.rank, self.feedback, self.shapes)


@dataclass(slots=True, eq=False)
class Followed:
    """A plan that steps follow, and the state of gradients under it."""

    decision: Decision
    number: int
    """Its programs are kept by it."""
    state: GradientState | None = None
    """None before its first turn."""
    scale: float | Tensor = 1.0
    """The factor of the loss that what is kept is in the unit of."""

    def follow_scale(self, scale: float | Tensor) -> None:
        """Let what is kept be in the unit of another factor of the loss. One on a device is not read."""
        is_known = not isinstance(scale, Tensor) and not isinstance(self.scale, Tensor)
        if self.state is not None and not (is_known and scale == self.scale):
            self.state.multiply(scale / self.scale)
        self.scale = scale


class Follower:
    """The plan that is followed, with its state, and those that take turns with it."""

    def __init__(self, trained: Trained, decision: Decision, number: int = 0):
        self.trained, self._site = trained, trained.site
        self._numbers = itertools.count(number)
        self.now = self._entered(decision, trained.fresh(decision.plan))
        """The plan that is followed now, and its state."""
        self.racing: tuple[Followed, ...] = ()
        """The plans that take turns, the one that was in force first; empty if none do."""

    @property
    def decision(self) -> Decision:
        return self.now.decision

    @property
    def state(self) -> GradientState:
        assert self.now.state is not None, "what is followed has a state"
        return self.now.state

    @property
    def lasting(self) -> Followed:
        """The plan that is followed; in a race the one of before it, as long as nothing has been decided."""
        return self.racing[0] if self.racing else self.now

    def _entered(self, decision: Decision, state: GradientState | None = None) -> Followed:
        return Followed(decision, next(self._numbers), state)

    def sharing(self, topic: str) -> Sharing:
        """Talk with all ranks about state that changes hands."""
        return Sharing(self._site.ranks, self._site.sum_over_ranks, topic, self._site.device)

    @property
    def trained_sizes(self) -> dict[str, int]:
        """The elements of each parameter that gets a gradient, in the same order on all ranks."""
        sizes = self.trained.sizes
        return {name: sizes[name] for name in self.trained.names}

    def tell(self, note: str) -> None:
        """Add to what a report says of the decision."""
        self.now.decision = replace(self.decision, notes=(*self.decision.notes, note))

    def carry_to(
        self, decision: Decision, topic: str, make: Callable[[], T], units: Callable[[], Mapping[str, Tensor]] = dict
    ) -> T:
        """Follow another decision from now on; nothing that was left out is lost. Every rank calls it.

        Returns what `make` makes for it; `units` makes the factors of what has another unit then. If that fails on one
        rank, all of them go on as they were.
        """
        fresh = self.trained.fresh
        made, state, factors = self._site.ranks.attempt(topic, lambda: (make(), fresh(decision.plan), units()))
        self.state.change_unit(factors)
        self.state.carry_to(state, self.trained_sizes, self.sharing("changing plans"))
        self.racing, self.now = (), replace(self._entered(decision, state), scale=self.now.scale)
        self._site.make_groups_for(decision.plan)
        return made

    # The stages of a warm-up

    def enter_stage(self, stage: Plan, units: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        """Lay the state out for a stage, in its units, and lose nothing; every rank calls it.

        Without `units` nothing goes on into it: a job starts, or its state is loaded.
        """
        if units is not None and self.state.owes_something:
            self.state.change_unit(units())
        if (fresh := self._laid_out_for(stage)) is not None:
            if units is not None:
                self.state.carry_to(fresh, self.trained_sizes, self.sharing("the next stage of the warm-up"))
            self.now.state = fresh

    def _laid_out_for(self, stage: Plan) -> GradientState | None:
        """Make a state for a stage, where it lies otherwise than that of now; one that keeps nothing has the last's."""
        plan = stage if self.trained.keeps_something(stage) else self.decision.plan
        lies_alike = self.trained.residual_layout(plan) == self.state.residuals.layout
        return None if lies_alike else self.trained.fresh(plan)

    # Taking turns

    def line_up(self, plans: Sequence[Plan]) -> None:
        """Let plans take turns with the one in force; every rank calls it."""
        assert not self.racing, "one race at a time"
        assert all(set(each.moved) == set(self.decision.plan.moved) for each in plans), "residuals have one unit"
        for plan in plans:
            self._site.make_groups_for(plan)
        others = [self._entered(replace(self.decision, plan=plan)) for plan in plans]
        self.racing = (self.now, *others)

    def take_turn(self, number: int) -> None:
        """Follow a plan that was lined up; the states of the others stay where they are. Nothing is sent."""
        self.now = self.racing[number]
        if self.now.state is None:
            self.now.state = self.trained.fresh(self.decision.plan)

    def settle_on(self, number: int) -> tuple[Followed, ...]:
        """End the race on a plan that stays; the others' residuals go out with the next gradients.

        Returns the others.
        """
        self.take_turn(number)
        others = tuple(each for each in self.racing if each is not self.now)
        self._take_over(self.state, self.now, others)
        self.racing = ()
        return others

    def start_over(self) -> None:
        """Follow the plan that was in force again; forget the others' residuals, because a state is loaded."""
        if self.racing:
            self.take_turn(0)
            for other in self.racing[1:]:
                other.state = None

    def scale_to_rates(self, inputs: Inputs) -> None:
        """Let all that is kept be in the learning rates of now: what states owe is added up only in the same ones."""
        for each in self.racing or (self.now,):
            if each.state is not None and self.trained.feedback.scale_with_lr:
                each.state.scale_to_rates(inputs.rates(), inputs.names_by_group())

    def _take_over(self, state: GradientState, into: Followed, others: Sequence[Followed]) -> None:
        for other in others:
            if other.state is not None:
                other.follow_scale(into.scale)
                state.also_owe(other.state.owed_here(self.trained.sizes, self._site.ranks.world_size))

    # State

    def state_dict(self, under: Followed, plan: Plan, steps: int) -> dict[str, Any]:
        """Copy this rank's state under a plan, and its residuals under the plans that race with it."""
        assert under.state is not None, "it has been followed"
        whole = replace(under.state, owed=dict(under.state.owed))
        self._take_over(whole, under, [each for each in self.racing if each is not under])
        saved = state_dict(whole, plan, steps, self._site.rank, self._site.ranks.world_size)
        return {**saved, SCALE: float(under.scale)}

    def load(self, given: Given, enter: Callable[[int], object] = lambda _: None) -> int | None:
        """Take back saved states; every rank calls it.

        Calls `enter` with the number of steps that had been run before anything is taken back, and returns it; None if
        no rank was given anything. A race starts over. Raises BadState.
        """
        sharing = self.sharing("load_state_dict")
        agreed = read_together(given, self.trained.sizes, sharing)
        if agreed is None:
            return None
        self.start_over()
        enter(agreed.steps)
        restore(agreed, self.state, self.trained_sizes, sharing)
        scales = sharing.gather("the scale of the loss", scale_of(given))
        self.now.scale = next((scale for scale in scales if scale is not None), 1.0)
        return agreed.steps
