"""Exact prices of plans that have buckets in common."""

from __future__ import annotations

from helpers.workloads import COSTS, cluster, layers

from fxcomp.plan.modes import Mode
from fxcomp.search.choose import predict_us
from fxcomp.search.descent.plan_search import searches_of
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms


def test_plans_that_share_buckets_are_priced_as_each_one_alone():
    workload, where = layers(8), cluster(2, 2, "1gbit")
    prices = StepPrices(workload, COSTS, where)
    for search in searches_of(prices, Terms(Mode.BALANCED)):
        for found in search.starts(range(len(search.options[0]))):
            plan = search.plan(found)
            assert prices.step_us(plan) == predict_us(workload, plan, COSTS, where)
