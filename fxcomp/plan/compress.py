"""The `compress=` argument of every frontend and of the command line, and a job's warm-up.

    "balanced"                             mode
    "int8", "topk(0.01)", "plan.json"      plan: a compressor for all matrices, a strategy, or a path
    Plan(...)                              plan
    Compress(within=like("topk(0.01)"))    all options

See docs/decisions/0031-one-argument-says-how-gradients-travel.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fxcomp.compressors import BF16, CastCompressor, Compressor, Int4, Int8
from fxcomp.errors import BadOption, BadStrategy
from fxcomp.plan.budget import ErrorBudget, like, within_budget
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback, check_experiment, check_is_feedback
from fxcomp.plan.given import GivenPlan, asked_plan, check_is_plan
from fxcomp.plan.modes import LADDER_COMPRESSORS, MODES, MOMENTUM_COMPRESSORS, Mode, compressors_of
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.plan.strategy import Strategy

AUTO = "auto"

WARM_SHARE, LEAST_WARM = 5, 20
"""Default warm-up before exchanging momenta: 1/5 of the steps in int4, at least 20 steps (measured,
docs/where_the_mean_stands.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """Warm-up steps of a job; none by default.

    `dense_steps` uncompressed steps come first, with zero residuals, then `int8_steps` with int8 in place of each
    compressor except bf16 and f16, then `int4_steps` with int4.
    """

    dense_steps: int = 0
    int8_steps: int = 0
    int4_steps: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            steps: object = getattr(self, each.name)
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
                raise BadOption(f"Warmup.{each.name} is a whole number of steps, from 0; it is {steps!r}")

    def __bool__(self) -> bool:
        return bool(self.dense_steps or self.int8_steps or self.int4_steps)

    def stages(self, plan: Plan, begins: int = 0) -> dict[int, Plan]:
        """Return the plan of each stage, keyed by first step. The first stage starts at `begins`; `plan` is last."""
        plans: list[tuple[Plan, int]] = []
        if not plan.is_dense or plan.moves_exchange:
            plans = [(_dense(plan), self.dense_steps)]
            for compressor, steps in ((Int8(), self.int8_steps), (Int4(), self.int4_steps)):
                plans += [(_by(compressor, plan), steps)] if steps else []
        first, stages = begins, dict[int, Plan]()
        for other, steps in plans:
            if steps:
                stages[first] = other
            first += steps
        return stages | {first: plan}


NO_WARMUP = Warmup()


def _dense(plan: Plan) -> Plan:
    return plan.with_strategies([bucket.strategy.uncompressed for bucket in plan.buckets]).at_gradients()


def with_gradients_in_int8(plan: Plan) -> Plan:
    """Return a plan that exchanges gradients in int8, or uncompressed if a strategy cannot use int8."""
    try:
        return _by(Int8(), plan)
    except BadOption:
        return _dense(plan)


def _by(compressor: Compressor, plan: Plan) -> Plan:
    """Return a plan that exchanges gradients, and has `compressor` in place of all but casts. Raise BadOption."""

    def one_step(step: Any) -> Any:
        before = getattr(step, "compressor", None)
        is_exact_enough = before is None or isinstance(before, CastCompressor)  # the network can sum casts
        return step if is_exact_enough else replace(step, compressor=compressor)

    def strategy_by(strategy: Strategy) -> Strategy:
        try:
            return replace(strategy, steps=tuple(map(one_step, strategy.steps)))
        except BadStrategy:
            raise BadOption(
                f"Warmup.{compressor}_steps puts {compressor} in the place of each compressor, and {strategy} agrees on"
                f" something first, or adds payloads up, which {compressor} cannot.\n"
                "  Use dense_steps, or another strategy."
            ) from None

    return plan.with_strategies([strategy_by(bucket.strategy) for bucket in plan.buckets]).at_gradients()


@dataclass(frozen=True, kw_only=True)
class Compress:
    """Options of gradient compression: a choice within an error budget, or a given plan.

    `within` bounds the error: a mode (`lossless`, `balanced`, `aggressive`, `lossy`), a relative squared error of the
    whole gradient (`0.05`), or `like("topk(0.01)")`, the error of that setting applied everywhere. A mode allows
    its own compressors, a number or `like` allows all.

    `plan` replaces the choice: a compressor for all matrices (`"int8"`; biases and norms stay dense), a strategy's
    text, a saved plan's path, or a `Plan`.

    `measured` measures errors on this job's gradients, offers every family, and adapts the plan during training. By
    default errors are computed for Gaussian values.

    `pins` maps name patterns to compressors or strategies: `{"*.embedding.weight": "dense", "lm_head.*": "int8"}`. The
    last match decides; fxcomp chooses the rest.

    `at` selects the exchanged tensor: the `gradient`, or the optimizer's `momentum` with a frozen second moment
    (docs/where_the_mean_stands.md). `momentum` needs a given plan, and a warm-up if there is a second moment; a saved
    plan may set it per bucket. With `auto` only `aggressive` exchanges momenta, if the optimizer allows it and a job of
    `steps` steps ends sooner.

    `steps` is the job's number of steps. If momenta are exchanged without a `warmup`, the first fifth exchanges
    gradients in int4.

    `sums` is `network` or `ranks`. With `ranks`, for `lossless` or a plan of exact strategies, every mean is a sum in
    the order of the ranks, so its bits do not depend on buckets or on the library's algorithm. Plans then do not race.

    `warmup` sets how many first steps send gradients dense, in int8 or in int4; `feedback` sets the variant of error
    feedback.
    """

    within: str | float | ErrorBudget = Mode.BALANCED.value
    plan: GivenPlan | None = None
    measured: bool = False
    pins: Mapping[str, str | Strategy] = field(default_factory=dict[str, str | Strategy])
    at: str = AUTO
    steps: int | None = None
    warmup: Warmup = NO_WARMUP
    feedback: ErrorFeedback = CLASSIC
    sums: str = "network"

    def __post_init__(self) -> None:
        check_is_feedback(self.feedback)
        check_is_plan(self.plan)
        _check_simple(self.measured, self.at, self.warmup)
        _check_steps(self.steps)
        if self.point is not ExchangePoint.GRADIENT:
            self._check_goes_with_momentum()
        if self.plan is not None:
            self._check_nothing_else_is_chosen()
        if self.sums != "network":
            self._check_sums()
        check_experiment(self.feedback, planned=self.plan is not None or bool(self.pinned))
        within_budget(self.within)

    def _check_sums(self) -> None:
        if self.sums != "ranks":
            raise BadOption(f"sums= is 'network' or 'ranks'; it is {self.sums!r}")
        if self.plan is None and self.within != Mode.LOSSLESS.value:
            raise BadOption(
                "sums='ranks' fixes the order in which uncompressed values are added; within="
                f"{self.within!r} may compress them.\n  Write Compress(within='lossless', sums='ranks')."
            )
        if self.pins or self.warmup:
            raise BadOption("sums='ranks' sets the strategies of all gradients: leave pins= and warmup= out")

    def _check_nothing_else_is_chosen(self) -> None:
        if self.pinned:
            raise BadOption(
                "plan= sets the strategies of all parameters, and pins= of some: keep one.\n"
                "  pins= changes a plan that fxcomp chooses; to change a saved plan, write another one."
            )
        if self.measured or self.within != Mode.BALANCED.value:
            name = "measured=True lets fxcomp choose them by" if self.measured else f"within={self.within!r} sets"
            raise BadOption(
                f"plan= sets the strategies of all gradients, and {name} the allowed error: keep one.\n"
                "  To let parameters follow the gradients, leave plan= out."
            )

    def _check_goes_with_momentum(self) -> None:
        if self.plan is None:
            raise BadOption(
                'at="momentum" takes a plan that is given.\n'
                '  Name one, such as plan="cmax(8)", or let fxcomp choose: within="aggressive", steps=N.'
            )
        if self.feedback.scale_with_lr:
            raise BadOption(
                'at="momentum" does not go with ErrorFeedback(scale_with_lr=...): the residuals are part of the'
                " optimizer's own momentum, which does not contain the learning rate.\n  Leave one of them out."
            )

    @classmethod
    def of(cls, given: object) -> Compress:
        """Convert a value of `compress=`. Raise BadOption, BadPlan or BadStrategy."""
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
        """Parse a command line's text: a value of `compress=`, `0.05` or `like(topk(0.01))`. Raise as `of` does."""
        text = text.strip()
        if text.startswith("like(") and text.endswith(")"):
            return cls(within=like(text.removeprefix("like(")[:-1]))
        try:
            number = float(text)
        except ValueError:
            return cls.of(text)
        return cls(within=number)

    def check_is_of_gradients(self, whose: str) -> None:
        """Raise BadOption for options that need whole steps or the optimizer.

        `whose` ends the message: "which torch.compile leaves yours".
        """
        if self.feedback.scale_with_lr:
            raise _needs_whole_steps("ErrorFeedback.scale_with_lr needs the optimizer", whose)
        if self.warmup:
            raise _needs_whole_steps("warmup= counts the steps of the optimizer", whose)
        moves = isinstance(self.plan, Plan) and self.plan.moves_exchange
        if moves or self.point is not ExchangePoint.GRADIENT:
            raise _needs_whole_steps("exchanging momenta needs the optimizer", whose)
        if self.sums != "network":
            raise _needs_whole_steps("sums='ranks' fixes the order of the norms for clipping too", whose)
        if self.measured:
            raise _needs_whole_steps("measured=True looks at gradients in whole steps with the optimizer", whose)

    def following(self, plan: Plan) -> Compress:
        """Return these options with a given plan."""
        return replace(self, plan=plan, within=Mode.BALANCED.value, measured=False, pins={})

    def warmup_for(self, plan: Plan) -> Warmup:
        """Return the given warm-up, or the default one if the plan exchanges momenta."""
        if self.warmup or self.steps is None or not plan.moves_exchange:
            return self.warmup
        return Warmup(int4_steps=max(LEAST_WARM, math.ceil(self.steps / WARM_SHARE)))

    @cached_property
    def mode(self) -> Mode:
        """Mode named by `within`, else balanced."""
        return Mode(self.within) if isinstance(self.within, str) else Mode.BALANCED

    @property
    def point(self) -> ExchangePoint:
        """Exchanged tensor: the gradient if `at` is `auto`."""
        return ExchangePoint.GRADIENT if self.at == AUTO else ExchangePoint(self.at)

    @property
    def may_move(self) -> bool:
        is_aggressive = self.within == Mode.AGGRESSIVE.value and not self.measured
        return is_aggressive and self.at == AUTO and self.plan is None

    @property
    def chooses_point(self) -> bool:
        """True if the search compares the job's time with gradients and with momenta."""
        return self.may_move and self.steps is not None

    @cached_property
    def budget(self) -> ErrorBudget | None:
        """Error budget; None if the mode itself bounds the choice."""
        is_mode = isinstance(self.within, str) and not self.measured
        return None if is_mode else within_budget(self.within)

    @cached_property
    def pinned(self) -> Pins:
        return Pins.read(self.pins)

    @property
    def offered(self) -> tuple[Compressor, ...]:
        """Compressors whose costs the search needs, always including bf16."""
        candidates = compressors_of(self.mode) if self.budget is None else LADDER_COMPRESSORS
        at_momenta = MOMENTUM_COMPRESSORS if self.chooses_point else ()
        return tuple(dict.fromkeys((BF16(), *candidates, *at_momenta, *self.pinned.compressors)))

    def facts(self) -> dict[str, Any]:
        """Return the options that must agree on all ranks."""
        return {
            "within": str(within_budget(self.within)),
            "the plan": asked_plan(self.plan),
            "measured": self.measured,
            "pins": self.pinned.facts(),
            "at": self.at,
            "steps": self.steps,
            "warmup": str(self.warmup),
            "sums": self.sums,
            "feedback": str(self.feedback),
        }


GivenCompress = Compress | Plan | str | Path


def _check_simple(measured: object, at: object, warmup: object) -> None:
    if not isinstance(measured, bool):
        raise BadOption(f"measured is True or False; it is {measured!r}")
    points = [*(point.value for point in ExchangePoint), AUTO]
    if at not in points:
        raise BadOption(f"at= is where the mean over ranks stands: {' or '.join(map(repr, points))}; it is {at!r}")
    if not isinstance(warmup, Warmup):
        raise BadOption(f"warmup is a fxcomp.Warmup; it is a {type(warmup).__name__}: write Warmup(dense_steps=100)")


def _check_steps(steps: object) -> None:
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise BadOption(f"steps= is the number of steps of the whole job, 1 or more; it is {steps!r}")


def _needs_whole_steps(what: str, whose: str) -> BadOption:
    return BadOption(f"{what}, {whose}.\n  Use fxcomp.compile_step, which compiles the whole step.")


def _written(budget: float | ErrorBudget) -> str:
    return f'fxcomp.like("{budget.text}")' if isinstance(budget, ErrorBudget) else str(budget)


BALANCED = Compress()
