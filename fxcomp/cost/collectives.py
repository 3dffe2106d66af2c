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

from fxcomp.cluster import Cluster, Level
from fxcomp.strategy import CollectiveKind

_sympy = cast(Any, sympy)  # untyped

ALPHA, BANDWIDTH, RANKS, BYTES = _sympy.symbols("α B p n", positive=True)
CEIL_LOG2 = _sympy.Function("ceil_log2")  # ⌈log₂ p⌉ through floats is wrong for p = 2²⁹


@dataclass(frozen=True, slots=True)
class Formula:
    """One collective: how many latencies follow each other, and what each rank sends, both as expressions."""

    steps: Any
    wire: Any

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


def rank_gb_per_s(level: Level, cluster: Cluster) -> float:
    """The bandwidth that one rank's ring has at a level.

    Between hosts the k ranks of a host run k collectives at once and share their NIC. A flat ring over all ranks
    enters and leaves each host once, so it has the NIC to itself.
    """
    full = cluster.link_at(level).gb_per_s
    return full / cluster.ranks_per_host if level is Level.INTER else full


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
