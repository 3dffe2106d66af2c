"""Exact prices of plans that have buckets in common."""

from __future__ import annotations

from helpers.workloads import COSTS, cluster, layers

from fxcomp.plan.modes import Mode
from fxcomp.search.choose import predict_us
from fxcomp.search.descent.plan_search import searches_of
from fxcomp.search.descent.problem import TracedPrices
from fxcomp.search.question import Terms
from fxcomp.search.shared_draws import ExactPlans


def test_exact_plans_price_as_the_tasks_do():
    workload, where = layers(8), cluster(2, 2, "1gbit")
    exact = ExactPlans(workload, TracedPrices(COSTS, where))
    for search in searches_of(workload, TracedPrices(COSTS, where), Terms(Mode.BALANCED)):
        for found in search.starts(range(len(search.options[0]))):
            plan = search.plan(found)
            assert exact.step_us(plan) == predict_us(workload, plan, COSTS, where)
