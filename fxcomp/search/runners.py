"""Pick the plans (runners) of a race, and decide which one to use without a race.

    dense, always
    bf16 everywhere, flat or hierarchical, if the mode allows bf16
    the plan with the shortest predicted step, and up to two other plans that differ from all of these

`fxcomp.step.race` times runners alternately in training steps. If ranks exchange momenta, the fastest plan and bf16 in
the same buckets race after the warm-up. A runner *wins* in a fraction of random draws of cost errors (`shared_draws`):
the draws in which the runner beats dense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.plan.budget import plan_error
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.shared_draws import in_draws, share_won

WORTH_TRYING = 0.1
"""Minimum fraction of won draws for a race; dense and bf16 always race."""

WORTH_FOLLOWING = 0.75
"""Minimum fraction of won draws for a plan to be used without a race."""

OTHERS = 2
"""Maximum number of runners besides dense, bf16 and predicted best."""

DIFFERENT = 0.25
"""Minimum fraction of elements for which a plan has other compressors or levels than each picked runner."""

NEARLY_ALL = 0.02
"""Replaces DIFFERENT for the bf16 plan."""

SAME = 1e-3
"""Relative difference below which predictions are equal."""

DENSE, BF16, PREDICTED_BEST = "dense", "bf16", "predicted best"


@dataclass(frozen=True, slots=True)
class Runner:
    """A plan that may race, with prediction and measurement."""

    name: str
    plan: Plan
    step_us: float
    wins: float
    """Fraction of draws in which the plan beats dense."""
    loss: float
    """Relative squared error of the gradient. Of plans with equal measured times, the smallest loss stays."""
    measured_ms: float | None = None
    """Median step time of the slowest rank, in ms; None until measured."""
    steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """Convert the prediction to JSON, without measurements."""
        facts = {"name": self.name, "plan": self.plan.to_json(), "step_us": self.step_us}
        return {**facts, "wins": self.wins, "loss": self.loss}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Runner:
        values: dict[str, Any] = {**data, "plan": Plan.from_json(data["plan"])}
        return cls(**values)


def pick_runners(
    always: Mapping[str, Plan], others: Iterable[tuple[Plan, float]], prices: StepPrices, table: ErrorTable = ASSUMED
) -> tuple[Runner, ...]:
    """Pick runners, the shortest predicted step first. Equal plans of `always` get the first name.

    `always` contains dense; its bf16 plan must differ by NEARLY_ALL. `others` are plans with step times in µs, fastest
    first. One is picked if it satisfies DIFFERENT and WORTH_TRYING, and no runner is as fast and as precise.
    """
    dense_us = in_draws(prices, always[DENSE])

    def runner(name: str, plan: Plan) -> Runner:
        return made_runner(name, plan, prices, dense_us, table)

    picked: list[Runner] = []
    for name, plan in always.items():
        if any(plan == known.plan for known in picked):
            continue
        if name != BF16 or _differs(plan, picked, NEARLY_ALL):
            picked.append(runner(name, plan))
    most = len(picked) + OTHERS
    for plan, step_us in others:
        loss = plan_error(plan, prices.cluster, table)
        is_worse = any(known.loss <= loss and known.step_us <= step_us * (1 + SAME) for known in picked)
        if len(picked) < most and not is_worse and _differs(plan, picked, DIFFERENT):
            each = runner(_name_of(plan), plan)
            if each.wins >= WORTH_TRYING:
                picked.append(each)
    return tuple(sorted(picked, key=lambda each: each.step_us))


def made_runner(
    name: str, plan: Plan, prices: StepPrices, dense_us: Sequence[float], table: ErrorTable = ASSUMED
) -> Runner:
    """Predict a plan's step time; `dense_us` holds the dense plan's times in the same draws."""
    wins = share_won(in_draws(prices, plan), dense_us)
    return Runner(name, plan, prices.step_us(plan), wins, plan_error(plan, prices.cluster, table))


def lined_up(runners: Sequence[Runner], plan: Plan) -> tuple[Runner, ...]:
    """Return the runners, with the current `plan` first. Return () if `plan` is no runner, or the only runner."""
    mine = [runner for runner in runners if runner.plan == plan]
    others = [runner for runner in runners if runner.plan != plan]
    return (*mine, *others) if mine and others else ()


def is_worth_following(plan: Plan, runners: Sequence[Runner]) -> bool:
    """Return whether a plan beats dense in enough draws to be used without a race."""
    return any(each.plan == plan and each.wins >= WORTH_FOLLOWING for each in runners)


def kind_of(strategy: Strategy) -> tuple[object, ...]:
    """Return a strategy's compressors and levels, without the device."""
    return (strategy.compressors, strategy.is_hierarchical)


def _name_of(plan: Plan) -> str:
    largest = max(plan.buckets, key=lambda bucket: bucket.elements)
    return ", then ".join(map(str, largest.strategy.compressors)) or DENSE


def _differs(plan: Plan, picked: Sequence[Runner], least: float) -> bool:
    return all(_share_that_differs(plan, known.plan) >= least for known in picked)


def _share_that_differs(plan: Plan, other: Plan) -> float:
    mine, theirs = _elements_by_kind(plan), _elements_by_kind(other)
    return 1.0 - (mine & theirs).total() / max(1, mine.total())


def _elements_by_kind(plan: Plan) -> Counter[tuple[object, ...]]:
    found = Counter[tuple[object, ...]]()
    for bucket in plan.buckets:
        found[kind_of(bucket.strategy)] += bucket.elements
    return found
