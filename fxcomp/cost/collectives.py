"""What a collective costs on an ideal link: steps · α + wire bytes / bandwidth, one table of formulas.

p is the number of ranks. n is what the collective works on in bytes: for an all_gather what *one* rank contributes, for
the others the full tensor. B is the bandwidth that one rank has, in bytes a µs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import sympy  # pyright: ignore[reportMissingTypeStubs]

from fxcomp.cluster import Way
from fxcomp.strategy import CollectiveKind

_sympy = cast(Any, sympy)  # untyped

ALPHA, BANDWIDTH, RANKS, BYTES = _sympy.symbols("α B p n", positive=True)
CEIL_LOG2 = _sympy.Function("ceil_log2")  # ⌈log₂ p⌉ through floats is wrong for p = 2²⁹


@dataclass(frozen=True, slots=True)
class Formula:
    """One collective: how many latencies follow each other and what each rank sends, as expressions, and to whom."""

    steps: Any
    wire: Any
    way: Way = Way.CHAIN  # rings, and trees whose messages follow the same order

    @property
    def time(self) -> Any:
        return self.steps * ALPHA + self.wire / BANDWIDTH


# Rings, and a pipelined tree for the broadcast: standard forms, as NCCL and gloo run them.
FORMULAS: dict[CollectiveKind, Formula] = {
    CollectiveKind.ALL_REDUCE: Formula(2 * (RANKS - 1), 2 * (RANKS - 1) / RANKS * BYTES),
    CollectiveKind.ALL_GATHER: Formula(RANKS - 1, (RANKS - 1) * BYTES),
    CollectiveKind.REDUCE_SCATTER: Formula(RANKS - 1, (RANKS - 1) / RANKS * BYTES),
    CollectiveKind.BROADCAST: Formula(CEIL_LOG2(RANKS), BYTES),
}


def steps(kind: CollectiveKind, ranks: int) -> float:
    """How many latencies one collective pays, one after the other."""
    return 0.0 if ranks == 1 else float(_compiled(kind)[0](ranks, 0.0))


def wire_bytes(kind: CollectiveKind, ranks: int, size: float) -> float:
    """What one rank sends over its link."""
    return 0.0 if ranks == 1 else float(_compiled(kind)[1](ranks, size))


def time_us(kind: CollectiveKind, ranks: int, size: float, alpha_us: float, gb_per_s: float) -> float:
    """How long one collective takes. A group of one rank has nothing to do."""
    return steps(kind, ranks) * alpha_us + wire_bytes(kind, ranks, size) / (gb_per_s * 1e3)


def way_of(kind: CollectiveKind) -> Way:
    """Who sends to whom at once while a collective runs."""
    return FORMULAS[kind].way


def format_formula(kind: CollectiveKind) -> str:
    """The formula as text, for a report."""
    return f"{kind.value}: {FORMULAS[kind].time}"


@cache
def _compiled(kind: CollectiveKind) -> tuple[Callable[[int, float], float], Callable[[int, float], float]]:
    names = [{"ceil_log2": _ceil_log2}, "math"]
    formula = FORMULAS[kind]
    return (
        _sympy.lambdify((RANKS, BYTES), formula.steps, modules=names),
        _sympy.lambdify((RANKS, BYTES), formula.wire, modules=names),
    )


def _ceil_log2(value: int) -> int:
    return math.ceil(value - 1).bit_length()
