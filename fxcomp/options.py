"""Options of a compiled step."""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, check_is_cluster
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption, BadPlan
from fxcomp.plan.compress import BALANCED, Compress
from fxcomp.plan.error_feedback import UpdateKind, check_rates
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.plan.verified_steps import SAMPLED, VerifiedSteps

GivenCosts = CostTable | str | Path
Replan = Literal["off", "offer", "auto"]
Race = Literal["auto", "off"]


_ON_RACE = (
    "'auto' lets the few best plans take turns in the first steps and keeps the fastest, 'off' follows the predicted"
    " one."
)
_ON_REPLAN = "'offer' reports when the time of a step changes, 'auto' plans again by itself, 'off' compares nothing."


def _check_one_of(name: str, given: object, allowed: Sequence[object], meanings: str) -> None:
    if given not in allowed:
        raise BadOption(f"{name} must be {', '.join(map(repr, allowed))}; it is {given!r}.\n  {meanings}")


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Checks of a running step.

    `verify`: steps compared with eager PyTorch in loss, gradients and update: `sampled` (2, 5, 10, 20, 50 and so on,
    every 500th, and after a new kind of batch), N for every N-th, or `never`.

    `race`: `auto` (the best plans run alternately in the first 60 steps, and the fastest is kept) or `off` (the
    predicted plan).

    `replan`: reaction to changed step times or faster links: `offer` (a note, another race, and `step.replan()` to
    measure links and plan again), `auto` (all ranks plan again at the same step) or `off`.
    """

    verify: int | str = SAMPLED
    race: Race = "auto"
    replan: Replan = "offer"

    def __post_init__(self) -> None:
        VerifiedSteps.parse(self.verify)
        _check_one_of("race", self.race, get_args(Race), _ON_RACE)
        _check_one_of("replan", self.replan, get_args(Replan), _ON_REPLAN)

    @cached_property
    def verified(self) -> VerifiedSteps:
        return VerifiedSteps.parse(self.verify)


CHECKED = Checks()

UNCHECKED = Checks(verify="never", race="off", replan="off")
"""No checks, for frontends without access to whole steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Options of a step. Raises BadOption."""

    compress: Compress = BALANCED
    cluster: Cluster | None = None
    costs: GivenCosts | None = None
    process_group: Any = None
    """Ranks to average over: a process group, a mesh of one dimension, or None for all ranks."""
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    accumulate: int = 1
    scaler: torch.amp.GradScaler | None = None
    skip_nonfinite: bool = False
    find_unused_parameters: bool = False
    checks: Checks = CHECKED

    def __post_init__(self) -> None:
        _check_costs(self.costs)
        check_is_cluster(self.cluster)
        _check_clipping(self.max_grad_norm, self.max_grad_value)
        _check_flag("skip_nonfinite", self.skip_nonfinite)
        _check_flag("find_unused_parameters", self.find_unused_parameters)
        _check_accumulate(self.accumulate)
        _check_checks(self.checks)
        if self.scaler is not None:
            if not isinstance(self.scaler, compat.GradScaler):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BadOption(f"scaler= takes a torch.amp.GradScaler; it is a {type(self.scaler).__name__}")
            if self.scaler.is_enabled():
                object.__setattr__(self, "skip_nonfinite", True)
            else:
                object.__setattr__(self, "scaler", None)
        if self.checks.replan == "auto" and self.why_not_replan:
            raise BadOption(f"replan='auto' cannot be done here: {self.why_not_replan}")

    @classmethod
    def of_gradients(
        cls,
        compress: object,
        whose: str,
        *,
        cluster: Cluster | None,
        costs: GivenCosts | None,
        scaler: torch.amp.GradScaler | None = None,
        process_group: Any = None,
    ) -> StepOptions:
        """Return the options of a frontend that leaves the optimizer to the user.

        `whose` ends error messages: "which torch.compile leaves yours".
        """
        given = Compress.of(compress)
        given.check_is_of_gradients(whose)
        return cls(
            compress=given, cluster=cluster, costs=costs, scaler=scaler, process_group=process_group, checks=UNCHECKED
        )

    def check_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Raise BadOption for optimizers incompatible with error feedback."""
        for optimizer in optimizers:
            check_rates(self.compress.feedback, optimizer)

    def check_moves(self, plan: Plan, kinds: Collection[UpdateKind]) -> None:
        """Raise BadOption or BadPlan if exchanging a plan's momenta is unsupported or unsafe."""
        if not plan.moves_exchange:
            return
        if not kinds:
            raise BadPlan(
                "the plan lets ranks exchange the optimizer's momentum, which this frontend does not see.\n"
                "  Use fxcomp.compile_step, which compiles the whole step, or another plan."
            )
        stay = 'Leave at="momentum" out' if self.compress.at == "momentum" else "Pass plan.at_gradients()"
        for bucket in plan.buckets:
            if bucket.at is not ExchangePoint.GRADIENT and bucket.element_type is not ElementType.F32:
                raise BadPlan(
                    f"the plan lets ranks exchange the momentum of {bucket.names[0]!r}, whose gradient is"
                    f" {bucket.element_type} here: momenta are exchanged in f32.\n  {stay}."
                )
        for what, why in self.against_moves.items():
            raise BadOption(
                f"ranks exchange the optimizer's momentum by this plan, which does not go with {what}: {why}.\n"
                f"  {stay}, or leave out {what}."
            )
        warmup = self.compress.warmup_for(plan)
        steps, first = self.compress.steps, list(warmup.stages(plan))[-1]
        if steps is not None and steps <= first:
            raise BadOption(
                f"ranks would exchange the optimizer's momentum after a warm-up of {first} steps, and the job has"
                f" {steps} (steps=).\n  {stay}, or pass a shorter warm-up: Compress(warmup=Warmup(int4_steps=N))."
            )
        divides = {UpdateKind.SECOND_MOMENT, UpdateKind.TRUST_RATIO}
        if not divides.isdisjoint(kinds) and not warmup:
            raise BadOption(
                "ranks exchange the optimizer's momentum by this plan, in units of its second moment, which is frozen"
                " then and must have settled: there is no warm-up.\n"
                "  Pass Compress(warmup=Warmup(int4_steps=N)), with N a fifth of the job's steps, and no fewer than the"
                " learning rate's own warm-up; or pass the length of the job, steps=N (--steps N): a fifth of that."
            )

    @property
    def against_moves(self) -> dict[str, str]:
        """Given options that exclude an exchange of momenta: name to reason."""
        feedback = self.compress.feedback
        options = {
            "max_grad_norm=": (self.max_grad_norm is not None, "the norm of the mean gradient is not known then"),
            "max_grad_value=": (self.max_grad_value is not None, "the mean gradient is not known then"),
        }
        for name in ("scale_with_lr", "everywhere"):
            why = "residuals would have another unit, or be scaled twice"
            options[f"ErrorFeedback({name}=...)"] = (bool(getattr(feedback, name)), why)
        return {name: why for name, (is_given, why) in options.items() if is_given}

    @property
    def why_not_replan(self) -> str:
        """Reason why links cannot be measured for a new plan; empty if they can."""
        if self.cluster is not None and not self.why_plan_stays:
            return (
                "the cluster was given, and the links of a given cluster are not measured.\n"
                "  Leave cluster= out, so that they are, or compile another step with the cluster as it is now."
            )
        return self.why_plan_stays

    @property
    def why_plan_stays(self) -> str:
        """Reason why the plan cannot change; empty if it can."""
        if self.compress.plan is not None:
            return (
                "the plan was given, and fxcomp changes only its own choices.\n"
                "  Let compress= name a mode, or compile another step."
            )
        if self.compress.chooses_point:
            return (
                'within="aggressive" has chosen for the whole job, and residuals of momenta and of gradients have other'
                ' units.\n  Compile another step, which goes on from the optimizer\'s state, or pass at="gradient".'
            )
        if self.checks.verified.is_all:
            return (
                "every step is verified, which takes longer than training does, so none can be timed.\n"
                "  Verify less often: Checks(verify=2) leaves every other step to time."
            )
        return ""

    @property
    def is_watched(self) -> bool:
        """True if step times are monitored. False for a given plan, or if every step is verified."""
        return self.checks.replan != "off" and self.compress.plan is None and not self.checks.verified.is_all

    @property
    def races(self) -> bool:
        """True if plans race. False for a given plan, or if every step is verified."""
        checks, has_one_plan = self.checks, self.compress.plan is not None or self.compress.sums == "ranks"
        return checks.race == "auto" and not has_one_plan and not checks.verified.is_all

    @property
    def begins_dense(self) -> bool:
        """True if a job trains densely at first and chooses its plan by timing these steps."""
        return self.races and self.costs is None and not self.compress.chooses_point

    def facts(self) -> dict[str, Any]:
        """Return the options that must agree on all ranks."""
        costs = None if self.costs is None else "a table" if isinstance(self.costs, CostTable) else "a file"
        return {
            **self.compress.facts(),
            "verify": self.checks.verify,
            "race": self.checks.race,
            "replan": self.checks.replan,
            "cluster": str(self.cluster),
            "skip_nonfinite": self.skip_nonfinite,
            "find_unused_parameters": self.find_unused_parameters,
            "accumulate": self.accumulate,
            "a scaler": self.scaler is not None,
            "how costs are given": costs,
            "the digest of cluster=": None if self.cluster is None else _digest(self.cluster.to_json()),
        }


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _check_costs(costs: object) -> None:
    if not isinstance(costs, CostTable | str | Path | None):
        raise BadOption(f"costs is a fxcomp.CostTable or the path of a saved one; it is a {type(costs).__name__}")


def _check_checks(checks: object) -> None:
    if not isinstance(checks, Checks):
        raise BadOption(f"checks= takes a fxcomp.Checks; it is a {type(checks).__name__}: write Checks(verify='never')")


def _check_clipping(norm: object, value: object) -> None:
    for name, limit in (("max_grad_norm", norm), ("max_grad_value", value)):
        if limit is None:
            continue
        if type(limit) is bool or not isinstance(limit, numbers.Real):
            raise BadOption(f"{name} is a number, or None for no clipping; it is {limit!r}, a {type(limit).__name__}")
        if not float(limit) > 0:
            raise BadOption(f"{name} must be above 0, or None for no clipping; it is {limit}")
    if norm is not None and value is not None:
        raise BadOption(
            "max_grad_norm clips gradients by their norm and max_grad_value by their elements: keep one.\n"
            "  Together, neither clips as it does alone."
        )


def _check_flag(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise BadOption(f"{name} is True or False; it is {given!r}")


def _check_accumulate(given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise BadOption(
            f"accumulate must be a number of micro-batches, 1 or more; it is {given!r}.\n"
            "  1 updates after every batch; 4 sums up the gradients of four and sends them once."
        )
