"""Prove a lower bound on the step time of every plan of a workload.

A bucket with strategy o and n elements occupies stream s for at least a(o,s) + n r(o,s) (see `least_work`). For any
buckets, and any sharing of processors, which only slows work down:

- the compute stream runs backward, all updates and work for all buckets in sequence. The step takes at least
  backward + updates + a + Σ n r, because at least one bucket costs a, and each element costs the r of its strategy;
- buckets launch when their last gradient is ready, so other streams work for gradients k, k + 1, ... only after k is
  ready. The step takes at least ready(k) + a + Σ n r over these gradients + the tail (compute work after the last
  collective). Tails run in bucket order, so the last gradient's tail is the last of all.

The step is at least any weighted mean of these sums, with weights λ(s) that add up to 1. In this mean an element with
strategy o costs Σ λ(s) r(o,s). The squared error, e(o) per element, must stay below a budget E. So for any price μ >= 0
of error, the mean is at least Σ n min over o of (Σ λ(s) r(o,s) + μ e(o)) - μ E. The limit of bursty elements
(`is_bursty`) has a second price. All λ, prices and k give a bound; a numerical search maximizes it. The step is also at
least the time until any single gradient has been updated.

The bound holds for every plan that `choose` may return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.plan.budget import is_bursty, strategy_error
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Content, Mode, error_limit, exact_ways, strategies, worth_offering
from fxcomp.plan.pins import NO_PINS, Pins
from fxcomp.plan.strategy import Strategy
from fxcomp.search.atoms import atoms_of
from fxcomp.search.least_work import COMPUTE, STREAMS, Least, LeastWork
from fxcomp.search.losses import Losses
from fxcomp.search.pinned import Pinned
from fxcomp.search.workload import Gradient, Workload

Numbers = NDArray[np.float64]

_FIRSTS = 8  # values of k, evenly spaced by elements
_STEPS = 8  # search steps per weight
_MOST_KINDS = 24  # maximum number of gradient kinds for which pairs of strategies are compared
_ROUNDING = 1e-9
"""Relative margin for rounding errors."""


def bound_us(
    workload: Workload, costs: CostTable, cluster: Cluster, mode: Mode, *, bursts: float = 1.0, pins: Pins = NO_PINS
) -> float:
    """Return a lower bound on every plan's step time, in µs. It is never below the step time without communication."""
    if cluster.world_size == 1 or not any(gradient.elements for gradient in workload.gradients):
        return workload.free_us
    losses = Losses(workload.gradients, cluster)
    pinned = Pinned.of(pins, workload, cluster, losses, offload=costs.offloads)
    bound = _Bound(workload, costs, cluster, mode, bursts, pinned)
    return max(workload.free_us, bound.best_us() * (1 - _ROUNDING))


@dataclass(frozen=True, slots=True)
class _BoundKind:
    """Gradients with the same work per element under every strategy."""

    gradients: tuple[int, ...]
    is_cut: bool
    """True if parts of a gradient may be in several buckets."""
    rates: Numbers
    """µs per element, shape [strategies, streams]."""
    is_allowed: NDArray[np.bool_]
    """Allowed strategies, shape [strategies]."""


class _Bound:
    def __init__(
        self, workload: Workload, costs: CostTable, cluster: Cluster, mode: Mode, bursts: float, pinned: Pinned
    ) -> None:
        self.workload, self.cluster, self.pinned = workload, cluster, pinned
        self.elements = np.array([gradient.elements for gradient in self.workload.gradients], float)
        self.ready_us = [gradient.ready_us for gradient in self.workload.gradients]
        is_spent = pinned.exceeds(workload.elements * error_limit(mode))
        others = Mode.LOSSLESS if is_spent else mode
        by_content = {content: strategies(others, cluster, content, offload=costs.offloads) for content in Content}
        self.types = tuple(dict.fromkeys(self.workload.types.values()))
        exact = [tuple(exact_ways(each, cluster, offload=costs.offloads)) for each in self.types]
        offered = [*by_content.values(), *(strand.strategies for strand in pinned.strands), *exact]
        self.strategies = tuple(dict.fromkeys(strategy for found in offered for strategy in found))
        itemsize = max(each.itemsize for each in self.types)
        self.work = LeastWork(costs, cluster, int(self.elements.sum()), itemsize)
        self.least = {
            each: [
                None if _depends_on_shapes(strategy) else self.work.of(strategy, each) for strategy in self.strategies
            ]
            for each in self.types
        }
        self.kinds = self._kinds(by_content)
        self.errors = np.array([strategy_error(each, cluster) for each in self.strategies])
        self.bursty = np.array([float(is_bursty(each, cluster)) for each in self.strategies])
        total = float(self.elements.sum())
        bounds = pinned.bounds(self.workload, self.workload.elements * error_limit(mode), bursts)
        self.lossable, self.burstable = bounds.lost, min(bounds.bursting, total)
        fixed = [[least.fixed_us for least in self._of_any(each)] for each in self.types]
        self.fixed: Numbers = np.array(fixed).min(axis=0)
        self.used = [s for s in range(len(STREAMS)) if s != COMPUTE and self._is_used(s)]
        self.after_us = self._after_us()

    def best_us(self) -> float:
        best = self._path_us()
        for first in self._firsts():
            sums = _BoundSums(self, first)
            weights = dict.fromkeys((*self.used, _ERROR, _BURSTS), 0.0)
            total, bursts = self.elements.sum(), self.bursty.any()
            limits = {_ERROR: self.errors.max() * total > self.lossable, _BURSTS: bursts and self.burstable < total}
            prices = [name for name, limited in limits.items() if limited]
            us = sums.us(weights)
            for name in (*sorted(self.used, key=lambda s: -sums.us({**weights, s: 1.0})), *prices, *self.used):
                us, weights[name] = sums.best_at(weights, name, us)
            best = max(best, us)
        return best

    def _kinds(self, by_content: dict[Content, tuple[Strategy, ...]]) -> list[_BoundKind]:
        atoms = atoms_of(self.workload, self.cluster.world_size)
        cut = {atom.number for atom in atoms if len(atom.extent) < atom.gradient.elements}
        groups: dict[tuple[object, ...], list[int]] = {}
        has_shapes = any(map(_depends_on_shapes, self.strategies))
        for number, gradient in enumerate(self.workload.gradients):
            shape = gradient.shape if has_shapes else ()
            strand = self.pinned.strand_of.get(gradient.name)
            kind = gradient.is_vector, gradient.element_type, shape, number in cut, strand and strand.text
            groups.setdefault(kind, []).append(number)
        return [self._kind(members, by_content, is_cut=members[0] in cut) for members in groups.values()]

    def _kind(
        self, members: Sequence[int], by_content: dict[Content, tuple[Strategy, ...]], *, is_cut: bool
    ) -> _BoundKind:
        gradient = self.workload.gradients[members[0]]
        own = Content.VECTORS if gradient.is_vector else Content.MATRICES
        strand = self.pinned.strand_of.get(gradient.name)
        offered = (*by_content[own], *by_content[Content.MIXED])
        worth = worth_offering(offered, gradient.element_type, self.cluster, offload=self.work.costs.offloads)
        allowed = set(worth if strand is None else strand.strategies)
        rates = [self._of(k, gradient, is_cut=is_cut).us_per_element for k in range(len(self.strategies))]
        return _BoundKind(
            tuple(members), is_cut, np.array(rates), np.array([each in allowed for each in self.strategies])
        )

    def _of(self, number: int, gradient: Gradient, *, is_cut: bool) -> Least:
        kind = gradient.element_type
        known = self.least[kind][number]
        return known or self.work.of(self.strategies[number], kind, gradient.shape, is_cut=is_cut)

    def _of_any(self, kind: ElementType) -> list[Least]:
        """Return each strategy's least work. Only `fixed_us` holds for all gradients of the type."""
        of_type = [gradient for gradient in self.workload.gradients if gradient.element_type is kind]
        gradient = max(of_type, key=lambda each: each.elements)
        return [self._of(k, gradient, is_cut=True) for k in range(len(self.strategies))]

    def _is_used(self, stream: int) -> bool:
        return bool(self.fixed[:, stream].any()) or any(bool(kind.rates[:, stream].any()) for kind in self.kinds)

    def _after_us(self) -> float:
        """Return a lower bound on the time after the last collective, to decode and update the last gradient, in µs."""
        last = len(self.elements) - 1
        is_cut = next(kind.is_cut for kind in self.kinds if last in kind.gradients)
        gradient = self.workload.gradients[last]
        tails = [self._of(k, gradient, is_cut=True) for k in range(len(self.strategies))]
        elements = min(1.0, self.elements[last]) if is_cut else self.elements[last]
        tail_us = min(least.tail_us + elements * least.tail_us_per_element for least in tails)
        return float(tail_us) + self._update_us(last)

    def _path_us(self) -> float:
        """Return a lower bound on the time until every gradient has been updated, in µs.

        A cut gradient counts with one element, because a bucket may hold only one.
        """
        best = 0.0
        for kind in self.kinds:
            fixed, rates = self.fixed.sum(axis=1)[kind.is_allowed], kind.rates.sum(axis=1)[kind.is_allowed]
            for k in kind.gradients:
                elements = min(1.0, self.elements[k]) if kind.is_cut else self.elements[k]
                way_us = float((fixed + rates * elements).min())
                best = max(best, self.ready_us[k] + way_us + self._update_us(k))
        return best

    def _update_us(self, number: int) -> float:
        workload = self.workload
        if workload.updates_wait:
            return workload.finish_us + sum(gradient.update_us for gradient in workload.gradients)
        return workload.gradients[number].update_us

    def _firsts(self) -> list[int]:
        total, found = self.elements.sum(), [0]
        gone = 0.0
        for number, elements in enumerate(self.elements):
            if gone >= len(found) * total / _FIRSTS:
                found.append(number)
            gone += elements
        return sorted({*found, len(self.elements) - 1})


_ERROR, _BURSTS = -1, -2
"""Keys of the weights of error and bursts; streams have keys from 0."""


class _BoundSums:
    """The bound as a function of the weights, for one gradient k (see the module)."""

    def __init__(self, bound: _Bound, first: int) -> None:
        self.bound = bound
        workload = bound.workload
        self.compute_us = workload.compute_us
        self.other_us = bound.ready_us[first] + bound.after_us
        self.rows: list[tuple[float, float, Numbers, NDArray[np.bool_]]] = []
        """Per kind: elements before k, elements from k on, rates, allowed strategies."""
        for kind in bound.kinds:
            before = sum(bound.elements[k] for k in kind.gradients if k < first)
            after = sum(bound.elements[k] for k in kind.gradients if k >= first)
            self.rows.append((float(before), float(after), kind.rates, kind.is_allowed))

    def us(self, weights: dict[int, float]) -> float:
        """Return the bound in µs. Streams' weights are relative to compute's, which is 1."""
        bound = self.bound
        whole = 1.0 + sum(weights[stream] for stream in bound.used)
        full = np.zeros(len(STREAMS))
        full[COMPUTE] = 1.0
        for stream in bound.used:
            full[stream] = weights[stream]
        full /= whole
        alone = np.zeros(len(STREAMS))
        alone[COMPUTE] = full[COMPUTE]
        error, burst = weights.get(_ERROR, 0.0), weights.get(_BURSTS, 0.0)
        priced = error * bound.errors + burst * bound.bursty
        us = full[COMPUTE] * self.compute_us + (1 - full[COMPUTE]) * self.other_us
        us -= error * bound.lossable + burst * bound.burstable
        fixed, later = bound.fixed @ full, np.zeros((0, len(priced)))
        counts: list[float] = []
        for before, after, rates, allowed in self.rows:
            if before:
                us += before * float((rates @ alone + priced)[allowed].min())
            if after:
                counts.append(after)
                later = np.vstack([later, np.where(allowed, rates @ full + priced, np.inf)])
        return float(us) + _cheapest(fixed, later, np.array(counts))

    def best_at(self, weights: dict[int, float], name: int, least: float) -> tuple[float, float]:

        def at(value: float) -> float:
            return self.us({**weights, name: value})

        scale = 1.0 if name >= 0 else least / max(1.0, float(self.bound.elements.sum()))
        best, value = least, weights[name]
        for exponent in range(-4, 5):
            tried = scale * 4.0**exponent
            us = at(tried)
            if us > best:
                best, value = us, tried
        return _refine(at, best, value) if value else (best, value)


def _cheapest(fixed: Numbers, rates: Numbers, counts: Numbers) -> float:
    """Return a lower bound on the time of `counts` elements of each kind, for any set of strategies.

    A set adds the fixed time of each strategy at least once. With three or more strategies, this is at least the sum of
    the three lowest fixed times.
    """
    least = float(counts @ rates.min(axis=1))
    one = float((fixed + counts @ rates).min())
    lowest = np.sort(fixed)
    if len(fixed) < 2 or one <= lowest[0] + lowest[1] + least:
        return one
    several = float(lowest[:3].sum()) + least if len(fixed) > 2 else math.inf
    if len(counts) > _MOST_KINDS:
        return min(one, float(lowest[:2].sum()) + least)
    left, right = np.triu_indices(len(fixed), 1)
    pairs = fixed[left] + fixed[right] + counts @ np.minimum(rates[:, left], rates[:, right])
    return min(one, several, float(pairs.min()))


def _refine(at: Callable[[float], float], best: float, value: float) -> tuple[float, float]:
    step = 2.0
    for _ in range(_STEPS):
        for tried in (value * step, value / step):
            us = at(tried)
            if us > best:
                best, value = us, tried
        step = math.sqrt(step)
    return best, value


def _depends_on_shapes(strategy: Strategy) -> bool:
    return any(compressor.facts.needs_whole_parameters for compressor in strategy.compressors)
