"""What a collective costs on ideal links: one table of formulas, from which every price and break-even comes.

    steps · α + messages · o + wire / B

p is the number of ranks. n is what the collective works on in bytes: for a gather what *one* rank contributes, for the
others what a rank has in full. α is a step's latency, o what the processor spends on a message, and B the bandwidth
that one rank gets, in bytes a µs; a `Reach` knows all three for ranks that sit somewhere.

The forms are those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in
MPICH" (2005), but for trees, which pass large messages on in pieces while more come in, as NCCL's do (P. Sanders, J.
Speck and J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, cast

import sympy  # pyright: ignore[reportMissingTypeStubs]

from fxcomp.cluster.cluster import Reach, Way, format_gbit
from fxcomp.plan.strategy import CollectiveKind

_sympy = cast(Any, sympy)  # untyped

ALPHA, MESSAGE, BANDWIDTH, RANKS, BYTES = _sympy.symbols("α o B p n", positive=True)
CEIL_LOG2 = _sympy.Function("ceil_log2")  # ⌈log₂ p⌉ through floats is wrong for p = 2²⁹


class Algorithm(Enum):
    """How a collective is run."""

    RING = "ring"
    TREE = "tree"  # pipelined
    HALVING_DOUBLING = "halving_doubling"  # in Bruck's form, for any number of ranks
    DIRECT = "direct"  # every message at once, straight to whom it is for

    __hash__ = object.__hash__  # Enum's own runs in Python


@dataclass(frozen=True, slots=True)
class Formula:
    """One algorithm: steps one after the other, messages and bytes of the busiest rank, and who sends to whom."""

    steps: Any
    messages: Any
    wire: Any
    way: Way

    @property
    def time(self) -> Any:
        """In µs."""
        return self.steps * ALPHA + self.messages * MESSAGE + self.wire / BANDWIDTH


_others = RANKS - 1
_doublings = CEIL_LOG2(RANKS)
_share = _others / RANKS * BYTES
_TREE_SHARE = _sympy.Rational(9, 10)  # of a ring's bandwidth: NCCL tuning.cc
_A, _K = Algorithm, CollectiveKind

FORMULAS: dict[CollectiveKind, dict[Algorithm, Formula]] = {
    _K.ALL_REDUCE: {
        _A.RING: Formula(2 * _others, 2 * _others, 2 * _share, Way.CHAIN),
        _A.TREE: Formula(2 * _doublings, 2 * _doublings, 2 * BYTES / _TREE_SHARE, Way.CHAIN),
        _A.HALVING_DOUBLING: Formula(2 * _doublings, 2 * _doublings, 2 * _share, Way.DOUBLING),
    },
    _K.REDUCE_SCATTER: {
        _A.RING: Formula(_others, _others, _share, Way.CHAIN),
        _A.HALVING_DOUBLING: Formula(_doublings, _doublings, _share, Way.DOUBLING),
    },
    _K.ALL_GATHER: {
        _A.RING: Formula(_others, _others, _others * BYTES, Way.CHAIN),
        _A.HALVING_DOUBLING: Formula(_doublings, _doublings, _others * BYTES, Way.DOUBLING),
        _A.DIRECT: Formula(_sympy.Integer(1), _others, _others * BYTES, Way.PAIRS),
    },
    _K.ALL_TO_ALL: {_A.DIRECT: Formula(_sympy.Integer(1), _others, _share, Way.PAIRS)},
    _K.BROADCAST: {_A.TREE: Formula(_doublings, _doublings, BYTES, Way.CHAIN)},
    _K.REDUCE: {_A.TREE: Formula(_doublings, _doublings, BYTES, Way.CHAIN)},
    _K.GATHER: {_A.DIRECT: Formula(_sympy.Integer(1), _others, _others * BYTES, Way.ROOT)},
    _K.POINT_TO_POINT: {_A.DIRECT: Formula(_sympy.Integer(1), _sympy.Integer(1), BYTES, Way.ONE)},
}
"""Every collective, with the algorithm first that prices it where nobody says which one runs."""

CHOSEN_BY_SIZE: dict[CollectiveKind, tuple[Algorithm, ...]] = {_K.ALL_REDUCE: (_A.RING, _A.TREE)}
"""Where a library takes the faster one for each size. # NCCL tuning.cc; gloo keeps to rings, and is measured live"""


# Prices


def default_algorithm(kind: CollectiveKind) -> Algorithm:
    """The algorithm by which a collective is priced unless another is named: rings, and trees where one has it all."""
    return next(iter(FORMULAS[kind]))


def steps(kind: CollectiveKind, ranks: int, algorithm: Algorithm | None = None) -> float:
    """How many latencies one collective pays, one after the other."""
    return _compiled(kind, algorithm).counts(ranks)[0]


def messages(kind: CollectiveKind, ranks: int, algorithm: Algorithm | None = None) -> float:
    """How many messages the busiest rank sends or receives, one after the other."""
    return _compiled(kind, algorithm).counts(ranks)[1]


def wire_bytes(kind: CollectiveKind, ranks: int, size: float, algorithm: Algorithm | None = None) -> float:
    """What one rank sends over its link."""
    return _compiled(kind, algorithm).counts(ranks)[2] * size


def time_us(
    kind: CollectiveKind,
    ranks: int,
    size: float,
    alpha_us: float,
    gb_per_s: float,
    message_us: float = 0.0,
    algorithm: Algorithm | None = None,
) -> float:
    """How long one collective takes, where one rank gets so many GB/s. A group of one rank has nothing to do."""
    latencies, sent, share = _compiled(kind, algorithm).counts(ranks)
    return latencies * alpha_us + sent * message_us + share * size / (gb_per_s * 1e3)


def reach_us(kind: CollectiveKind, size: float, reach: Reach, algorithm: Algorithm | None = None) -> float:
    """How long one collective takes among ranks that sit somewhere; by the faster algorithm, where one is chosen."""
    if algorithm is None and kind in CHOSEN_BY_SIZE:
        return min([_reach_us(kind, size, reach, chosen) for chosen in CHOSEN_BY_SIZE[kind]])
    return _reach_us(kind, size, reach, algorithm)


def chosen_algorithm(kind: CollectiveKind, size: float, reach: Reach) -> Algorithm:
    """The algorithm that prices a collective of this size among ranks that sit somewhere."""
    choices = CHOSEN_BY_SIZE.get(kind, (default_algorithm(kind),))
    return min(choices, key=lambda algorithm: _reach_us(kind, size, reach, algorithm))


def _reach_us(kind: CollectiveKind, size: float, reach: Reach, algorithm: Algorithm | None) -> float:
    speed = reach.gb_per_s(way_of(kind, algorithm))
    return time_us(kind, reach.ranks, size, reach.alpha_us, speed, reach.message_us, algorithm)


def way_of(kind: CollectiveKind, algorithm: Algorithm | None = None) -> Way:
    """Who sends to whom at once while a collective runs."""
    return _compiled(kind, algorithm).way


class _Compiled:
    """A formula as plain Python, with what it gave for each number of ranks: a search asks thousands of times."""

    __slots__ = ("_counts", "_known", "way")

    def __init__(self, formula: Formula) -> None:
        share = formula.wire.subs(BYTES, 1)  # every formula is proportional to n
        self._counts: Callable[[int], tuple[float, float, float]] = _sympy.lambdify(
            (RANKS,), (formula.steps, formula.messages, share), modules=_NAMES
        )
        self._known: dict[int, tuple[float, float, float]] = {1: (0.0, 0.0, 0.0)}
        self.way = formula.way

    def counts(self, ranks: int) -> tuple[float, float, float]:
        """Steps, messages, and wire bytes for each byte of n."""
        known = self._known.get(ranks)
        if known is None:
            latencies, sent, share = self._counts(ranks)
            known = self._known[ranks] = (float(latencies), float(sent), float(share))
        return known


@cache
def _compiled(kind: CollectiveKind, algorithm: Algorithm | None) -> _Compiled:
    return _Compiled(FORMULAS[kind][algorithm or default_algorithm(kind)])


def _ceil_log2(value: int) -> int:
    return math.ceil(value - 1).bit_length()


_NAMES = [{"ceil_log2": _ceil_log2}, "math"]


# By level


INNER, OUTER = _sympy.symbols("k h", positive=True)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a collective by level: among the k ranks inside, or the h units outside, over so many bytes."""

    kind: CollectiveKind
    is_inner: bool
    size: Any


HIERARCHICAL: dict[CollectiveKind, tuple[Stage, ...]] = {
    _K.ALL_REDUCE: (
        Stage(_K.REDUCE_SCATTER, True, BYTES),
        Stage(_K.ALL_REDUCE, False, BYTES / INNER),
        Stage(_K.ALL_GATHER, True, BYTES / INNER),
    ),
    _K.REDUCE_SCATTER: (Stage(_K.REDUCE_SCATTER, True, BYTES), Stage(_K.REDUCE_SCATTER, False, BYTES / INNER)),
    _K.ALL_GATHER: (Stage(_K.ALL_GATHER, False, BYTES), Stage(_K.ALL_GATHER, True, OUTER * BYTES)),
    _K.ALL_TO_ALL: (Stage(_K.ALL_TO_ALL, True, BYTES), Stage(_K.ALL_TO_ALL, False, BYTES)),
    _K.BROADCAST: (Stage(_K.BROADCAST, False, BYTES), Stage(_K.BROADCAST, True, BYTES)),
    _K.REDUCE: (Stage(_K.REDUCE, True, BYTES), Stage(_K.REDUCE, False, BYTES)),
    _K.GATHER: (Stage(_K.GATHER, True, BYTES), Stage(_K.GATHER, False, INNER * BYTES)),
}
"""Collectives made of two: inside each unit, and between units by ranks of the same place."""


def hierarchical_us(kind: CollectiveKind, size: float, reaches: Sequence[Reach]) -> float:
    """How long a collective takes by level: `reaches` from the ranks of a unit up, each over the units of the last."""
    if len(reaches) == 1:
        return reach_us(kind, size, reaches[0])
    inner, outer = reaches[0], reaches[1:]
    outside = math.prod(reach.ranks for reach in outer)
    us = 0.0
    for stage, size_of in _compiled_stages(kind):
        part = size_of(size, inner.ranks, outside)
        us += reach_us(stage.kind, part, inner) if stage.is_inner else hierarchical_us(stage.kind, part, outer)
    return us


def hierarchical_time(kind: CollectiveKind) -> Any:
    """The formula of a collective over two levels; α₀, o₀ and B₀ are inside, α₁, o₁ and B₁ between units."""
    total: Any = 0
    for stage in HIERARCHICAL[kind]:
        number = 0 if stage.is_inner else 1
        names = _sympy.symbols(f"α{'₀₁'[number]} o{'₀₁'[number]} B{'₀₁'[number]}", positive=True)
        formula = FORMULAS[stage.kind][default_algorithm(stage.kind)]
        there = {ALPHA: names[0], MESSAGE: names[1], BANDWIDTH: names[2]}
        ranks = INNER if stage.is_inner else OUTER
        total += formula.time.subs({**there, RANKS: ranks, BYTES: stage.size}, simultaneous=True)
    return total


@cache
def _compiled_stages(kind: CollectiveKind) -> list[tuple[Stage, Callable[[float, int, int], float]]]:
    return [(stage, _sympy.lambdify((BYTES, INNER, OUTER), stage.size, modules="math")) for stage in HIERARCHICAL[kind]]


# Break-even


RATE, COST, FIXED = _sympy.symbols("r c f", positive=True)

Between = tuple[float, float]
"""Above the first and below the second."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A compressor in a formula: dense bytes for each byte sent, µs a dense byte, and µs each time. With decoding."""

    rate: float
    us_per_byte: float
    fixed_us: float = 0.0
    kind: CollectiveKind = CollectiveKind.ALL_GATHER
    """How payloads meet."""
    all_reduce: Algorithm = Algorithm.RING
    """By which all_reduces run, dense ones and payloads'."""


def saved(kind: CollectiveKind, all_reduce: Algorithm = Algorithm.RING) -> Any:
    """What compressing saves of a dense all_reduce, as an expression: payloads of n/r meet in a collective `kind`."""
    dense = FORMULAS[CollectiveKind.ALL_REDUCE][all_reduce].time
    algorithm = all_reduce if kind is CollectiveKind.ALL_REDUCE else default_algorithm(kind)
    compressed = FORMULAS[kind][algorithm].time.subs(BYTES, BYTES / RATE)
    return _sympy.expand(dense - compressed - COST * BYTES - FIXED)


def pays_at_gb_per_s(
    compression: Compression, ranks: int, size: float, alpha_us: float, message_us: float = 0.0
) -> Between | None:
    """The bandwidths of a rank, in GB/s, at which compressing `size` dense bytes is faster; None if at none."""
    known = (ranks, compression.rate, compression.us_per_byte, compression.fixed_us, alpha_us, message_us)
    found = _where_positive(compression, BANDWIDTH, (*known, size))
    return None if found is None else (found[0] / 1e3, found[1] / 1e3)


def pays_at_bytes(
    compression: Compression, ranks: int, alpha_us: float, gb_per_s: float, message_us: float = 0.0
) -> Between | None:
    """The dense sizes, in bytes, at which compressing is faster where a rank gets so many GB/s; None if at none."""
    known = (ranks, compression.rate, compression.us_per_byte, compression.fixed_us, alpha_us, message_us)
    return _where_positive(compression, BYTES, (*known, gb_per_s * 1e3))


def _where_positive(compression: Compression, unknown: Any, known: tuple[float, ...]) -> Between | None:
    """Where the saving is above 0. It has one root at most, being linear in n and in 1/B."""
    value, root_of = _solved(compression.kind, compression.all_reduce, unknown)
    try:
        root = float(root_of(*known))
    except ZeroDivisionError:  # what is asked for does not matter
        root = math.nan
    if not 0 < root < math.inf:
        return (0.0, math.inf) if value(1.0, *known) > 0 else None
    return (0.0, root) if value(root / 2, *known) > 0 else (root, math.inf)


@cache
def _solved(
    kind: CollectiveKind, all_reduce: Algorithm, unknown: Any
) -> tuple[Callable[..., float], Callable[..., float]]:
    """The saving as a function of the unknown and the rest, and its root as one of the rest."""
    rest = (RANKS, RATE, COST, FIXED, ALPHA, MESSAGE, BYTES if unknown is BANDWIDTH else BANDWIDTH)
    expression = saved(kind, all_reduce)
    slope, level = expression.coeff(unknown, -1 if unknown is BANDWIDTH else 1), expression.coeff(unknown, 0)
    root = -slope / level if unknown is BANDWIDTH else -level / slope
    return (
        _sympy.lambdify((unknown, *rest), expression, modules=_NAMES),
        _sympy.lambdify(rest, root, modules=_NAMES),
    )


# Text


def format_reach_us(kind: CollectiveKind, size: float, reach: Reach) -> str:
    """`reach_us` as text: the formula, and the numbers put in."""
    algorithm = chosen_algorithm(kind, size, reach)
    speed = reach.gb_per_s(way_of(kind, algorithm))
    return format_price(kind, reach.ranks, size, reach.alpha_us, speed, reach.message_us, algorithm)


def format_formula(kind: CollectiveKind, algorithm: Algorithm | None = None) -> str:
    """The formula as text: `all_reduce ring: 2(p-1)α + 2(p-1)/p·n/B`."""
    algorithm = algorithm or default_algorithm(kind)
    return f"{kind.value} {algorithm.value}: {_time_text(FORMULAS[kind][algorithm], with_messages=False)}"


def format_price(
    kind: CollectiveKind,
    ranks: int,
    size: float,
    alpha_us: float,
    gb_per_s: float,
    message_us: float = 0.0,
    algorithm: Algorithm | None = None,
) -> str:
    """The formula with the numbers put in: `... = 6·25 us + 1.5·8 MB/3.12 GB/s = 4 ms`."""
    if ranks == 1:
        return f"{kind.value}: one rank, nothing to do"
    algorithm = algorithm or default_algorithm(kind)
    latencies, sent, share = _compiled(kind, algorithm).counts(ranks)
    parts = [f"{latencies:g}·{alpha_us:.3g} us"]
    parts += [f"{sent:g}·{message_us:.3g} us"] if message_us else []
    parts.append(f"{share:.4g}·{size / 1e6:.3g} MB/{format_gbit(gb_per_s)}")
    us = time_us(kind, ranks, size, alpha_us, gb_per_s, message_us, algorithm)
    text = _time_text(FORMULAS[kind][algorithm], with_messages=message_us > 0)
    return f"{kind.value} {algorithm.value}: {text} = {' + '.join(parts)} = {us / 1e3:.4g} ms"


def _time_text(formula: Formula, *, with_messages: bool) -> str:
    terms = [_times(formula.steps, "α")]
    terms += [_times(formula.messages, "o")] if with_messages else []
    share = _times(formula.wire / BYTES, "n")
    return " + ".join([*terms, f"{share}/B"])


def _times(factor: Any, symbol: str) -> str:
    """A factor before a symbol, the way it is written by hand: `2(p-1)α`, `2(p-1)/p·n`."""
    text = str(_sympy.factor(factor)).replace(" ", "").replace("*", "").replace("ceil_log2(p)", "⌈log₂ p⌉")
    text = "" if text == "1" else f"({text})" if text == "p-1" else text
    return f"{text}·{symbol}" if "/" in text else f"{text}{symbol}"
