"""The options of a compiled step, checked once."""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, check_is_cluster
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.budget import ErrorBudget
from fxcomp.plan.check_feedback import check_experiment, check_is_feedback, check_momentum, check_rates
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.given import GivenPlan, asked_plan, check_is_plan
from fxcomp.plan.modes import Mode
from fxcomp.plan.pins import NO_PINS, Pins
from fxcomp.plan.verified_steps import SAMPLED, VerifiedSteps

GivenCosts = CostTable | str | Path


class Replan(Enum):
    """The answer to a cost that turns out wrong."""

    OFF = "off"  # nothing is timed
    OFFER = "offer"  # the report says so; `step.replan()` plans anew
    AUTO = "auto"  # all ranks plan anew at the same step

    @classmethod
    def parse(cls, text: str) -> Replan:
        """Read an option. Raises BadOption."""
        try:
            return cls(text)
        except ValueError:
            raise BadOption(
                f"replan must be {', '.join(repr(each.value) for each in cls)}; it is {text!r}.\n"
                "  'offer' says when a cost is wrong, 'auto' plans anew by itself, 'off' times nothing."
            ) from None


class RaceOption(Enum):
    """True if the running job decides between the few best plans."""

    AUTO = "auto"  # they take turns, and the fastest stays
    OFF = "off"  # the predicted one is followed

    @classmethod
    def parse(cls, text: str) -> RaceOption:
        """Read an option. Raises BadOption."""
        try:
            return cls(text)
        except ValueError:
            raise BadOption(
                f"race must be {', '.join(repr(each.value) for each in cls)}; it is {text!r}.\n"
                "  'auto' lets the few best plans take turns in the first steps and keeps the fastest, 'off' follows"
                " the predicted one."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The options of a step, checked."""

    mode: Mode = Mode.BALANCED
    cluster: Cluster | None = None
    costs: GivenCosts | None = None
    plan: GivenPlan | None = None
    pins: Pins = NO_PINS
    error_budget: ErrorBudget | None = None
    feedback: ErrorFeedback = CLASSIC
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    skip_nonfinite: bool = False
    find_unused_parameters: bool = False
    verify_every: int | str = SAMPLED
    replan: Replan = Replan.OFFER
    race: RaceOption = RaceOption.AUTO
    accumulate: int = 1
    scaler: Any = None
    """The user's GradScaler, if there is one and it is enabled."""
    process_group: Any = None
    """The ranks that average with each other: a process group, a mesh of one dimension, or None for the whole job."""

    @classmethod
    def checked(
        cls,
        *,
        mode: str = Mode.BALANCED.value,
        error_feedback: ErrorFeedback = CLASSIC,
        replan: str = Replan.OFFER.value,
        race: str = RaceOption.AUTO.value,
        per_parameter: Mapping[str, str] | None = None,
        error_budget: str | float | None = None,
        **others: Any,
    ) -> StepOptions:
        """Check options as compile_step takes them. Raises BadOption, BadPlan and the errors of error feedback."""
        check_is_feedback(error_feedback)
        plan, costs = (others.get(name) for name in ("plan", "costs"))
        check_is_plan(plan)
        pins = Pins.read(per_parameter)
        if plan is not None and pins:
            raise BadOption(
                "plan= says what every parameter travels by, and per_parameter= what some do: keep one.\n"
                "  per_parameter= changes what fxcomp chooses; to change a saved plan, write it anew."
            )
        if not isinstance(costs, CostTable | str | Path | None):
            raise BadOption(f"costs is a fxcomp.CostTable or the path of a saved one; it is a {type(costs).__name__}")
        check_experiment(error_feedback, planned=plan is not None or bool(pins))
        _check_clipping(others)
        _check_flags(others)
        check_is_cluster(others.get("cluster"))
        chosen = {"mode": Mode.parse(mode), "replan": Replan.parse(replan), "race": RaceOption.parse(race)}
        budget = None if error_budget is None else ErrorBudget.parse(error_budget)
        if plan is not None and budget is not None:
            raise BadOption(
                "plan= says what every gradient travels by, and error_budget= what fxcomp may choose: keep one.\n"
                "  To let parameters follow the gradients, leave plan= out."
            )
        _check_accumulate(others.get("accumulate", 1))
        if (scaler := others.get("scaler")) is not None:
            others |= _scaling(scaler)
        options = cls(feedback=error_feedback, pins=pins, error_budget=budget, **chosen, **others)
        VerifiedSteps.parse(options.verify_every)
        options._check_unused()
        if options.replan is Replan.AUTO and options.why_not_replan:
            raise BadOption(f"replan='auto' cannot be done here: {options.why_not_replan}")
        return options

    def _check_unused(self) -> None:
        """Refuse what does not go with parameters that are used for some batches only."""
        if not self.find_unused_parameters:
            return
        if self.feedback.momentum:
            raise BadOption(
                "find_unused_parameters=True does not go with ErrorFeedback(momentum=...): a velocity goes on where"
                " there is no gradient, and an unused parameter would move.\n  Leave the momentum to the optimizer."
            )

    def check_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], *, alone: bool) -> None:
        """Refuse optimizers that the options do not go with. Raises BadOption."""
        for optimizer in optimizers:
            check_momentum(
                self.feedback,
                optimizer,
                clips=self.max_grad_norm is not None or self.max_grad_value is not None,
                alone=alone,
            )
            check_rates(self.feedback, optimizer)

    @property
    def verified(self) -> VerifiedSteps:
        """The steps that are compared with eager PyTorch. Raises BadOption."""
        return VerifiedSteps.parse(self.verify_every)

    @property
    def why_not_replan(self) -> str:
        """The reason why the plan cannot change later; empty if it can."""
        if self.plan is not None:
            return (
                "the plan was given, and fxcomp changes only what it chose.\n"
                "  Leave plan= out, or compile another step."
            )
        if self.feedback.momentum:
            return (
                "velocities of momentum correction belong to the plan that they were gathered under.\n"
                "  Save a state, compile another step, and load it there."
            )
        if self.verified.is_all:
            return (
                "every step is verified, which takes longer than training does, so none can be timed.\n"
                "  Verify more seldom: verify_every=2 leaves every other step to time."
            )
        return ""

    @property
    def is_watched(self) -> bool:
        """Steps are compared with their prediction. A plan given without costs was not judged by any."""
        return self.replan is not Replan.OFF and (self.plan is None or self.costs is not None)

    @property
    def races(self) -> bool:
        """Plans may take turns. A given plan is never changed, and where every step is verified none is timed."""
        return self.race is RaceOption.AUTO and self.plan is None and not self.verified.is_all

    def facts(self) -> dict[str, Any]:
        """List what must be the same on all ranks."""
        costs = None if self.costs is None else "a table" if isinstance(self.costs, CostTable) else "a file"
        return {
            "mode": self.mode.value,
            "verify_every": self.verify_every,
            "cluster": str(self.cluster),
            "error_feedback": str(self.feedback),
            "skip_nonfinite": self.skip_nonfinite,
            "find_unused_parameters": self.find_unused_parameters,
            "replan": self.replan.value,
            "race": self.race.value,
            "accumulate": self.accumulate,
            "a scaler": self.scaler is not None,
            "the plan": asked_plan(self.plan),
            "per_parameter": self.pins.facts(),
            "error_budget": None if self.error_budget is None else str(self.error_budget),
            "how costs are given": costs,
            "the digest of cluster=": None if self.cluster is None else _digest(self.cluster.to_json()),
        }


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _check_clipping(given: Mapping[str, Any]) -> None:
    names = ("max_grad_norm", "max_grad_value")
    limits = {name: given[name] for name in names if given.get(name) is not None}
    for name, limit in limits.items():
        if type(limit) is bool or not isinstance(limit, numbers.Real):
            raise BadOption(f"{name} is a number, or None for no clipping; it is {limit!r}, a {type(limit).__name__}")
        if not float(limit) > 0:
            raise BadOption(f"{name} must be above 0, or None for no clipping; it is {limit}")
    if len(limits) > 1:
        raise BadOption(
            "max_grad_norm clips gradients by their norm and max_grad_value by their elements: keep one.\n"
            "  After the other they would not be what either says."
        )


def _check_flags(given: Mapping[str, Any]) -> None:
    """Refuse texts and the like: 'no' would be taken as yes."""
    for name in ("skip_nonfinite", "find_unused_parameters"):
        if not isinstance(given.get(name, False), bool):
            raise BadOption(f"{name} is True or False; it is {given[name]!r}")


def _scaling(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Read what a GradScaler asks for; nothing if it is not enabled. Raises BadOption."""
    if not isinstance(scaler, compat.GradScaler):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadOption(f"scaler= takes a torch.amp.GradScaler; it is a {type(scaler).__name__}")
    return {"skip_nonfinite": True} if scaler.is_enabled() else {"scaler": None}


def _check_accumulate(given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise BadOption(
            f"accumulate must be a number of micro-batches, 1 or more; it is {given!r}.\n"
            "  1 updates after every batch; 4 sums up the gradients of four and sends them once."
        )
