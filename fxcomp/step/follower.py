"""Plan that steps follow, or several racing plans, each with its gradient state (residuals, compressor states).

carry_to            follow another decision and convert the state to its plan; ranks communicate
line_up             start a race of the plan in force with other plans
take_turn           follow one of the racing plans, with its own state; no communication
settle_on           end the race; the plan that stays receives the residuals of the others
state_dict, load    save and load the state; the number of ranks and the plan may change in between
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
from fxcomp.state.fields import SCALE
from fxcomp.state.gradient_state import GradientState, Shapes, residual_layout, state_layout
from fxcomp.state.handover import Sharing
from fxcomp.state.inputs import Inputs
from fxcomp.state.saved_state import Given, read_together, restore, scale_of, state_dict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained parameters, and the data for laying out gradient state under any plan."""

    site: Site
    shapes: Shapes
    names: Sequence[str]
    """Parameters with a gradient, in the same order on all ranks."""
    feedback: ErrorFeedback
    seed: int

    @property
    def sizes(self) -> dict[str, int]:
        return {name: prod(shape) for name, shape in self.shapes.items()}

    def fresh(self, plan: Plan) -> GradientState:
        """Return a state without residuals."""
        return GradientState.fresh(plan, self.shapes, self.site, self.feedback, self.seed)

    def keeps_something(self, plan: Plan) -> bool:
        """Return True if the plan keeps a residual or a compressor state for the next step."""
        return bool(self.residual_layout(plan) or state_layout(plan, self.shapes, self.site.cluster, self.site.rank))

    def residual_layout(self, plan: Plan) -> dict[Key, SlotLayout]:
        return residual_layout(plan, self.site.cluster, self.site.rank, self.feedback, self.shapes)


@dataclass(slots=True, eq=False)
class Followed:
    decision: Decision
    number: int
    """Key of the plan's programs in `Programs`."""
    state: GradientState | None = None
    """Gradient state; None before the plan's first turn in a race."""
    scale: float | Tensor = 1.0
    """Loss scale that the residuals contain."""

    def follow_scale(self, scale: float | Tensor) -> None:
        """Rescale the residuals to another loss scale, without reading a tensor."""
        is_known = not isinstance(scale, Tensor) and not isinstance(self.scale, Tensor)
        if self.state is not None and not (is_known and scale == self.scale):
            self.state.multiply(scale / self.scale)
        self.scale = scale


class Follower:
    def __init__(self, trained: Trained, decision: Decision):
        self.trained, self._site = trained, trained.site
        self._numbers = itertools.count()
        self.now = self._entered(decision, trained.fresh(decision.plan))
        self.racing: tuple[Followed, ...] = ()
        """Racing plans; the first one was in force before the race. Empty without a race."""

    @property
    def decision(self) -> Decision:
        return self.now.decision

    @property
    def state(self) -> GradientState:
        assert self.now.state is not None, "the plan in force has a state"
        return self.now.state

    @property
    def lasting(self) -> Followed:
        """Plan in force; during a race, the plan that was in force before the race."""
        return self.racing[0] if self.racing else self.now

    def _entered(self, decision: Decision, state: GradientState | None = None) -> Followed:
        return Followed(decision, next(self._numbers), state)

    def sharing(self, topic: str) -> Sharing:
        return Sharing(self._site.ranks, self._site.sum_over_ranks, topic, self._site.device)

    @property
    def trained_sizes(self) -> dict[str, int]:
        """Number of elements of each parameter with a gradient, in equal order on all ranks."""
        sizes = self.trained.sizes
        return {name: sizes[name] for name in self.trained.names}

    def tell(self, note: str) -> None:
        self.now.decision = replace(self.decision, notes=(*self.decision.notes, note))

    def carry_to(
        self, decision: Decision, topic: str, make: Callable[[], T], units: Callable[[], Mapping[str, Tensor]] = dict
    ) -> T:
        """Follow another decision; residuals are kept. Every rank calls it.

        `make` prepares the change; its result is returned. `units` returns factors, by parameter, that convert
        residuals between gradients and momenta. If `make` or `units` raises on one rank, all ranks keep the old
        decision.
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
        """Convert the state to the layout of a warm-up stage. Every rank calls it.

        `units` is as in `carry_to`. Without `units`, a change of layout drops the residuals.
        """
        if units is not None and (self.state.owed or not self.state.residuals.is_zero):  # synchronizes with the device
            self.state.change_unit(units())
        if (fresh := self._laid_out_for(stage)) is not None:
            if units is not None:
                self.state.carry_to(fresh, self.trained_sizes, self.sharing("the next stage of the warm-up"))
            self.now.state = fresh

    def _laid_out_for(self, stage: Plan) -> GradientState | None:
        """Return a fresh state if the stage's layout differs. A stage without state uses the final plan's layout."""
        plan = stage if self.trained.keeps_something(stage) else self.decision.plan
        lies_alike = self.trained.residual_layout(plan) == self.state.residuals.layout
        return None if lies_alike else self.trained.fresh(plan)

    # Taking turns

    def line_up(self, plans: Sequence[Plan]) -> None:
        """Start a race. Every rank calls it."""
        assert not self.racing, "one race at a time"
        assert all(set(each.moved) == set(self.decision.plan.moved) for each in plans), "residuals have one unit"
        for plan in plans:
            self._site.make_groups_for(plan)
        others = [self._entered(replace(self.decision, plan=plan)) for plan in plans]
        self.racing = (self.now, *others)

    def take_turn(self, number: int) -> None:
        """Follow a racing plan by its index in `racing`; the others keep their states."""
        self.now = self.racing[number]
        if self.now.state is None:
            self.now.state = self.trained.fresh(self.decision.plan)

    def settle_on(self, number: int) -> tuple[Followed, ...]:
        """End the race with one plan. Return the other plans, whose residuals are added to the next gradients."""
        self.take_turn(number)
        others = tuple(each for each in self.racing if each is not self.now)
        self._take_over(self.state, self.now, others)
        self.racing = ()
        return others

    def start_over(self) -> None:
        """Follow the plan from before the race, and drop the others' residuals. Used before a state is loaded."""
        if self.racing:
            self.take_turn(0)
            for other in self.racing[1:]:
                other.state = None

    def scale_to_rates(self, inputs: Inputs) -> None:
        """Rescale all residuals to the current learning rates, so that they can be added."""
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
        """Return this rank's state under a plan, with the residuals of racing plans."""
        assert under.state is not None, "it has been followed"
        whole = replace(under.state, owed=dict(under.state.owed))
        self._take_over(whole, under, [each for each in self.racing if each is not under])
        saved = state_dict(whole, plan, steps, self._site.rank, self._site.ranks.world_size)
        return {**saved, SCALE: float(under.scale)}

    def load(self, given: Given, enter: Callable[[int], object] = lambda _: None) -> int | None:
        """Load saved states and end a race. Every rank calls it. Raises BadState.

        Returns the number of steps that the saved job had run, or None if no rank has a saved state. Calls `enter` with
        this number before anything is restored.
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
