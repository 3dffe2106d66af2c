"""The fastest plan on one wire under an error limit: against brute force, the simulator and the general oracle."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
from helpers.budget_cases import ONE_WIRE, BudgetCase, OneCollective, drawn
from helpers.optimum.one_wire import NotOneWire, fastest_on_one_wire
from helpers.optimum.oracle import optimum

from fxcomp.cluster.cluster import Cluster
from fxcomp.plan.budget import plan_error
from fxcomp.plan.modes import Content, Mode
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.choose import predict_us
from fxcomp.search.losses import Losses
from fxcomp.search.question import Terms
from fxcomp.search.workload import Gradient, Workload


@dataclass(frozen=True, slots=True)
class Few(OneCollective):
    """Terms with a few of the strategies."""

    def strategies(
        self, limit: float, losses: Losses, cluster: Cluster, content: Content, *, offload: bool = True
    ) -> tuple[Strategy, ...]:
        return OneCollective.strategies(self, limit, losses, cluster, content, offload=offload)[::4]


def small(seed: int) -> BudgetCase:
    """At most three small gradients, which are not cut, and few strategies."""
    case = drawn(seed, most=3)
    shrunk = tuple(replace(each, shape=(each.shape[0], 1 + each.shape[1] // 40)) for each in case.workload.gradients)
    workload = replace(case.workload, gradients=shrunk)
    return replace(case, workload=workload, terms=Few(Mode.LOSSY, budget=case.terms.budget))


def brute_force_us(case: BudgetCase) -> float:
    """All cuts and all strategies that keep the limit, simulated."""
    terms, gradients = case.terms, case.workload.gradients
    limit = terms.limit(case.workload, case.cluster)
    offered = terms.strategies(limit, terms.losses(case.workload, case.cluster), case.cluster, Content.MATRICES)
    best = float("inf")
    for places in itertools.product((False, True), repeat=len(gradients) - 1):
        borders = [0, *(k + 1 for k, is_cut in enumerate(places) if is_cut), len(gradients)]
        groups = [gradients[a:b] for a, b in itertools.pairwise(borders)]
        for chosen in itertools.product(offered, repeat=len(groups)):
            made = (
                Bucket(tuple(g.name for g in group), tuple(g.elements for g in group), strategy)
                for group, strategy in zip(groups, chosen, strict=True)
            )
            plan = Plan(tuple(made))
            if plan_error(plan, case.cluster, terms.table) <= limit * (1 + 1e-9):
                best = min(best, predict_us(case.workload, plan, case.costs, case.cluster))
    return best


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_plan_under_the_limit_is_what_brute_force_finds(seed: int):
    case = small(seed)
    found = fastest_on_one_wire(case.workload, case.costs, case.cluster, case.terms)
    assert found.step_us == pytest.approx(brute_force_us(case), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_plan_keeps_the_limit_and_is_simulated(seed: int):
    case = drawn(seed)
    terms = case.terms
    found = fastest_on_one_wire(case.workload, case.costs, case.cluster, terms)
    found.plan.check_covers(case.workload.sizes)
    assert found.step_us == predict_us(case.workload, found.plan, case.costs, case.cluster)
    limit = terms.limit(case.workload, case.cluster)
    assert plan_error(found.plan, case.cluster, terms.table) <= limit * (1 + 1e-8)


@pytest.mark.parametrize("seed", [3, 5, 13])
def test_the_general_oracle_finds_the_same(seed: int):
    case = drawn(seed, most=4)
    found = fastest_on_one_wire(case.workload, case.costs, case.cluster, case.terms)
    best = optimum(case.workload, case.costs, case.cluster, case.terms)
    assert best.step_us == pytest.approx(found.step_us, rel=2e-6)


@pytest.mark.parametrize(
    ("shapes", "costs", "terms", "why"),
    [
        ([(64, 64), (64,)], ONE_WIRE, OneCollective(Mode.LOSSY), "vectors and matrices"),
        ([(64, 64)], ONE_WIRE, OneCollective(Mode.LOSSY, bursts=0.1), "in bursts"),
        ([(64, 64)], ONE_WIRE, Terms(Mode.LOSSY), "more than one collective"),
        ([(64, 64)], replace(ONE_WIRE, pack_gb_per_s=5.0), OneCollective(Mode.LOSSLESS), "beside it"),
    ],
)
def test_what_is_no_single_wire_is_refused(shapes: list[tuple[int, ...]], costs: object, terms: Terms, why: str):
    gradients = tuple(Gradient(f"g{k}", shape, 10.0 * k, 0.0) for k, shape in enumerate(shapes))
    workload = Workload(gradients, 10.0 * len(shapes))
    with pytest.raises(NotOneWire, match=why):
        fastest_on_one_wire(workload, costs, drawn(0).cluster, terms)  # pyright: ignore[reportArgumentType]
