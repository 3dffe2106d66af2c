"""Say how much of the gradient a plan may lose, by reference to what users know.

    0.05             a relative squared error of the whole gradient
    "topk(0.01)"     as much as this loses everywhere, by the same table of errors
    "int4 > int4"    the same of two shots
    "balanced"       a mode's limit: as much as its uniform reference loses

A uniform setting is what `plan=` makes of it: vectors stay dense where balanced mode would not compress them. A mode's
reference compresses all gradients. Where nothing has been measured a mode's limit is its number (`modes.py`).
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
from fxcomp.plan.modes import Content, Mode, error_limit, strategies
from fxcomp.plan.strategy import DENSE, Strategy

Shapes = Mapping[str, tuple[int, ...]]
"""Of gradients, by parameter."""

_REFERENCES = {Mode.LOSSLESS: "dense", Mode.BALANCED: "int4 > int4", Mode.AGGRESSIVE: "topk(0.01) > int4"}
"""What the limits of modes were set by."""


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """An error that a plan may have; make one by `parse`."""

    text: str

    @classmethod
    def parse(cls, asked: object) -> ErrorBudget:
        """Read a number, a mode's name or a uniform setting. Raises BadOption."""
        if isinstance(asked, bool) or not isinstance(asked, str | int | float):
            raise BadOption(f"error_budget is a number or a text; it is a {type(asked).__name__}.\n  {_EXAMPLES}")
        text = str(asked).strip()
        number = _number_of(text)
        if number is not None:
            if not 0 <= number < 1:
                raise BadOption(
                    f"error_budget={asked!r} is no error that a plan may have: a relative squared error is from 0,"
                    f" nothing lost, to below 1, everything.\n  {_EXAMPLES}"
                )
            return cls(f"{number:g}")
        if text != "dense" and text not in _MODES:
            try:
                text = " > ".join(str(parse_compressor(each)) for each in _shots(text))
                _strategy_of(text)
            except (ValueError, BadStrategy) as error:
                why = str(error).partition("\n")[0]
                raise BadOption(
                    f"error_budget={asked!r} is neither a number, a mode nor a uniform setting: {why}.\n  {_EXAMPLES}"
                ) from None
        return cls(text)

    @property
    def is_uniform(self) -> bool:
        """It names one compressor, or two, for everywhere."""
        return _number_of(self.text) is None and self.text not in _MODES

    def strategies(self, cluster: Cluster) -> tuple[Strategy, Strategy] | None:
        """Return what matrices and vectors of the reference travel by; None for a number."""
        if _number_of(self.text) is not None:
            return None
        if self.text in _MODES:
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
        if self.text in _MODES and not table.is_measured:
            return error_limit(Mode(self.text))
        squares = lost = 0.0
        for name, shape in shapes.items():
            weight = table.squares_of(name, math.prod(shape))
            squares += weight
            lost += weight * strategy_error(reference[len(shape) < 2], cluster, table.errors_of(name))
        return lost / squares if squares > 0 else 0.0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Budget:
    """A budget, with the errors that it is counted in."""

    asked: ErrorBudget
    table: ErrorTable = ASSUMED

    def limit(self, shapes: Shapes, cluster: Cluster) -> float:
        """Return the relative squared error of the whole gradient that a plan may have."""
        return self.asked.limit_of(shapes, cluster, self.table)


_MODES = frozenset(mode.value for mode in Mode)

_EXAMPLES = (
    'Write a number such as 0.05, a mode ("balanced"), or a uniform setting: "int4", "topk(0.01)", "powersgd(4)",'
    ' "int4 > int4".'
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
