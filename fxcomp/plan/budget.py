"""Say how much of the gradient a plan may lose, by reference to what users know.

    0.05                    a relative squared error of the whole gradient
    like("topk(0.01)")      as much as this loses everywhere, by the same table of errors
    like("int4 > int4")     the same of two shots
    "balanced"              a mode's limit: as much as its uniform reference loses

A uniform setting is what `compress="topk(0.01)"` makes of it: vectors stay dense where balanced mode would not compress
them. A mode's reference compresses all gradients. Where nothing has been measured a mode's limit is its number
(`modes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import parse_compressor
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.errors import BadOption, BadStrategy
from fxcomp.plan.error_budget import strategy_error
from fxcomp.plan.given import is_strategy
from fxcomp.plan.modes import MODES, Content, Mode, error_limit, strategies
from fxcomp.plan.strategy import DENSE, Strategy

Shapes = Mapping[str, tuple[int, ...]]
"""Of gradients, by parameter."""

_REFERENCES = {Mode.LOSSLESS: "dense", Mode.BALANCED: "int4 > int4", Mode.AGGRESSIVE: "topk(0.01) > int4"}
"""The settings whose losses set the modes' limits."""


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """An error that a plan may have; users make one by `like`."""

    text: str
    """A number, a mode's name, or a uniform setting."""

    @classmethod
    def parse(cls, text: str) -> ErrorBudget:
        """Read `text`, as one holds it. Raises BadOption."""
        number = _number_of(text)
        if number is not None:
            return within_budget(number)
        return cls(text) if text in MODES else like(text)

    @property
    def is_uniform(self) -> bool:
        """It names one compressor, or two, for everywhere."""
        return _number_of(self.text) is None and self.text not in MODES

    def strategies(self, cluster: Cluster) -> tuple[Strategy, Strategy] | None:
        """Return what matrices and vectors of the reference travel by; None for a number."""
        if _number_of(self.text) is not None:
            return None
        if self.text in MODES:
            reference = _strategy_of(_REFERENCES[Mode(self.text)])
            return reference, reference
        strategy = _strategy_of(self.text)
        gentle = strategies(Mode.BALANCED, cluster, Content.VECTORS)
        return strategy, strategy if strategy in gentle else DENSE

    def limit_of(self, shapes: Shapes, cluster: Cluster, table: ErrorTable = ASSUMED) -> float:
        """Return the relative squared error of the whole gradient that a plan may have."""
        reference = self.strategies(cluster)
        if reference is None:
            return float(self.text)
        if self.text in MODES and not table.is_measured:
            return error_limit(Mode(self.text))
        squares = lost = 0.0
        for name, shape in shapes.items():
            weight = table.squares_of(name, math.prod(shape))
            squares += weight
            lost += weight * strategy_error(reference[len(shape) < 2], cluster, table.errors_of(name))
        return lost / squares if squares > 0 else 0.0

    def __str__(self) -> str:
        return f"like({self.text})" if self.is_uniform else self.text


def like(setting: str) -> ErrorBudget:
    """Allow as much as a uniform setting loses everywhere: "topk(0.01)", "int4 > int4". Raises BadOption."""
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
    """Read a mode's name, a number, or what `like` returned. Raises BadOption."""
    if isinstance(within, ErrorBudget):
        return within
    if isinstance(within, str):
        return ErrorBudget(_mode_named(within).value)
    if isinstance(within, bool) or not isinstance(within, int | float):
        raise BadOption(f"within= is a mode, a number or like(...); it is a {type(within).__name__}.\n  {_EXAMPLES}")
    if not 0 <= within < 1:
        raise BadOption(
            f"within={within!r} is no error that a plan may have: a relative squared error is from 0, nothing lost, to"
            f" below 1, everything.\n  {_EXAMPLES}"
        )
    return ErrorBudget(f"{within:g}")


def _mode_named(text: str) -> Mode:
    try:
        return Mode.parse(text)
    except BadOption as error:
        raise BadOption(f"within={text!r}: {error}\n  {_EXAMPLES}") from None


@dataclass(frozen=True)
class Budget:
    """A budget, with the errors that it is counted in."""

    asked: ErrorBudget
    table: ErrorTable = ASSUMED

    def limit(self, shapes: Shapes, cluster: Cluster) -> float:
        """Return the relative squared error of the whole gradient that a plan may have."""
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
