"""Find the tensors whose compression increases the loss by more than the noise, by bisection.

    everything dense, everything compressed      the whole cost, and its noise
    one half compressed, the other half dense    the cost of a half; a half with a cost is split again
    neither half has a cost by itself            both are reported together

Trainings are compared seed by seed, on the same batches. The noise is the half-width of the 95 % confidence interval of
the mean over seeds. The interval uses the standard deviation of the comparison, or the median standard deviation of all
comparisons so far if the median is larger.

A diverging seed has no cost and is counted separately. Tensors are guilty of divergence only if all seeds diverge,
because one seed may diverge by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxcomp.errors import BadOption

Train = Callable[[Collection[str], int], float]
"""Function of tensor names and a seed: train with only the named tensors compressed, and return the final loss."""

LEAST = 1e-4
"""Minimum noise, relative to the loss: another summation order changes the loss by as much."""

_STUDENT = (math.inf, 12.7, 4.31, 3.19, 2.78, 2.58, 2.45, 2.37, 2.31, 2.27)
"""One-sided 97.5 % quantiles of Student's t, by degrees of freedom from 0."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Increase of the loss by compressing some tensors, as a fraction of the dense loss of the same seed."""

    cost: float
    """Mean increase over converging seeds; infinite if no seed converges."""
    noise: float
    """Half-width of the confidence interval of `cost`; infinite for one converging seed."""
    diverging: int = 0

    def counts(self, least: float = 0.0) -> bool:
        """Return True if the cost exceeds the noise and `least`."""
        return self.cost > max(self.noise, least)

    @classmethod
    def of(cls, differences: Sequence[float], usual: float = 0.0) -> Comparison:
        """Average `differences`, one per seed. `usual` is the median standard deviation of all comparisons so far."""
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
    """Return (other - dense) / |dense| for the losses of each seed."""
    return [(after - before) / (abs(before) or 1.0) for before, after in zip(dense, other, strict=True)]


@dataclass(frozen=True, slots=True)
class SearchFindings:
    """Losses, costs and guilty tensors of a search."""

    dense: tuple[float, ...]
    chosen: tuple[float, ...]
    in_all: Comparison
    guilty: Mapping[tuple[str, ...], Comparison] = field(default_factory=dict[tuple[str, ...], Comparison])
    """Smallest sets of tensors whose compression has a cost above the noise. The values are the costs."""
    rest: Comparison | None = None
    """Cost of compressing all tensors that are not guilty; None if no tensor is guilty, or all are."""
    trainings: int = 0


NOTHING_TO_SEARCH = SearchFindings((), (), Comparison(0.0, 0.0))


def most_trainings(names: int, seeds: int) -> tuple[int, int]:
    """Return the maximum number of trainings to find one guilty tensor, and to find each further guilty tensor."""
    each = 2 * math.ceil(math.log2(names)) + 1  # two halves per level, and the rest
    return seeds * (2 + each), seeds * each


def search(names: Sequence[str], train: Train, seeds: int, least: float = 0.0) -> SearchFindings:
    """Find guilty tensors until the cost of compressing the rest is at most the noise, or at most `least`.

    `seeds` is at least 2. No training runs twice. Raises BadOption if all seeds have the same dense loss.
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
