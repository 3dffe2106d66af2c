"""Keep what an exchange of momenta needs of the optimizer's state, and of saved states."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule

from fxcomp.capture.optimizer import Owned
from fxcomp.errors import BadState
from fxcomp.graph.info import info
from fxcomp.graph.moments import updates_of
from fxcomp.plan.plan import Plan
from fxcomp.state.saved_state import Given, states_given

LEAST_MAGNITUDE = 0.01
"""The least part of its tensor's mean that a frozen second moment has: its first gradient moves a value that never had
one at most some ten times as far as others move."""

_MOVED = "momenta"


class Freeze:
    """The moment after which second moments stay: before the first step whose plan exchanges momenta."""

    def __init__(self, graph: GraphModule, owners: Mapping[str, Owned], stages: Mapping[int, Plan]) -> None:
        self._graph, self._owners = graph, owners
        self._first = next((step for step, plan in stages.items() if plan.moves_exchange), None)
        self._is_done = False

    def resume(self, steps: int) -> None:
        """Go on after so many steps, forwards or back."""
        self._is_done = self._first is not None and steps > self._first

    def before_step(self, step: int, plan: Plan) -> None:
        """Freeze, if that is due: now, since the optimizer's state may have been loaded after that of the step."""
        if step == self._first and not self._is_done:
            freeze_magnitudes(self._graph, plan, self._owners)
            self._is_done = True


def freeze_magnitudes(graph: GraphModule, plan: Plan, owners: Mapping[str, Owned]) -> None:
    """Make second moments fit to be divided by for the rest of a job, where a plan exchanges momenta.

    A value that never had a gradient has a second moment of 0, and its first gradient would be divided by almost
    nothing. None stays below a part of its tensor's mean; where that is 0, of the mean of the others' means. The same
    on all ranks, as what it reads is. What is not finite stays.
    """
    updates = updates_of(graph) if plan.moves_exchange else {}
    found: list[Tensor] = []
    for name in plan.moved:
        magnitude = updates[name].moment().magnitude
        source = None if magnitude is None else info(magnitude.state).source
        if source is not None:
            found.append(owners[name].state[source.key])
    means = [float(value.double().mean()) for value in found]
    known = [mean for mean in means if 0 < mean < math.inf]
    if found and not any(means):
        raise BadState(
            "ranks exchange momenta from this step on, and no step before has updated a second moment: all of the"
            " warm-up's were left out.\n  Compile the step again with a longer warm-up."
        )
    for value, mean in zip(found, means, strict=True):
        if known and mean < math.inf:
            value.clamp_(min=LEAST_MAGNITUDE * (mean or statistics.fmean(known)))


def saved_momenta(plan: Plan) -> dict[str, Any]:
    """Name in a saved state the parameters of which ranks exchange the momentum, if there are any."""
    return {_MOVED: list(plan.moved)} if plan.moves_exchange else {}


def momenta_in(given: Given) -> tuple[list[str], bool] | None:
    """Read from a rank's states whose momentum was exchanged, and whether residuals are kept; None without a state."""
    found = states_given(given)
    if not found:
        return None
    kept: list[Any] = pytree.tree_leaves([state.get("residuals") for state in found])
    return list(map(str, found[0].get(_MOVED, ()))), any(isinstance(v, Tensor) and bool(v.any()) for v in kept)


def check_momenta(found: Sequence[tuple[list[str], bool] | None], before: Plan, plan: Plan, steps: int) -> None:
    """Raise BadState where residuals of saved states have another unit than this job's: momenta's or gradients'.

    `before` is the plan of this job's last step before it goes on, after so many, and `plan` that of the next one.
    """
    known = [each for each in found if each is not None]
    if not known:
        return
    saved, keeps = known[0][0], any(residuals for _, residuals in known)
    if set(saved) != set(before.moved) or (keeps and set(saved) != set(plan.moved)):
        raise BadState(
            f"the state was saved while ranks exchanged {_some(saved)}; after {steps} steps this job"
            f" exchanges {_some(plan.moved)}, and what was left out has another unit.\n"
            "  Compile the step with the compress= that it was saved under."
        )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "gradients alone"
    return f"the momentum of {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
