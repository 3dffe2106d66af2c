"""Find the fastest plan of a workload: uniform starts, a descent from the best of them, then a descent in finer cells.

Every start has one bucket size and one strategy, so no uniform plan is predicted to be faster than the result. The
descent changes one bucket at a time, then two (csrc/search.cpp). Of equally fast plans the smallest error wins.
The first descent joins thousands of gradients into 64 cells per strand, the second has a cell for each atom.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import attrgetter

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.plan.budget import is_bursty
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Content, worth_offering
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.atoms import Atom, atoms_of, joined
from fxcomp.search.descent.cells import Limits, Part, Parts, Strand, Value, strand_of
from fxcomp.search.descent.engine import Engine, engine_of
from fxcomp.search.descent.problem import Option, Problem, Problems
from fxcomp.search.descent.spent_starts import ALONE, QUICK, SHARED, kicks, spent_starts
from fxcomp.search.descent.templates import Setting
from fxcomp.search.losses import Losses
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Question, Terms, questions_of

MIB = 1 << 20
CAPS = (MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 25 * MIB, 64 * MIB, math.inf)
"""Maximum bucket sizes of the starts, in bytes."""

PRICES = (1 / 64, 64.0)
"""Search bounds for the price of error, as multiples of (saved time) / (error limit)."""

SPENT = 0.98
"""Fraction of the error limit that counts as used up."""

_CLOSE = 3  # maximum number of starts that `fastest` returns, if about as fast
_KEPT = 128  # maximum number of starts
_ERROR = 5e-3  # relative error of the search's prices
_LINES_ERROR = 1e-3  # the same without the rounding of shards
_ROUGH, _LISTED = 256, 16  # most buckets of all starts priced exactly: with rounding of shards, without


@dataclass(frozen=True, slots=True)
class Found:
    parts: Parts
    value: Value
    strands: tuple[Strand, ...]
    """Strands that `parts` refers to."""


by_value = attrgetter("value")


class PlanSearch:
    def __init__(self, question: Question, prices: StepPrices) -> None:
        self.question = question
        workload, cluster = prices.workload, prices.cluster
        atoms = atoms_of(workload, cluster.world_size if question.cuts else 1)
        pinned = question.pinned
        pinned_to = [pinned.strand_of.get(atom.gradient.name) for atom in atoms]
        free = [k for k, strand in enumerate(pinned_to) if strand is None]
        self.options: list[list[Option]] = []
        places: list[list[int]] = []
        for content, offered in question.choices.items():
            for each, found in _by_type([k for k in free if _may_hold(content, atoms[k])], atoms):
                places.append(found)
                worth = worth_offering(offered, each, cluster, offload=prices.costs.offloads)
                self.options.append([option_of(strategy, cluster) for strategy in worth])
        self._free = len(places)
        """Number of strands that are not pinned; they come first."""
        for strand in pinned.strands:
            for _, found in _by_type([k for k, each in enumerate(pinned_to) if each is strand], atoms):
                places.append(found)
                self.options.append([pinned_option(strategy, cluster) for strategy in strand.strategies])
        self.strands = tuple(strand_of([atoms[k] for k in found], found) for found in places)
        self.setting = Setting.of(prices)
        self._losses = question.losses or Losses(workload.gradients, cluster)
        self.problems = Problems(self._losses, self.strands, self.options, self.setting)
        self.at(prices)
        self.shares = bool(self.problem.shares)

    def at(self, prices: StepPrices) -> None:
        self.prices = prices
        self.problem = self.problems.at(prices, self.question.bounds)
        self.engine = self._engine(self.problem, self.strands)
        self._priced_shapes: list[tuple[Parts, list[Value]]] | None = None
        self._engine_of_whole: Engine | None = None

    def fastest(self, *, dense_only: bool) -> list[Found]:
        """Return improved plans and the best uniform plans that are nearly as fast, fastest first."""
        starts = self.starts(self._dense_options() if dense_only else range(len(self.options[0])))
        effort = SHARED if self.shares else ALONE
        first = effort.first._replace(dense_only=dense_only)
        varied = self._varied(starts, effort.starts)
        ends = sorted((self.improved(found.parts, first) for found in varied), key=by_value)
        then = effort.then._replace(dense_only=dense_only)
        ends += [self.improved(found.parts, then) for found in ends[: effort.improved]]
        if self.question.prices_errors and not dense_only:
            spent = spent_starts(self.problem, min(ends, key=by_value).parts)
            ends += [self.improved(parts, first) for parts in spent]
            ends += self.at_prices(min(ends, key=by_value), effort.first, effort.prices)
        best_us = min(found.value.us for found in ends)
        close = [found for found in starts[:_CLOSE] if found.value.us <= best_us * (1 + _ERROR)]
        distinct = {found.parts: found for found in (*close, *ends)}
        return sorted(distinct.values(), key=by_value)

    def at_prices(self, begun: Found, limits: Limits, rounds: int) -> Iterator[Found]:
        """Yield improved plans, while bisecting the price of error at which a plan just uses up the limit.

        Each round yields a plan improved with the price, and this plan improved further without a price.
        """
        lossable, found = self.question.bounds.lost, begun
        saved_us = self.starts(self._dense_options(), 1)[0].value.us - begun.value.us
        if not 0 < lossable < math.inf or saved_us <= 0:
            return
        low, high = (factor * saved_us / lossable for factor in PRICES)
        for _ in range(rounds):
            price = math.sqrt(low * high)
            found = self.improved(found.parts, limits._replace(price=price))
            low, high = (price, high) if found.value.lost > SPENT * lossable else (low, price)
            yield found
            yield self.improved(found.parts, limits)

    def quick(self, *, dense_only: bool) -> Found:
        best = self.starts(self._dense_options() if dense_only else range(len(self.options[0])))[0]
        return self.improved(best.parts, QUICK._replace(dense_only=dense_only))

    def starts(self, numbers: Sequence[int], most: int = _KEPT) -> list[Found]:
        """Return the fastest uniform plans; `numbers` are indices of the first strand's options.

        Buckets of strands that do not offer the strategy stay uncompressed. Pinned buckets use the same levels if
        possible.
        """
        values = [(values[number], shape, number) for shape, values in self._shapes() for number in numbers]
        values.sort(key=lambda start: start[0])
        return [
            Found(tuple(Part(*part[:3], self._alike[number][part.strand]) for part in shape), value, self.strands)
            for value, shape, number in values[:most]
        ]

    def _shapes(self) -> list[tuple[Parts, list[Value]]]:
        if self._priced_shapes is None:
            sizes = [strand.sizes() for strand in self.strands]
            borders = dict.fromkeys(tuple(_borders(each, cap) for each in sizes) for cap in CAPS)
            shapes = [self._shape(each) for each in borders]
            self._priced_shapes = [(shape, self.engine.with_options(shape, self._alike)) for shape in shapes]
        return self._priced_shapes

    @cached_property
    def _alike(self) -> list[tuple[int, ...]]:
        return [self._options_like(number) for number in range(len(self.options[0]))]

    def starts_below(self, us: float, *, dense_only: bool) -> list[Found]:
        """List the starts whose steps may be shorter than `us`.

        Prices include an average rounding of shards up to whole blocks. For small buckets, prices without rounding are
        compared with `us`.
        """
        starts = self.starts(self._dense_options() if dense_only else range(len(self.options[0])))
        limit = us * (1 + _LINES_ERROR)
        rounded_us = [len(found.parts) * self._rounded_us(found) for found in starts]
        is_rough = [more_us > _LINES_ERROR * found.value.us for found, more_us in zip(starts, rounded_us, strict=True)]
        close = [found for found, rough in zip(starts, is_rough, strict=True) if not rough and found.value.us < limit]
        far = zip(starts, is_rough, rounded_us, strict=True)
        rough = [found for found, rough, more_us in far if rough and found.value.us - more_us < limit]
        if rough:
            least = self._engine(self.problem.unrounded, self.strands).values([found.parts for found in rough])
            rough = [found for found, value in zip(rough, least, strict=True) if value.us < limit]
        return [*_of_buckets(rough, _ROUGH), *_of_buckets(close, _LISTED)]

    def _rounded_us(self, found: Found) -> float:
        """Return the most time, in µs, that rounding shards up adds to any bucket."""
        return max(
            (self.problem.rounded_us[option] for option in {(part.strand, part.option) for part in found.parts}),
            default=0.0,
        )

    @property
    def is_joined(self) -> bool:
        return any(strand.cells < len(strand.atoms) for strand in self.strands)

    def plan(self, found: Found) -> Plan:
        return self._plan(found.strands, found.parts)

    def _plan(self, strands: Sequence[Strand], parts: Parts) -> Plan:
        buckets: list[Bucket] = []
        for part in parts:
            members = joined(strands[part.strand].within(part.start, part.stop))
            names, sizes = tuple(gradient.name for gradient, _ in members), tuple(len(e) for _, e in members)
            starts = tuple(extent.start for _, extent in members)
            kind = strands[part.strand].element_type
            strategy = self.options[part.strand][part.option].strategy
            buckets.append(Bucket(names, sizes, strategy, starts, kind))
        return Plan(tuple(buckets))

    def others(self, found: Found) -> list[list[tuple[Strategy, float]]]:
        """List each bucket's other allowed strategies with the resulting step time in µs, fastest first."""
        engine = self.engine if found.strands is self.strands else self._engine_in_full()
        answers: list[list[tuple[Strategy, float]]] = []
        for part, values in zip(found.parts, engine.others(found.parts), strict=True):
            ranked = sorted((value, number) for number, value in enumerate(values) if number != part.option)
            strategies = [option.strategy for option in self.options[part.strand]]
            answers.append([(strategies[number], value.us) for value, number in ranked if math.isfinite(value.us)])
        return answers

    def in_full(self, found: Found, *, dense_only: bool) -> Found:
        """Improve a plan and the best starts with one cell per atom, then leave local minima by `kicks`."""
        strands, effort = self._whole, SHARED if self.shares else ALONE
        engine = self._engine_in_full()
        offered = self._dense_options() if dense_only else range(len(self.options[0]))
        starts = self.starts(offered)

        def improved(parts: Parts, limits: Limits) -> Found:
            parts, _ = engine.improve(parts, limits._replace(dense_only=dense_only))
            return Found(parts, engine.values([parts])[0], strands)

        again = starts[: effort.improved] if self.is_joined else ()
        best = min([improved(self._spread(each.parts), effort.in_full) for each in (found, *again)], key=by_value)
        tails = [option for option in dict.fromkeys(map(self._first_option, starts)) if option is not None]
        for _ in range(effort.rounds):
            ends = [improved(parts, effort.kicked) for parts in kicks(best.parts, strands, tails[: effort.tails])]
            kicked = min(ends, key=by_value, default=best)
            if not kicked.value.beats(best.value):
                break
            best = kicked
        return best

    def _spread(self, parts: Parts) -> Parts:
        borders = [strand.borders for strand in self.strands]
        return tuple(
            part._replace(start=borders[part.strand][part.start], stop=borders[part.strand][part.stop])
            for part in parts
        )

    def _shape(self, borders: Sequence[Sequence[tuple[int, int]]]) -> Parts:
        parts = [Part(strand, start, stop, 0) for strand, each in enumerate(borders) for start, stop in each]
        return tuple(sorted(parts, key=lambda part: self.strands[part.strand].last(part.stop - 1)))

    def _options_like(self, number: int) -> tuple[int, ...]:
        """Return, for each strand, the option with the strategy that is nearest to the first strand's `number`."""
        wanted = self.options[0][number].strategy
        levels = _levels(wanted)

        def like(offered: Sequence[Option]) -> int:
            same = (k for k, other in enumerate(offered) if other.strategy == wanted)
            alike = (k for k, other in enumerate(offered) if other.is_pinned and _levels(other.strategy) == levels)
            plain = (k for k, other in enumerate(offered) if other.strategy == wanted.uncompressed)
            return next(itertools.chain(same, alike, plain), 0)

        return tuple(map(like, self.options))

    def _first_option(self, found: Found) -> int | None:
        return next((part.option for part in found.parts if part.strand < self._free), None)

    def _varied(self, starts: Sequence[Found], count: int) -> list[Found]:
        """Return up to `count` starts: half of them the best, the others the best of further strategies."""
        taken = list(starts[: (count + 1) // 2])
        strategies = set(map(self._first_option, taken))
        for found in starts:
            option = self._first_option(found)
            if len(taken) < count and option not in strategies:
                strategies.add(option)
                taken.append(found)
        return taken

    def _dense_options(self) -> list[int]:
        return [number for number, option in enumerate(self.options[0]) if option.strategy.is_dense]

    def improved(self, parts: Parts, limits: Limits) -> Found:
        found, _ = self.engine.improve(parts, limits)
        return Found(found, self.engine.values([found])[0], self.strands)

    @cached_property
    def _whole(self) -> tuple[Strand, ...]:
        return tuple(strand.whole() for strand in self.strands)

    def _engine(self, problem: Problem, strands: Sequence[Strand]) -> Engine:
        return engine_of(problem, partial(self._plan, strands), self.prices)

    def _engine_in_full(self) -> Engine:
        if not self.is_joined:
            return self.engine
        if self._engine_of_whole is None:
            problems = Problems(self._losses, self._whole, self.options, self.setting)
            self._engine_of_whole = self._engine(problems.at(self.prices, self.question.bounds), self._whole)
        return self._engine_of_whole


def searches_of(prices: StepPrices, terms: Terms) -> list[PlanSearch]:
    return [PlanSearch(question, prices) for question in questions_of(prices, terms)]


@lru_cache(maxsize=4096)
def option_of(strategy: Strategy, cluster: Cluster) -> Option:
    return Option(strategy, is_bursty(strategy, cluster))


def pinned_option(strategy: Strategy, cluster: Cluster) -> Option:
    return replace(option_of(strategy, cluster), is_pinned=True)


def _levels(strategy: Strategy) -> frozenset[Level]:
    return frozenset(step.level for step in strategy.collectives)


def _of_buckets(starts: Sequence[Found], most: int) -> list[Found]:
    counts = itertools.accumulate(len(found.parts) for found in starts)
    return [found for found, count in zip(starts, counts, strict=True) if count <= most]


def _may_hold(content: Content, atom: Atom) -> bool:
    return content is Content.MIXED or atom.gradient.is_vector == (content is Content.VECTORS)


def _by_type(places: Sequence[int], atoms: Sequence[Atom]) -> list[tuple[ElementType, list[int]]]:
    """Group atoms' indices by element type, most bytes first. Without atoms, return one empty group."""
    found: dict[ElementType, list[int]] = {}
    for k in places:
        found.setdefault(atoms[k].gradient.element_type, []).append(k)

    def size(share: tuple[ElementType, list[int]]) -> int:
        return share[0].itemsize * sum(atoms[k].elements for k in share[1])

    return sorted(found.items(), key=size, reverse=True) or [(ElementType.F32, [])]


def _borders(sizes: Sequence[int], cap: float) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    begun, size = 0, 0
    for k, more in enumerate(sizes):
        if k > begun and size + more > cap:
            found.append((begun, k))
            begun, size = k, 0
        size += more
    return (*found, (begun, len(sizes))) if sizes else ()
