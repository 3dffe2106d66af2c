"""Optimizer state for exchanging momenta, and its part of saved states.

    warm-up ─► freeze: second moments stay fixed, clamped from below ─► thaw, if an energy is large: gradients again
      ▲  │                                                                    │
      │  └─ while a parameter has too few updates                             │
      └───────────────────────────────────────────────────────────────────────┘ longer each time

Residuals change unit at the freeze, and back at the thaw. A residual e of `m / d` equals a gradient residual `d e / s`:

    m    shared mean of gradients                     `exp_avg`, `momentum_buffer`
    d    sqrt(v / (1 - beta2^t)) + eps, or 1          v is the second moment, `exp_avg_sq`
    s    weight of a gradient in m                    1 - beta1; 1 for SGD without dampening

The energy of a parameter is the mean of (m / d)^2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxcomp.capture.optimizer import Owned
from fxcomp.capture.shadow import plain_options, shadow_of, step_alone, unseen
from fxcomp.errors import BadState
from fxcomp.graph.info import info
from fxcomp.graph.moments import updates_of
from fxcomp.plan.compress import LEAST_WARM
from fxcomp.plan.plan import Plan
from fxcomp.ranks import Ranks
from fxcomp.state.fields import FREEZES_AT, MOVED, THAWED, THAWS
from fxcomp.state.saved_state import Given, states_given

LEAST_MAGNITUDE = 0.01
"""Lower bound of a frozen second moment, relative to its tensor's mean. With 0.01, an element without earlier gradients
moves at most about ten times as far as other elements.
"""

_AT_ONCE = 1 << 20
"""Elements per chunk, which limits temporary memory."""


@dataclass(frozen=True, slots=True)
class MovedState:
    """Keys in a parameter's optimizer state: the exchanged mean m, and the frozen second moment, if any."""

    mean: str
    magnitude: str | None

    @property
    def is_known(self) -> bool:
        return self.magnitude in (None, "exp_avg_sq")

    def divisor(self, owner: Owned, magnitude: Tensor) -> Tensor:
        """Return d, Adam's sqrt(v / (1 - beta2^t)) + eps."""
        return (magnitude / correction(owner)).sqrt() + owner.options["eps"]

    def energy(self, owner: Owned) -> Tensor:
        """Return the sum of (m / d)^2 over all elements."""
        assert self.magnitude is not None, "there is something to divide by"
        mean, magnitude = (owner.state[key].reshape(-1).split(_AT_ONCE) for key in (self.mean, self.magnitude))
        parts = [(m / self.divisor(owner, v)).square().sum() for m, v in zip(mean, magnitude, strict=True)]
        return torch.stack(parts).sum()

    def slope(self, owner: Owned) -> float:
        """Measure s, a gradient's weight in m, by running the optimizer."""
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
        """Return d / s, flat, the factor from a residual of the exchanged mean to a gradient residual."""
        slope = self.slope(owner)
        if self.magnitude is None:
            return torch.ones_like(owner.state[self.mean]).reshape(-1) / slope
        return self.divisor(owner, owner.state[self.magnitude]).reshape(-1) / slope


def moved_states(graph: GraphModule, plan: Plan) -> dict[str, MovedState]:
    """Return the state keys of the parameters whose momentum a plan exchanges."""
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
    """Return Adam's 1 - beta2^t, `later` steps from now."""
    return 1 - owner.options["betas"][1] ** (float(owner.state["step"]) + later)


class Momenta:
    """Second moments of a job: frozen before the first step that exchanges momenta, until a thaw."""

    def __init__(self, graph: GraphModule, owners: Mapping[str, Owned], stages: Mapping[int, Plan]) -> None:
        self._owners = owners
        self._states_by = lru_cache(2)(partial(moved_states, graph))
        """Cached `moved_states` of this graph, by plan."""
        self._planned_for = next((step for step, plan in stages.items() if plan.moves_exchange), None)
        self.freezes_at = self._planned_for
        """First step that exchanges momenta after the last or next freeze. None if ranks exchange only gradients."""
        self._is_frozen = False
        self._goes_on = False
        self.is_thawed = False
        """True while ranks exchange gradients after a thaw."""
        self._thaws = 0

    def resume(self, steps: int) -> None:
        """Continue after `steps` steps of the job, which may be more or fewer than this object has seen."""
        self._goes_on = self._is_frozen = self.freezes_at is not None and steps > self.freezes_at

    def take_over(self, saved: SavedMomenta) -> None:
        """Continue from a saved state's number of thaws and planned freeze."""
        if self._planned_for is not None:
            is_planned = saved.freezes_at is None and not saved.is_thawed
            self._thaws, self.freezes_at = saved.thaws, self._planned_for if is_planned else saved.freezes_at

    def is_due(self, step: int) -> bool:
        return step == self.freezes_at and not self._is_frozen

    def lacking(self, plan: Plan) -> tuple[str, int, int] | None:
        """Return (name, updates, updates needed for a freeze) of the parameter with the fewest updates, if too few.

        Steps that were skipped or did not use the parameter do not count.
        """
        needed = min(LEAST_WARM, self._planned_for or 0)
        moved = (name for name, each in self._states_by(plan).items() if each.magnitude is not None)
        updates = {name: int(self._owners[name].state.get("step", 0)) for name in moved}
        name = min(updates, key=updates.__getitem__, default=None)
        return (name, updates[name], needed) if name is not None and updates[name] < needed else None

    def before_step(self, step: int, plan: Plan) -> None:
        """Freeze second moments if due. Loading does not freeze, because the optimizer's state may be loaded later."""
        if self.is_due(step):
            freeze_magnitudes(self._states_by(plan), self._owners)
            self._is_frozen = True
        elif self._goes_on:
            self._goes_on = False
            self._check_is_loaded(plan, step)

    def _check_is_loaded(self, plan: Plan, step: int) -> None:
        moved = self._states_by(plan).items()
        found = [self._owners[name].state.get(each.magnitude) for name, each in moved if each.magnitude is not None]
        if found and not any(value is not None and bool(value.any()) for value in found):
            raise BadState(
                f"the job goes on at step {step}, where ranks exchange momenta in units of a frozen second moment, and"
                " the optimizer has none: it has not taken a step, and no state of it was loaded.\n"
                "  Load the optimizer.state_dict() that was saved with the step's state, before the step is called."
            )

    def energies(self, plan: Plan) -> dict[str, float]:
        """Return the energy of each parameter whose momentum is exchanged.

        The energy is about the mean of (update / learning rate)^2. It exceeds 1 if the frozen moment is too small.
        """
        moved = {n: m for n, m in self._states_by(plan).items() if m.magnitude is not None}
        sizes = [max(1, self._owners[name].parameter.numel()) for name in moved]
        sums = [each.energy(self._owners[name]) for name, each in moved.items()]
        found = torch.stack(sums).cpu() if sums else ()  # one device synchronisation
        return {name: float(total) / size for name, total, size in zip(moved, found, sizes, strict=True)}

    def units_between(self, before: Plan, after: Plan) -> dict[str, Tensor]:
        """Return the factors, flat, that convert residuals between two plans. Second moments must be frozen.

        Only parameters that exchange the momentum in exactly one plan have a factor.
        """
        moved = {**self._states_by(before), **self._states_by(after)}
        changed = sorted(set(before.moved) ^ set(after.moved))
        units = {name: moved[name].to_gradients(self._owners[name]) for name in changed}
        return {name: unit if name in before.moved else 1 / unit for name, unit in units.items()}

    def saved(self, plan: Plan) -> dict[str, Any]:
        """Return the fields of a saved state: moved parameters, thaws and the next freeze."""
        moved = {MOVED: list(plan.moved)} if plan.moves_exchange else {}
        put_off = {FREEZES_AT: self.freezes_at} if self.freezes_at != self._planned_for else {}
        return moved | put_off | ({THAWED: self.is_thawed, THAWS: self._thaws} if self._thaws else {})

    def thaw(self, step: int, plan: Plan, energies: Mapping[str, float]) -> None:
        """Unfreeze second moments, multiply them by energies above 1, and choose the step of the next freeze.

        The time until the next freeze doubles with each thaw, and is long enough for multiplied moments to decay. If an
        energy is not finite, moments are not frozen again.
        """
        self.is_thawed, self._is_frozen = True, False
        self._thaws += 1
        lasts = 2**self._thaws * max(LEAST_WARM, self._planned_for or 0)
        for name, each in self._states_by(plan).items():
            if each.magnitude is not None and 1 < energies.get(name, 1) < math.inf:
                owner = self._owners[name]
                owner.state[each.magnitude].mul_(energies[name])
                lasts = max(lasts, steps_to_forget(energies[name], owner.options["betas"][1]))
        self.freezes_at = step + lasts if all(map(math.isfinite, energies.values())) else None

    def freeze_again(self, step: int, plan: Plan) -> None:
        self.is_thawed = False
        self.before_step(step, plan)


def steps_to_forget(times: float, beta2: float) -> int:
    """Return the steps after which a second moment multiplied by `times` has decayed by this factor."""
    return math.ceil(math.log(times) / -math.log(beta2)) if 0 < beta2 < 1 else 0


def freeze_magnitudes(moved: Mapping[str, MovedState], owners: Mapping[str, Owned]) -> None:
    """Clamp second moments from below, because updates are divided by their roots until a thaw.

    An element that never had a gradient has a second moment of 0. The bound is a fraction of the tensor's mean, or, if
    the mean is 0, of the mean of other tensors' means. Non-finite tensors are unchanged.
    """
    found = [owners[name].state[each.magnitude] for name, each in moved.items() if each.magnitude is not None]
    means = [float(value.double().mean()) for value in found]
    known = [mean for mean in means if 0 < mean < math.inf]
    if found and not any(means):
        raise BadState(
            "ranks exchange momenta from this step on, in units of second moments, and all of these are zero: so"
            " were all gradients of the warm-up.\n"
            "  See that the loss depends on the parameters, or compile the step again with a longer warm-up."
        )
    for value, mean in zip(found, means, strict=True):
        if known and mean < math.inf:
            value.clamp_(min=LEAST_MAGNITUDE * (mean or statistics.fmean(known)))


class SavedMomenta(NamedTuple):
    """Fields of a rank's saved state for the exchange of momenta."""

    moved: list[str]
    is_thawed: bool
    thaws: int
    freezes_at: int | None
    """Step of the last or next freeze. None: the planned step, or, if `is_thawed`, no further freeze."""

    @classmethod
    def told(cls, given: Given, ranks: Ranks) -> list[SavedMomenta]:
        """Read the fields from the saved states of all ranks that have a state. Every rank calls it."""
        everyone = ranks.gather("whose momentum was exchanged", cls._read(given))
        return [cls(*each) for each in everyone if each is not None]

    @classmethod
    def _read(cls, given: Given) -> SavedMomenta | None:
        found = states_given(given)
        if not found:
            return None
        is_thawed = found[0].get(THAWED, False)
        return cls(found[0].get(MOVED, []), is_thawed, found[0].get(THAWS, int(is_thawed)), found[0].get(FREEZES_AT))


def check_momenta(found: Sequence[SavedMomenta], plan: Plan, steps: int) -> None:
    """Raise BadState if saved residuals are of momenta where this job's are of gradients, or the reverse.

    `plan` is this job's plan after `steps` steps.
    """
    if found and set(found[0].moved) != set(plan.moved):
        raise BadState(
            f"the state was saved while ranks exchanged {_some(found[0].moved)}; after {steps} steps this job"
            f" has exchanged {_some(plan.moved)}, and residuals have another unit.\n"
            "  Compile the step with the compress= that it was saved under."
        )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "gradients alone"
    return f"the momentum of {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
