"""Say how gradients travel: what `compress=` takes, in every frontend and on the command line.

    "balanced"                             a mode's name is a mode
    "int8", "topk(0.01)", "plan.json"      anything else names a plan: one setting for all, a strategy's text, a path
    Plan(...)                              a plan
    Compress(within=like("topk(0.01)"))    the rest: what may be lost, what is pinned, how it begins, what is fed back

docs/decisions/0031-one-argument-says-how-gradients-travel.md says why it is one argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fxcomp.errors import BadOption
from fxcomp.plan.budget import ErrorBudget, like, within_budget
from fxcomp.plan.check_feedback import check_experiment, check_is_feedback
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.given import GivenPlan, asked_plan, check_is_plan
from fxcomp.plan.modes import MODES, Mode
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.plan.warmup import NO_WARMUP, Warmup


@dataclass(frozen=True, kw_only=True)
class Compress:
    """The way that gradients travel: a choice within what may be lost, or a plan in its place.

    `within` bounds what may be lost: a mode (`lossless`, `balanced`, `aggressive`), a relative squared error of the
    whole gradient (`0.05`), or `like("topk(0.01)")`, as much as that setting would lose everywhere. A mode offers its
    own compressors; a number and `like` offer every family.

    `plan` replaces the choice: one setting for all matrices (`"int8"`; biases and norms then stay dense), a strategy's
    text, the path of a saved plan, or a `Plan`.

    `measured` counts what is lost by this job's own gradients, offers every family of compressors, and lets the plan
    follow the gradients while the job trains. Otherwise errors are those of Gaussian values.

    `pins` decides about parameters by name: patterns with a compressor or strategy each, like
    `{"*.embedding.weight": "dense", "lm_head.*": "int8"}`; the last one that matches decides, and the rest is planned
    around it.

    `at` is where the mean over ranks stands: at the gradient.

    `warmup` has the first steps of a job, `feedback` the variants of error feedback.
    """

    within: str | float | ErrorBudget = Mode.BALANCED.value
    plan: GivenPlan | None = None
    measured: bool = False
    pins: Mapping[str, str | Strategy] = field(default_factory=dict[str, str | Strategy])
    at: str = "gradient"
    warmup: Warmup = NO_WARMUP
    feedback: ErrorFeedback = CLASSIC

    def __post_init__(self) -> None:
        check_is_feedback(self.feedback)
        check_is_plan(self.plan)
        _check_simple(self.measured, self.at, self.warmup)
        if self.plan is not None:
            self._check_nothing_else_is_chosen()
        check_experiment(self.feedback, planned=self.plan is not None or bool(self.pinned))
        within_budget(self.within)

    def _check_nothing_else_is_chosen(self) -> None:
        if self.pinned:
            raise BadOption(
                "plan= says what every parameter travels by, and pins= what some do: keep one.\n"
                "  pins= changes what fxcomp chooses; to change a saved plan, write another one."
            )
        if self.measured or self.within != Mode.BALANCED.value:
            name = "measured=True lets fxcomp choose by" if self.measured else f"within={self.within!r} says"
            raise BadOption(
                f"plan= says what every gradient travels by, and {name} what may be lost: keep one.\n"
                "  To let parameters follow the gradients, leave plan= out."
            )

    @classmethod
    def of(cls, given: object) -> Compress:
        """Read what `compress=` takes. Raises BadOption, BadPlan and BadStrategy."""
        if isinstance(given, Compress):
            return given
        if isinstance(given, str) and given in MODES:
            return cls(within=given)
        if isinstance(given, int | float | ErrorBudget):
            raise BadOption(
                f"compress={given} is an error budget, which goes into a Compress: write"
                f" compress=fxcomp.Compress(within={_written(given)})."
            )
        if not isinstance(given, str | Path | Plan):
            raise BadOption(
                "compress= takes a mode ('balanced'), a setting ('int8'), a strategy's text, the path of a saved plan,"
                f" a fxcomp.Plan or a fxcomp.Compress; it is a {type(given).__name__}."
            )
        return cls(plan=given)

    @classmethod
    def parse(cls, text: str) -> Compress:
        """Read a command line's text: also a number and `like(topk(0.01))`. Raises BadOption, BadPlan, BadStrategy."""
        text = text.strip()
        if text.startswith("like(") and text.endswith(")"):
            return cls(within=like(text.removeprefix("like(")[:-1]))
        try:
            return cls(within=float(text))
        except ValueError:
            return cls.of(text)

    def check_is_of_gradients(self, whose: str) -> None:
        """Refuse what needs the optimizer, or whole steps, where they are the user's own; `whose` says so."""
        for name in ("scale_with_lr", "momentum"):
            if getattr(self.feedback, name):
                raise _needs_whole_steps(f"ErrorFeedback.{name} needs the optimizer", whose)
        if self.warmup:
            raise _needs_whole_steps("warmup= counts the steps of the optimizer", whose)
        if self.measured:
            raise _needs_whole_steps("measured=True looks at gradients in whole steps with the optimizer", whose)

    def following(self, plan: Plan) -> Compress:
        """The same, with a plan in the place of any other choice."""
        return replace(self, plan=plan, within=Mode.BALANCED.value, measured=False, pins={})

    @cached_property
    def mode(self) -> Mode:
        """The mode that bounds a choice; balanced where none is named."""
        return Mode(self.within) if isinstance(self.within, str) else Mode.BALANCED

    @cached_property
    def budget(self) -> ErrorBudget | None:
        """The error that bounds a choice; None where the mode itself does."""
        is_mode = isinstance(self.within, str) and not self.measured
        return None if is_mode else within_budget(self.within)

    @cached_property
    def pinned(self) -> Pins:
        """The pins, read."""
        return Pins.read(self.pins)

    def facts(self) -> dict[str, Any]:
        """List what must be the same on all ranks."""
        return {
            "within": str(within_budget(self.within)),
            "the plan": asked_plan(self.plan),
            "measured": self.measured,
            "pins": self.pinned.facts(),
            "warmup": str(self.warmup),
            "feedback": str(self.feedback),
        }


GivenCompress = Compress | Plan | str | Path
"""The values that `compress=` takes."""


def _check_simple(measured: object, at: object, warmup: object) -> None:
    if not isinstance(measured, bool):
        raise BadOption(f"measured is True or False; it is {measured!r}")
    if at != "gradient":
        raise BadOption(
            f"at={at!r}: the mean over ranks stands at the gradient, and nowhere else yet.\n"
            "  Leave at= out. ErrorFeedback(momentum=...) keeps each rank's momentum before compression."
        )
    if not isinstance(warmup, Warmup):
        raise BadOption(f"warmup is a fxcomp.Warmup; it is a {type(warmup).__name__}: write Warmup(dense_steps=100)")


def _needs_whole_steps(what: str, whose: str) -> BadOption:
    return BadOption(f"{what}, {whose}.\n  Use fxcomp.compile_step, which compiles the whole step.")


def _written(budget: float | ErrorBudget) -> str:
    return f'fxcomp.like("{budget.text}")' if isinstance(budget, ErrorBudget) else str(budget)


BALANCED = Compress()
"""The default: what balanced mode chooses."""
