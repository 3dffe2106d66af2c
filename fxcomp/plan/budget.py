"""Error budgets and errors of plans, as relative squared errors.

    0.05                    relative squared error of the whole gradient
    like("topk(0.01)")      error of this compressor on all gradients
    like("int4 > int4")     error of two shots
    "balanced"              error of a reference strategy on all gradients

Under `like` vectors (biases, norms) stay dense unless balanced mode would compress them. Without measured errors a
mode's limit is a constant (`modes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.seating import Axis
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.compressors.facts import Bias
from fxcomp.compressors.gaussian_error import SHAPE, gaussian_error
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.errors import BadOption, BadStrategy
from fxcomp.plan.given import is_strategy
from fxcomp.plan.interpret import Compress, Standing
from fxcomp.plan.modes import MODES, Content, Mode, error_limit, strategies
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import DENSE, Strategy

POLLUTING_ERROR = 0.5
"""Error above which a strategy with error feedback is bursty, as top-k: an element is sent rarely, and its value is
then large. Sign (0.36) and low rank are below.
"""


ErrorOf = Callable[[Compressor, int], float]
"""Relative squared error of a compressor on a number of ranks."""


def strategy_error(strategy: Strategy, cluster: Cluster, error_of: ErrorOf = gaussian_error) -> float:
    """Return the relative squared error of a strategy, by default on Gaussian gradients.

    Gradients are assumed to be orthogonal between ranks: averaging keeps the relative error, and a second compression
    adds a second error. Unbiased errors combine to (1 + e1) (1 + e2) - 1, biased ones to 1 - (1 - e1) (1 - e2). Errors
    measured on gradients (`ErrorTable.error_of`) are also used for sums of gradients.
    """
    return float(strategy_errors(strategy, cluster, error_of))


def strategy_errors(strategy: Strategy, cluster: Cluster, errors_of: Callable[[Compressor, int], Any]) -> Any:
    """Return a strategy's errors on many gradients; `errors_of` returns an array.

    Biased errors may exceed 1 in a table. The excess over 1 is added to the result.
    """
    kept: Any = 1.0
    grown: Any = 1.0
    beyond: Any = 0.0
    for held, step in zip(strategy.held, strategy.steps, strict=False):
        if isinstance(step, Compress):
            error = errors_of(step.compressor, _ranks_missing(held, cluster))
            if step.compressor.bias is Bias.BIASED:
                kept = kept * np.maximum(1 - error, 0.0)
                beyond = beyond + np.maximum(error - 1, 0.0)
            else:
                grown = grown * (1 + error)
    where: Any = np.where
    return beyond + where(kept < 1.0, 1.0 - kept * (2.0 - grown), grown - 1.0)


def _ranks_missing(held: Standing, cluster: Cluster) -> int:
    return math.prod(cluster.length_of(axis) for axis in Axis if axis not in held.summed)


def plan_error(plan: Plan, cluster: Cluster, table: ErrorTable = ASSUMED) -> float:
    """Return the relative squared error of the whole gradient.

    A gradient's weight is the gradient's sum of squares in the table. Parts share it by number of
    elements. With an empty table all elements have equal weight.
    """
    if not table.rows:
        elements = sum(bucket.elements for bucket in plan.buckets)
        lost = sum(bucket.elements * strategy_error(bucket.strategy, cluster) for bucket in plan.buckets)
        return lost / elements if elements else 0.0
    sizes = plan.sizes
    squares = lost = 0.0
    for bucket in plan.buckets:
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            part = table.squares_of(name, sizes[name]) * (size / sizes[name]) if size else 0.0
            squares += part
            lost += part * strategy_error(bucket.strategy, cluster, partial(table.error_of, name))
    return lost / squares if squares else 0.0


def polluting_share(plan: Plan, cluster: Cluster) -> float:
    """Return the fraction of elements that exchange gradients with bursty strategies (`is_bursty`)."""
    elements = sum(bucket.elements for bucket in plan.buckets)
    at_gradients = [bucket for bucket in plan.buckets if bucket.at is ExchangePoint.GRADIENT]
    bursts = sum(bucket.elements for bucket in at_gradients if is_bursty(bucket.strategy, cluster))
    return bursts / elements if elements else 0.0


def is_bursty(strategy: Strategy, cluster: Cluster) -> bool:
    """Return whether error feedback sends an element rarely, with a value that is then large."""
    first = strategy.compressor
    if first is None or strategy_error(strategy, cluster) <= POLLUTING_ERROR:
        return False
    return any(each.compressor.needs_error_feedback for each in route_of(strategy, [SHAPE], cluster).slots)


Shapes = Mapping[str, tuple[int, ...]]

_REFERENCES = {
    Mode.LOSSLESS: "dense",
    Mode.BALANCED: "int4 > int4",
    Mode.AGGRESSIVE: "int4 > int4",
    Mode.LOSSY: "topk(0.01) > int4",
}


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """Error limit of a plan."""

    text: str
    """Number, name of a mode, or one setting for all gradients, as in `like`."""

    @classmethod
    def parse(cls, text: str) -> ErrorBudget:
        """Parse `text`. Raise BadOption."""
        number = _number_of(text)
        if number is not None:
            return within_budget(number)
        return cls(text) if text in MODES else like(text)

    @property
    def is_uniform(self) -> bool:
        return _number_of(self.text) is None and self.text not in MODES

    def strategies(self, cluster: Cluster) -> tuple[Strategy, Strategy] | None:
        """Return the strategies whose error is the limit, for matrices and vectors; None if a number is the limit."""
        if _number_of(self.text) is not None:
            return None
        if self.text in MODES:
            reference = _strategy_of(_REFERENCES[Mode(self.text)])
            return reference, reference
        strategy = _strategy_of(self.text)
        gentle = strategies(Mode.BALANCED, cluster, Content.VECTORS)
        return strategy, strategy if strategy in gentle else DENSE

    def limit_of(self, shapes: Shapes, cluster: Cluster, table: ErrorTable = ASSUMED) -> float:
        """Return the limit of the relative squared error."""
        reference = self.strategies(cluster)
        if reference is None:
            return float(self.text)
        if self.text in MODES and not table.is_measured:
            return error_limit(Mode(self.text))
        squares = lost = 0.0
        for name, shape in shapes.items():
            weight = table.squares_of(name, math.prod(shape))
            squares += weight
            lost += weight * strategy_error(reference[len(shape) < 2], cluster, partial(table.error_of, name))
        return lost / squares if squares > 0 else 0.0

    def __str__(self) -> str:
        return f"like({self.text})" if self.is_uniform else self.text


def like(setting: str) -> ErrorBudget:
    """Return the error of a uniform `setting` as budget: "topk(0.01)", "int4 > int4". Raise BadOption."""
    if not isinstance(setting, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadOption(
            f"like(...) takes the text of a uniform setting; it is a {type(setting).__name__}.\n  {_EXAMPLES}"
        )
    text = setting.strip()
    if text == "dense":
        return ErrorBudget(text)
    try:
        text = " > ".join(str(parse_compressor(each)) for each in _shots(text))
        _strategy_of(text)
    except (ValueError, BadStrategy) as error:
        why = str(error).partition("\n")[0]
        raise BadOption(f"like({setting!r}) is no uniform setting: {why}.\n  {_EXAMPLES}") from None
    return ErrorBudget(text)


def within_budget(within: object) -> ErrorBudget:
    """Build the budget of a mode's name, a number, or a result of `like`. Raise BadOption."""
    if isinstance(within, ErrorBudget):
        return within
    if isinstance(within, str):
        return ErrorBudget(_mode_named(within).value)
    if isinstance(within, bool) or not isinstance(within, int | float):
        raise BadOption(f"within= is a mode, a number or like(...); it is a {type(within).__name__}.\n  {_EXAMPLES}")
    if not 0 <= within < 1:
        raise BadOption(
            f"within={within!r} is not an error budget: a relative squared error is from 0, nothing lost, to below 1,"
            f" everything.\n  {_EXAMPLES}"
        )
    return ErrorBudget(f"{within:g}")


def _mode_named(text: str) -> Mode:
    try:
        return Mode.parse(text)
    except BadOption as error:
        raise BadOption(f"within={text!r}: {error}\n  {_EXAMPLES}") from None


@dataclass(frozen=True)
class Budget:
    """Error budget with its error table."""

    asked: ErrorBudget
    table: ErrorTable = ASSUMED

    def limit(self, shapes: Shapes, cluster: Cluster) -> float:
        return self.asked.limit_of(shapes, cluster, self.table)


_EXAMPLES = (
    'Write within="balanced", within=0.05, or within=like("topk(0.01)"), where like takes one compressor or two:'
    ' "int4", "powersgd(4)", "int4 > int4".'
)


def _number_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _shots(text: str) -> list[str]:
    shots = [each.strip() for each in text.split(">")]
    if is_strategy(text) or len(shots) > 2:
        raise ValueError("it is one compressor, or two with > between them")
    return shots


def _strategy_of(text: str) -> Strategy:
    if text == "dense":
        return DENSE
    first, *second = map(parse_compressor, _shots(text))
    return Strategy.two_shots(first, second[0]) if second else Strategy.flat(first)
