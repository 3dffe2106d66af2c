"""Draws of the costs' errors: the same for every plan, so that what two plans share decides nothing."""

from dataclasses import replace

from helpers.workloads import COSTS, cluster, layers

from fxcomp.plan.plan import Plan
from fxcomp.search.choose import predict_us, uniform
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.shared_draws import DRAWS, in_draws, share_won

WORKLOAD, WHERE = layers(10), cluster(2, 1, "1gbit")


def drawn(plan: Plan, costs: object = COSTS) -> list[float]:
    assert isinstance(costs, type(COSTS))
    return in_draws(StepPrices(WORKLOAD, costs, WHERE), plan)


def test_equal_plans_have_equal_draws_and_neither_wins():
    dense = uniform("dense", WORKLOAD, COSTS, WHERE)
    assert drawn(dense) == drawn(dense)
    assert len(drawn(dense)) == DRAWS
    assert share_won(drawn(dense), drawn(dense)) == 0.0
    around = sorted(drawn(dense))
    assert around[0] < predict_us(WORKLOAD, dense, COSTS, WHERE) < around[-1]


def test_a_saving_on_the_wire_wins_however_wrong_the_link_and_compute_are():
    wrong = replace(COSTS, error=0.5)
    dense, int8 = (uniform(name, WORKLOAD, wrong, WHERE) for name in ("dense", "int8"))
    assert share_won(drawn(int8, wrong), drawn(dense, wrong)) == 1.0
    assert share_won(drawn(dense, wrong), drawn(int8, wrong)) == 0.0
