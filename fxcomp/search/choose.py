"""Choose a plan, buckets with strategies, by the simulated step time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Any

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.gc_paused import gc_paused
from fxcomp.plan.budget import plan_error
from fxcomp.plan.given import strategy_named
from fxcomp.plan.modes import Content, Mode, strategies
from fxcomp.plan.pins import NO_PINS, Pins
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.descent.plan_search import Found, PlanSearch, searches_of
from fxcomp.search.exchanged import Exchanged
from fxcomp.search.losses import Losses
from fxcomp.search.pinned import Pinned
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Question, Terms
from fxcomp.search.runners import (
    BF16,
    DENSE,
    PREDICTED_BEST,
    WORTH_FOLLOWING,
    Runner,
    is_worth_following,
    pick_runners,
)
from fxcomp.search.shared_draws import DRAWS, LEAST_GAIN
from fxcomp.search.workload import Workload

_PRICED = 3  # maximum number of plans priced exactly
_IN_FULL = 2  # maximum number of searches continued by `in_full`
_NEAR = 0.02  # relative: `in_full` skips searches slower than the best by more
_FAR = 0.1  # relative: bf16 plans slower by more are not priced exactly
_UNIFORM = 4  # uniform plans offered to the race
_ALTERNATIVES = 24  # total number of alternatives, at least one per bucket
_FLIP_RATIO = 1.2  # ratio of bandwidths at which the bisection ends


@dataclass(frozen=True, slots=True)
class Alternative:
    """Predicted step time with another strategy in one bucket."""

    strategy: Strategy
    step_us: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen plan, compared plans, and their predicted step times in µs."""

    plan: Plan
    step_us: float
    dense: Plan
    dense_us: float
    fastest: Plan
    fastest_us: float
    bf16_us: float
    """Step time with bf16 everywhere, with the faster of flat and hierarchical collectives."""
    free_us: float
    error: float
    """Expected relative error of a predicted step time."""
    alternatives: tuple[tuple[Alternative, ...], ...]
    """Fastest other strategies of each bucket."""
    runners: tuple[Runner, ...] = ()
    """Plans to time in training steps (a race), the shortest prediction first."""
    pins: Pins = NO_PINS
    """Strategies pinned by the user. The dense and bf16 plans have them too."""
    exchanged: Exchanged | None = None
    """Comparison of exchanging gradients and momenta; None if only gradients were considered."""

    @property
    def stays_dense(self) -> bool:
        """True if the chosen plan compresses only pinned parameters."""
        return self.pins.leaves_dense(self.plan)

    @property
    def gain(self) -> float:
        """Fraction of the dense step that the fastest plan saves."""
        return 1.0 - self.fastest_us / self.dense_us if self.dense_us > 0 else 0.0

    @property
    def wins(self) -> float:
        """Fraction of random draws of cost errors in which the fastest plan beats the best dense plan."""
        return next((each.wins for each in self.runners if each.plan == self.fastest), 0.0)

    @property
    def reason(self) -> str:
        if self.exchanged is not None and self.plan.moves_exchange:
            return self.exchanged.reason
        if self.pins.leaves_dense(self.fastest):
            return "no compressed plan is predicted to be faster than the best dense one"
        verdict = "stays dense" if self.stays_dense else "leaves dense"
        return (
            f"{verdict}: the plan predicted best saves {self.gain:.1%}; with the costs as wrong as they may be"
            f" it saves {LEAST_GAIN:.0%} or more in {self.wins:.0%} of {DRAWS} draws, and {WORTH_FOLLOWING:.0%} are"
            " needed"
        )

    def to_json(self) -> dict[str, Any]:
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        plans = {name: value.to_json() for name, value in facts.items() if isinstance(value, Plan)}
        others = [[[str(each.strategy), each.step_us] for each in bucket] for bucket in self.alternatives]
        runners = [each.to_json() for each in self.runners]
        exchanged = None if self.exchanged is None else asdict(self.exchanged)
        more = {"alternatives": others, "runners": runners, "pins": self.pins.to_json(), "exchanged": exchanged}
        return {**facts, **plans, **more}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        plans = {name: Plan.from_json(data[name]) for name in ("plan", "dense", "fastest")}
        others = tuple(
            tuple(Alternative(Strategy.parse(text), us) for text, us in bucket) for bucket in data["alternatives"]
        )
        runners = tuple(map(Runner.from_json, data["runners"]))
        pins = Pins.from_json(data["pins"])
        exchanged = None if data["exchanged"] is None else Exchanged(**data["exchanged"])
        more = {"alternatives": others, "runners": runners, "pins": pins, "exchanged": exchanged}
        values: dict[str, Any] = {**data, **plans, **more}
        return cls(**values)

    def __str__(self) -> str:
        steps = {
            "chosen": self.step_us,
            "dense": self.dense_us,
            "bf16 everywhere": self.bf16_us,
            "no communication": self.free_us,
        }
        lines = [f"{name:<17}{us / 1e3:10.3f} ms" for name, us in steps.items()]
        return "\n".join([*lines, self.reason, str(self.plan)])


@gc_paused()
def choose(workload: Workload, costs: CostTable, cluster: Cluster, terms: Terms | Mode) -> Choice:
    """Choose a plan. A mode stands for `Terms(mode)`.

    The "dense" plan compresses only pinned gradients.
    """
    terms = terms if isinstance(terms, Terms) else Terms(terms)
    prices = StepPrices(workload, costs, cluster)
    searches = searches_of(prices, terms)
    dense = fastest_of(searches, dense_only=True)
    least = min(dense, fastest_of(searches, dense_only=False), key=lambda best: best.step_us)
    bf16 = bf16_everywhere(prices, terms.pins)
    runners: tuple[Runner, ...] = ()
    if dense.plan.buckets:
        is_allowed = plan_error(bf16, cluster, terms.table) <= terms.limit(workload, cluster)
        always = {DENSE: dense.plan, PREDICTED_BEST: least.plan, **({BF16: bf16} if is_allowed else {})}
        uniforms = _uniform_plans(searches[0], least.found)
        runners = pick_runners(always, itertools.islice(uniforms, _UNIFORM), prices, terms.table)
    chosen = least if is_worth_following(least.plan, runners) else dense
    return Choice(
        plan=chosen.plan,
        step_us=chosen.step_us,
        dense=dense.plan,
        dense_us=dense.step_us,
        fastest=least.plan,
        fastest_us=least.step_us,
        bf16_us=prices.step_us(bf16),
        free_us=workload.free_us,
        error=costs.error_of(workload.free_us, dense.step_us),
        alternatives=_alternatives(chosen),
        runners=runners,
        pins=terms.pins,
    )


def _uniform_plans(search: PlanSearch, fastest: Found) -> Iterator[tuple[Plan, float]]:
    """Yield uniform plans (one strategy everywhere) and their step times in µs, fastest first.

    Errors decrease from plan to plan, and all are smaller than the error of `fastest`.
    """
    starts = [search.starts([number], 1)[0] for number in range(len(search.options[0]))]
    least = fastest.value.lost
    for found in sorted(starts, key=lambda each: each.value):
        if math.isfinite(found.value.us) and found.value.lost < least:
            least = found.value.lost
            yield search.plan(found), found.value.us


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest plan, or the fastest dense plan, with its exact price and the search that found it."""

    plan: Plan
    step_us: float
    found: Found
    search: PlanSearch


def fastest_of(searches: Sequence[PlanSearch], *, dense_only: bool) -> Best:
    """Return the fastest plan of several searches. No plan of a single strategy is predicted to be faster."""
    ends = [(search.fastest(dense_only=dense_only), search) for search in searches]
    ends.sort(key=lambda pair: pair[0][0].value)
    best_us = ends[0][0][0].value.us
    carried_on = [
        (search.in_full(found[0], dense_only=dense_only), search)
        for k, (found, search) in enumerate(ends[:_IN_FULL])
        if k == 0 or (not search.is_joined and found[0].value.us <= best_us * (1 + _NEAR))
    ]
    others = sorted(((each, search) for found, search in ends for each in found), key=lambda pair: pair[0].value)
    others = others[: _PRICED - 1]
    if not dense_only:  # the search's approximate prices may rank them wrongly
        bf16 = [(search.starts(numbers, 1)[0], search) for search in searches if (numbers := _bf16_numbers(search))]
        others += [each for each in bf16 if each[0].value.us <= best_us * (1 + _FAR)]
    best = min((_priced(*each) for each in (*carried_on, *others)), key=attrgetter("step_us"))
    for search in searches:
        for start in search.starts_below(best.step_us, dense_only=dense_only):
            best = min(best, _priced(start, search), key=attrgetter("step_us"))
    return best


def _priced(found: Found, search: PlanSearch) -> Best:
    plan = search.plan(found)
    return Best(plan, search.prices.step_us(plan), found, search)


def _alternatives(best: Best) -> tuple[tuple[Alternative, ...], ...]:
    told = max(1, _ALTERNATIVES // max(1, len(best.plan.buckets)))
    more_us = best.step_us - best.found.value.us
    return tuple(
        tuple(Alternative(strategy, us + more_us) for strategy, us in others[:told])
        for others in best.search.others(best.found)
    )


def predict_us(workload: Workload, plan: Plan, costs: CostTable, cluster: Cluster) -> float:
    return StepPrices(workload, costs, cluster).step_us(plan)


def uniform(name: str, workload: Workload, costs: CostTable, cluster: Cluster) -> Plan:
    """Build a plan of one compressor or strategy (`dense`, `bf16`, `int8`, ...), in buckets of the best size.

    A compressor is exchanged in one shot. Vectors stay dense if balanced mode does not offer the strategy for vectors.
    """
    strategy = strategy_named(name)
    gentle = strategies(Mode.BALANCED, cluster, Content.VECTORS)
    vector = strategy if strategy in gentle or strategy.keeps_values else strategy.uncompressed
    choices = {Content.MATRICES: (strategy,), Content.VECTORS: (vector,)}
    search = PlanSearch(Question(choices), StepPrices(workload, costs, cluster))
    return search.plan(search.starts([0], 1)[0])


def bf16_everywhere(prices: StepPrices, pins: Pins = NO_PINS) -> Plan:
    """Build the fastest plan that sends all gradients except pinned ones in bf16."""
    workload, cluster, offload = prices.workload, prices.cluster, prices.costs.offloads
    bf16 = _bf16_strategies(cluster, offload=offload) or strategies(Mode.LOSSLESS, cluster)
    groupings = [{Content.MATRICES: bf16, Content.VECTORS: bf16}, {Content.MIXED: bf16}]
    pinned = Pinned.of(pins, workload, cluster, Losses(workload.gradients, cluster), offload=offload)
    has_both = len({gradient.is_vector for gradient in workload.gradients}) == 2
    asked = [Question(choices, pinned=pinned) for choices in groupings[: 1 + has_both]]
    searches = [PlanSearch(question, prices) for question in asked]
    search, start = min(
        ((each, each.starts(range(len(each.options[0])), 1)[0]) for each in searches), key=lambda one: one[1].value
    )
    return search.plan(start)


def _bf16_strategies(cluster: Cluster, *, offload: bool) -> tuple[Strategy, ...]:
    offered = strategies(Mode.BALANCED, cluster, Content.VECTORS, offload=offload)
    return tuple(each for each in offered if not each.is_dense)


def _bf16_numbers(search: PlanSearch) -> list[int]:
    bf16 = _bf16_strategies(search.prices.cluster, offload=search.prices.costs.offloads)
    return [number for number, option in enumerate(search.options[0]) if option.strategy in bf16]


def flip_gbit(
    workload: Workload, costs: CostTable, cluster: Cluster, terms: Terms | Mode, *, choice: Choice | None = None
) -> float | None:
    """Find the bandwidth between hosts, in Gbit/s, above which the plan is dense and below which it is compressed.

    Return None if the plan is dense, or compressed, from 1 Mbit/s to 1 Tbit/s. Prices come from the cluster's links,
    because collectives were measured at one bandwidth only. The result agrees with `choice`, which was made at the
    current bandwidth.
    """
    costs, terms = replace(costs, collectives={}), terms if isinstance(terms, Terms) else Terms(terms)
    searches = searches_of(StepPrices(workload, costs, cluster), terms)

    def is_dense(gbit: float) -> bool:
        prices = StepPrices(workload, costs, cluster.with_inter(gbit / 8))
        for search in searches:
            search.at(prices)
        dense, fastest = (
            min(((each.quick(dense_only=only), each) for each in searches), key=lambda one: one[0].value.us)
            for only in (True, False)
        )
        if fastest[0].value.us > dense[0].value.us * (1 - LEAST_GAIN):
            return True
        plans = [search.plan(found) for found, search in (dense, fastest)]
        always = {DENSE: plans[0], PREDICTED_BEST: plans[1]}
        runners = pick_runners(always, (), prices)
        return not is_worth_following(plans[1], runners)

    low, high = 1e-3, 1e3
    here = 8 * cluster.inter.gb_per_s
    if choice is not None and low < here < high:
        low, high = (low, here) if choice.stays_dense else (here, high)
    if (choice is None or high == here) and is_dense(low):
        return None
    if (choice is None or low == here) and not is_dense(high):
        return None
    while high / low > _FLIP_RATIO:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_dense(middle) else (middle, high)
    return math.sqrt(low * high)
