"""Search for the tensors whose compression costs the loss, by halves; stop where noise is larger than a difference.

    everything dense, everything compressed      the cost in all, and the noise of it
    one half compressed, the other half dense    the cost of a half; whichever costs something is halved again
    neither half costs something by itself       the two are named together: no smaller set can be told

A comparison is made seed by seed: both trainings see the same batches. Its noise is how far the mean of so few seeds
may be off by chance. A few seeds may lie close together by chance, too, so their spread counts as no smaller than that
of other comparisons does (its median).

A seed that diverges has no cost: it is counted by itself. Only where all seeds of some tensors diverge are these
guilty of it, because a divergence by chance, in one seed, would name somebody in each search.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxcomp.errors import BadOption

Train = Callable[[Collection[str], int], float]
"""Trains with these tensors compressed and all others dense, from one seed; returns the loss at the end."""

LEAST = 1e-4
"""A smaller cost is none: sums in another order make as much."""

_STUDENT = (math.inf, 12.7, 4.31, 3.19, 2.78, 2.58, 2.45, 2.37, 2.31, 2.27)
"""By degrees of freedom, from 0: a mean of seeds without a cost is above so many standard errors in 1 of 40 cases."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The cost of compressing some tensors, as a share of the dense loss of each seed, and its noise."""

    cost: float
    """Of the seeds that do not diverge; infinite where all do."""
    noise: float
    """Infinite where one seed is left: it has none to be compared with."""
    diverging: int = 0
    """The seeds that diverge."""

    def counts(self, least: float = 0.0) -> bool:
        """Return whether the cost is above the noise, and the `least` that is searched for."""
        return self.cost > max(self.noise, least)

    @classmethod
    def of(cls, differences: Sequence[float], usual: float = 0.0) -> Comparison:
        """Compare seed by seed; `usual` is the spread of such differences elsewhere."""
        finite = finite_of(differences)
        diverging, freedom = len(differences) - len(finite), len(finite) - 1
        if not finite:
            return cls(math.inf, LEAST, diverging)
        if freedom == 0:
            return cls(finite[0], math.inf, diverging)
        factor = _STUDENT[freedom] if freedom < len(_STUDENT) else 2.0 + 2.5 / freedom
        noise = factor * max(usual, statistics.stdev(finite)) / math.sqrt(len(finite))
        return cls(statistics.mean(finite), max(noise, LEAST), diverging)


def finite_of(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def differences(dense: Sequence[float], other: Sequence[float]) -> list[float]:
    """Compare losses seed by seed, each as a share of dense's, whose scale a seed's batches make."""
    return [(after - before) / (abs(before) or 1.0) for before, after in zip(dense, other, strict=True)]


@dataclass(frozen=True, slots=True)
class SearchFindings:
    """The result of a search."""

    dense: tuple[float, ...]
    chosen: tuple[float, ...]
    """The loss of each seed."""
    in_all: Comparison
    guilty: Mapping[tuple[str, ...], Comparison] = field(default_factory=dict[tuple[str, ...], Comparison])
    """Tensors whose compression costs something; several where no smaller set could be told."""
    rest: Comparison | None = None
    """The cost of what stays compressed once the guilty are dense; None where nothing is left."""
    trainings: int = 0


NOTHING_TO_SEARCH = SearchFindings((), (), Comparison(0.0, 0.0))
"""The result where the plan compresses nothing."""


def most_trainings(names: int, seeds: int) -> tuple[int, int]:
    """Return how many trainings a search makes at most where one tensor is guilty, and for each further one."""
    each = 2 * math.ceil(math.log2(names)) + 1  # two halves at each border, and the rest
    return seeds * (2 + each), seeds * each


def search(names: Sequence[str], train: Train, seeds: int, least: float = 0.0) -> SearchFindings:
    """Find what costs something, until what is left costs nothing that noise could not. Raises BadOption.

    Seeds are two or more: one has no noise. A cost up to `least` is not searched for. Each training is made once.
    """
    known, spreads = dict[frozenset[str], tuple[float, ...]](), list[float]()

    def losses(compressed: Collection[str]) -> tuple[float, ...]:
        key = frozenset(compressed)
        if key not in known:
            known[key] = tuple(train(key, seed) for seed in range(seeds))
        return known[key]

    def cost(compressed: Sequence[str]) -> Comparison:
        found = differences(losses(()), losses(compressed))
        finite = finite_of(found)
        if len(finite) > 1:
            spreads.append(statistics.stdev(finite))
        return Comparison.of(found, statistics.median(spreads) if spreads else 0.0)

    def smallest(within: Sequence[str], found: Comparison) -> dict[tuple[str, ...], Comparison]:
        """Find the smallest sets within some tensors that cost something together."""
        smaller: dict[tuple[str, ...], Comparison] = {}
        if len(within) > 1:
            middle = len(within) // 2
            halves = [(half, cost(half)) for half in (within[:middle], within[middle:])]
            for half, costs in halves:
                if costs.counts(least):
                    smaller |= smallest(half, costs)
        return smaller or {tuple(within): found}

    dense = losses(())
    if len(set(dense)) == 1:
        raise BadOption(
            f"seeds change nothing in this job: without compression each of {seeds} ends with the loss {dense[0]:.9g},"
            " to the bit, and so there is no noise to compare a cost with.\n"
            "  Let next_batch(step, rank) draw other batches for other steps: each seed is given steps of its own."
            " Random numbers may come from the default generator, which is seeded after the job is loaded."
        )
    chosen = losses(names)
    in_all = rest = cost(names)
    guilty: dict[tuple[str, ...], Comparison] = {}
    left = list(names)
    while left and rest.counts(least):
        guilty |= smallest(left, rest)
        left = [name for name in left if not any(name in each for each in guilty)]
        rest = cost(left)
    return SearchFindings(dense, chosen, in_all, guilty, rest if guilty and left else None, seeds * len(known))
