"""Prices of collectives on ideal links.

    steps · α + messages · o + wire / B

p is the number of ranks, and n the input in bytes: for a gather *one* rank's contribution, otherwise a rank's full
tensor. α is a step's latency, o the processor time of a message, and B the bandwidth of one rank in bytes per µs; a
`GroupTopology` provides all three. A rooted collective counts the root's messages and bytes, because the root's link is
the slowest; the root is the group's first rank.

The formulas are from R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in
MPICH" (2005). Trees are pipelined as in NCCL (P. Sanders, J. Speck and J. L. Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, cast

import sympy  # pyright: ignore[reportMissingTypeStubs]

from fxcomp.cluster.link import format_gbit
from fxcomp.cluster.topology import GroupTopology, TrafficPattern
from fxcomp.plan.kinds import CollectiveKind

_sympy = cast(Any, sympy)  # untyped

ALPHA, MESSAGE, BANDWIDTH, RANKS, BYTES = _sympy.symbols("α o B p n", positive=True)
CEIL_LOG2 = _sympy.Function("ceil_log2")  # ⌈log₂ p⌉ in floats is wrong for p = 2²⁹


class Library(Enum):
    GLOO = "gloo"  # on the host; fxcomp implements concurrent transfers
    NCCL = "nccl"  # between GPUs; formulas not verified

    __hash__ = object.__hash__  # Enum's own runs in Python


class Algorithm(Enum):
    RING = "ring"
    TREE = "tree"  # pipelined
    HALVING_DOUBLING = "halving_doubling"  # Bruck's form, for any number of ranks
    DIRECT = "direct"  # all messages at once, straight to their receivers

    __hash__ = object.__hash__  # Enum's own runs in Python


@dataclass(frozen=True, slots=True)
class Formula:
    """Cost of one algorithm: sequential steps, messages and bytes of the busiest rank, and traffic pattern."""

    steps: Any
    messages: Any
    wire: Any
    pattern: TrafficPattern

    @property
    def time(self) -> Any:
        return self.steps * ALPHA + self.messages * MESSAGE + self.wire / BANDWIDTH


_one, _others = _sympy.Integer(1), RANKS - 1
_doublings = CEIL_LOG2(RANKS)
_share = _others / RANKS * BYTES
_TREE_SHARE = _sympy.Rational(9, 10)  # fraction of a ring's bandwidth: NCCL tuning.cc
_A, _K, _P = Algorithm, CollectiveKind, TrafficPattern

FORMULAS: dict[CollectiveKind, dict[Algorithm, Formula]] = {
    _K.ALL_REDUCE: {
        _A.RING: Formula(2 * _others, 2 * _others, 2 * _share, _P.CHAIN),
        _A.TREE: Formula(2 * _doublings, 2 * _doublings, 2 * BYTES / _TREE_SHARE, _P.TREE),
        _A.HALVING_DOUBLING: Formula(2 * _doublings, 2 * _doublings, 2 * _share, _P.DOUBLING),
    },
    _K.REDUCE_SCATTER: {
        _A.RING: Formula(_others, _others, _share, _P.CHAIN),
        _A.HALVING_DOUBLING: Formula(_doublings, _doublings, _share, _P.DOUBLING),
        _A.DIRECT: Formula(_one, _others, _share, _P.PAIRS),
    },
    _K.ALL_GATHER: {
        _A.RING: Formula(_others, _others, _others * BYTES, _P.CHAIN),
        _A.HALVING_DOUBLING: Formula(_doublings, _doublings, _others * BYTES, _P.DOUBLING),
        _A.DIRECT: Formula(_one, _others, _others * BYTES, _P.PAIRS),
    },
    _K.ALL_TO_ALL: {_A.DIRECT: Formula(_one, _others, _share, _P.PAIRS)},
    _K.BROADCAST: {
        _A.RING: Formula(_others, _one, BYTES, _P.CHAIN),
        _A.DIRECT: Formula(_one, _others, _others * BYTES, _P.ROOT),
    },
    _K.REDUCE: {
        _A.RING: Formula(_others, _one, BYTES, _P.CHAIN),
        _A.DIRECT: Formula(_one, _others, _others * BYTES, _P.ROOT),
    },
    _K.GATHER: {_A.DIRECT: Formula(_one, _others, _others * BYTES, _P.ROOT)},
    _K.POINT_TO_POINT: {_A.DIRECT: Formula(_one, _one, BYTES, _P.ONE)},
}
"""Algorithms of each collective; the first is the default."""

CANDIDATES: dict[Library, dict[CollectiveKind, tuple[Algorithm, ...]]] = {
    Library.GLOO: {
        _K.ALL_REDUCE: (_A.RING,),
        _K.ALL_GATHER: (_A.DIRECT, _A.RING),
        _K.REDUCE_SCATTER: (_A.DIRECT,),
        _K.ALL_TO_ALL: (_A.DIRECT,),
        _K.BROADCAST: (_A.DIRECT,),
        _K.REDUCE: (_A.DIRECT,),
        _K.GATHER: (_A.DIRECT,),
        _K.POINT_TO_POINT: (_A.DIRECT,),
    },
    Library.NCCL: {
        _K.ALL_REDUCE: (_A.RING, _A.TREE),
        _K.ALL_GATHER: (_A.RING,),
        _K.REDUCE_SCATTER: (_A.RING,),
        _K.ALL_TO_ALL: (_A.DIRECT,),
        _K.BROADCAST: (_A.RING,),
        _K.REDUCE: (_A.RING,),
        _K.GATHER: (_A.DIRECT,),
        _K.POINT_TO_POINT: (_A.DIRECT,),
    },
}
"""Algorithms that a library chooses from.

NCCL's are from its tuning.cc, gloo's from runtime/transport.py. With gloo, an all_gather is a ring if ranks share a
link, because a ring sends fewer bytes over it, otherwise direct. gloo's own broadcast of buffers is a binomial tree
(broadcast.cc); docs/costs.md has the price's error.
"""


# Prices


def default_algorithm(kind: CollectiveKind) -> Algorithm:
    return next(iter(FORMULAS[kind]))


def steps(kind: CollectiveKind, ranks: int, algorithm: Algorithm | None = None) -> float:
    return counts(kind, ranks, algorithm)[0]


def wire_bytes(kind: CollectiveKind, ranks: int, size: float, algorithm: Algorithm | None = None) -> float:
    return counts(kind, ranks, algorithm)[2] * size


def time_us(
    kind: CollectiveKind,
    ranks: int,
    size: float,
    alpha_us: float,
    gb_per_s: float,
    message_us: float = 0.0,
    algorithm: Algorithm | None = None,
) -> float:
    """Return the time of a collective, in µs; 0 for one rank. `gb_per_s` is the bandwidth of one rank."""
    latencies, sent, share = counts(kind, ranks, algorithm)
    return latencies * alpha_us + sent * message_us + share * size / (gb_per_s * 1e3)


def collective_us(
    kind: CollectiveKind,
    size: float,
    group: GroupTopology,
    algorithm: Algorithm | None = None,
    library: Library = Library.NCCL,
) -> float:
    """Return the time of a collective in a group, by default with the library's algorithm."""
    return _collective_us(kind, size, group, algorithm or chosen_algorithm(kind, size, group, library))


def chosen_algorithm(
    kind: CollectiveKind, size: float, group: GroupTopology, library: Library = Library.NCCL
) -> Algorithm:
    """Return the library's algorithm: NCCL's is the fastest for `size`, gloo's always the fastest for large sizes."""
    if library is Library.GLOO:
        return large_algorithm(kind, group, library)
    return _least(kind, library, lambda algorithm: _collective_us(kind, size, group, algorithm))


def _collective_us(kind: CollectiveKind, size: float, group: GroupTopology, algorithm: Algorithm) -> float:
    speed = group.gb_per_s(pattern_of(kind, algorithm))
    return time_us(kind, group.ranks, size, group.alpha_us, speed, group.message_us, algorithm)


def large_algorithm(kind: CollectiveKind, group: GroupTopology, library: Library) -> Algorithm:
    return _least(kind, library, lambda algorithm: _us_per_byte(kind, group, algorithm))


def _least(kind: CollectiveKind, library: Library, us: Callable[[Algorithm], float]) -> Algorithm:
    choices = CANDIDATES[library][kind]
    return choices[0] if len(choices) == 1 else min(choices, key=us)


def _us_per_byte(kind: CollectiveKind, group: GroupTopology, algorithm: Algorithm) -> float:
    return counts(kind, group.ranks, algorithm)[2] / group.gb_per_s(pattern_of(kind, algorithm))


@dataclass(frozen=True, slots=True)
class Likeness:
    """Conversion of a measured collective's time to another collective."""

    bytes_per_byte: float
    """Bytes of the measured collective that take as long as one byte of the other collective."""
    known_steps: float
    """Steps of the measured collective."""
    more_steps: float
    """Steps of the other collective, minus `known_steps`."""


def likeness(known: CollectiveKind, asked: CollectiveKind, group: GroupTopology, library: Library) -> Likeness:
    """Return the conversion from collective `known` to `asked`."""
    known_way, asked_way = (large_algorithm(kind, group, library) for kind in (known, asked))
    known_steps, asked_steps = (
        counts(*way)[0] for way in ((known, group.ranks, known_way), (asked, group.ranks, asked_way))
    )
    one_us = _us_per_byte(known, group, known_way)
    share = _us_per_byte(asked, group, asked_way) / one_us if one_us else 0.0
    return Likeness(share, known_steps, asked_steps - known_steps)


def stand_ins(kind: CollectiveKind, group: GroupTopology, library: Library) -> list[CollectiveKind]:
    """Return the collectives whose measurements may price `kind`; first, collectives with the same algorithm."""
    way = large_algorithm(kind, group, library)
    others = (_K.ALL_REDUCE, _K.ALL_GATHER, _K.ALL_TO_ALL)
    return sorted(others, key=lambda known: large_algorithm(known, group, library) is not way)


def added_bytes(kind: CollectiveKind, size: float, ranks: int, library: Library) -> float:
    """Return the bytes that fxcomp sums on the busiest rank, after gloo's reduce or reduce_scatter."""
    if ranks == 1 or library is not Library.GLOO:
        return 0.0
    return {_K.REDUCE: ranks * size, _K.REDUCE_SCATTER: size}.get(kind, 0.0)


def pattern_of(kind: CollectiveKind, algorithm: Algorithm | None = None) -> TrafficPattern:
    return _formula(kind, algorithm).pattern


def _formula(kind: CollectiveKind, algorithm: Algorithm | None) -> Formula:
    return FORMULAS[kind][algorithm or default_algorithm(kind)]


Counts = tuple[float, float, float]


@cache
def counts(kind: CollectiveKind, ranks: int, algorithm: Algorithm | None = None) -> Counts:
    """Return steps, messages, and wire bytes per input byte."""
    if ranks == 1:
        return 0.0, 0.0, 0.0
    latencies, sent, share = _compiled(kind, algorithm)(ranks)
    return float(latencies), float(sent), float(share)


@cache
def _compiled(kind: CollectiveKind, algorithm: Algorithm | None) -> Callable[[int], Counts]:
    formula = _formula(kind, algorithm)
    share = formula.wire.subs(BYTES, 1)  # formulas are proportional to n
    return _sympy.lambdify((RANKS,), (formula.steps, formula.messages, share), modules=_NAMES)


_NAMES: list[dict[str, Callable[[int], int]] | str] = [{"ceil_log2": lambda n: math.ceil(n - 1).bit_length()}, "math"]


# Text


def format_collective_us(
    kind: CollectiveKind, size: float, group: GroupTopology, library: Library = Library.NCCL, added_us: float = 0.0
) -> str:
    """Format `collective_us` as a formula with numbers; `added_us` is the time of summing `added_bytes`."""
    algorithm = chosen_algorithm(kind, size, group, library)
    speed = group.gb_per_s(pattern_of(kind, algorithm))
    text = format_price(kind, group.ranks, size, group.alpha_us, speed, group.message_us, algorithm)
    if not added_us:
        return text
    us = _collective_us(kind, size, group, algorithm)
    formula, numbers, _ = text.rsplit(" = ", 2)
    return f"{formula} + sum = {numbers} + {added_us:.3g} us = {(us + added_us) / 1e3:.4g} ms"


def format_price(
    kind: CollectiveKind,
    ranks: int,
    size: float,
    alpha_us: float,
    gb_per_s: float,
    message_us: float = 0.0,
    algorithm: Algorithm | None = None,
) -> str:
    """Format a formula with numbers: `... = 6·25 us + 1.5·8 MB/3.12 GB/s = 4 ms`."""
    if ranks == 1:
        return f"{kind.value}: one rank, nothing to do"
    algorithm = algorithm or default_algorithm(kind)
    latencies, sent, share = counts(kind, ranks, algorithm)
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
    """Format a factor and a symbol: `2(p-1)α`, `2(p-1)/p·n`."""
    text = str(_sympy.factor(factor)).replace(" ", "").replace("*", "").replace("ceil_log2(p)", "⌈log₂ p⌉")
    text = "" if text == "1" else f"({text})" if text == "p-1" else text
    return f"{text}·{symbol}" if "/" in text else f"{text}{symbol}"
