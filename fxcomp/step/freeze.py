"""Freeze second moments after enough updates of every parameter, to exchange momenta. Thaw them if they stop fitting.

    before the freeze          if a parameter has too few updates, the warm-up lasts longer
    every LOOK_EVERY steps     energy of a parameter = mean (m / d)², with m the momentum and d the frozen root of the
                               second moment; at most about 1 while the frozen moment fits
    above LIMIT on any rank    thaw: exchange gradients in int8 and update second moments again
    later                      freeze again, after a time that doubles with each thaw

Every rank computes the energies locally from equal moments. A small all_reduce combines the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from fxcomp.plan.compress import with_gradients_in_int8
from fxcomp.ranks import Ranks
from fxcomp.state.momenta import SavedMomenta
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.verify.verifier import anywhere

LOOK_EVERY = 10
"""Steps between checks. With beta2 = 0.999, ten steps replace 1 % of Adam's second moment."""

LIMIT = 10.0
"""Maximum energy. Runs that reached the loss of dense training had up to 2.5 (docs/where_the_mean_stands.md)."""


class Freeze:
    def __init__(
        self,
        force: PlanInForce,
        ranks: Ranks,
        follow: Callable[[int], None],
        note: Callable[[str], None],
    ):
        self._force, self._ranks, self._follow, self._note = force, ranks, follow, note
        self._at_momenta = force.decision.plan
        """Plan that exchanges momenta; kept after a thaw."""
        self._has_noted = False

    def before_step(self, step: int) -> int | None:
        """Freeze second moments if due, or return the step to which the freeze is postponed. Every rank calls it."""
        force, topic = self._force, "freezing second moments"
        if not force.momenta.is_due(step):
            return None
        with self._ranks.together(topic):
            found = self._ranks.from_rank_0(topic, lambda: force.momenta.lacking(self._at_momenta))
            if found is None and force.momenta.is_thawed:
                self._freeze_again(step, topic)
        if found is None:
            return None
        name, updates, needed = found
        if not self._has_noted:
            self._has_noted = True
            self._note(
                f"step {step}: ranks go on exchanging gradients, because {name!r} has been updated in {updates} steps"
                f" so far, and momenta are exchanged once every parameter has been in {needed}"
            )
        return step + needed - updates

    def between(self, steps: int) -> None:
        """Check the energies if due, and thaw if an energy exceeds LIMIT on any rank. Every rank calls it."""
        if steps % LOOK_EVERY or not self._force.plan.moves_exchange:
            return
        energies = self._force.momenta.energies(self._force.plan)
        if not energies:
            return
        fits = all(energy <= LIMIT for energy in energies.values())
        if not anywhere(self._force.inputs.training, self._force.runtime, not fits)[0]:
            return
        topic = "exchanging gradients again"
        with self._ranks.together(topic):
            energies = self._ranks.from_rank_0(f"{topic}: the energies", lambda: energies)
            self.thaw(steps, topic, energies)
            self._follow(steps)
        name = max(energies, key=lambda each: math.inf if math.isnan(energies[each]) else energies[each])
        self._note(
            f"step {steps}: ranks exchange gradients again, in int8, and second moments go on: the frozen one of"
            f" {name!r} no longer fits (its updates have a mean square of {energies[name]:.3g} in its units; at most 1"
            f" while it fits, {LIMIT:g} is allowed). {self._later}"
        )

    def thaw(self, step: int, topic: str, energies: Mapping[str, float] = MappingProxyType({})) -> None:
        """Exchange gradients in int8 instead of momenta. Every rank calls it."""
        force = self._force
        if force.is_racing:
            force.settle_on(0)
        moved, self._at_momenta = force.plan, force.plans[-1]
        force.switch(replace(force.decision, plan=with_gradients_in_int8(self._at_momenta)), topic)
        force.momenta.thaw(step, moved, energies)

    def _freeze_again(self, step: int, topic: str) -> None:
        force = self._force
        force.momenta.freeze_again(
            step, self._at_momenta
        )  # before the switch, which scales residuals by the frozen moments
        force.switch(replace(force.decision, plan=self._at_momenta), topic)
        self._follow(step)
        self._note(f"step {step}: ranks exchange momenta again, and second moments are frozen as they are now")

    @property
    def _later(self) -> str:
        freezes_at = self._force.momenta.freezes_at
        return "That is for good" if freezes_at is None else f"Momenta are exchanged again from step {freezes_at} on"

    def go_on(self, saved: SavedMomenta) -> None:
        """Exchange momenta or gradients, as the saved job did. Every rank calls it."""
        if saved.is_thawed and self._force.plans[-1].moves_exchange:
            self.thaw(0, "load_state_dict")
        self._force.momenta.take_over(saved)

    def resume(self, steps: int) -> None:
        if self._force.momenta.is_thawed:
            self._note(
                f"from step {steps} on ranks exchange gradients, in int8: a frozen second moment has stopped fitting"
                f" in this job. {self._later}"
            )
