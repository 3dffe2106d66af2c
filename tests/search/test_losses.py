"""Errors of strategies on a workload, against the error of whole plans."""

import pytest
from helpers.drawn_errors import drawn_table
from helpers.workloads import cluster, layers

from fxcomp.error_tables import ASSUMED
from fxcomp.plan.budget import plan_error, strategy_error
from fxcomp.plan.modes import LADDER_COMPRESSORS, Content, strategies_within
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.search.atoms import atoms_of
from fxcomp.search.losses import Losses

WORKLOAD, WHERE = layers(6), cluster(4, 2, "1gbit")


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_losses_of_buckets_add_up_to_the_error_of_their_plan(seed: int | None):
    table = ASSUMED if seed is None else drawn_table(WORKLOAD.shapes, seed)
    losses = Losses(WORKLOAD.gradients, WHERE, table)
    atoms = atoms_of(WORKLOAD, 1)
    borders = (0, 3, len(atoms))
    for strategy in strategies_within(0.5, WHERE):
        sums = losses.sums(atoms, borders, [strategy])[:, 0]
        halves = [WORKLOAD.gradients[:3], WORKLOAD.gradients[3:]]
        plan = Plan(tuple(Bucket(tuple(g.name for g in h), tuple(g.elements for g in h), strategy) for h in halves))
        assert sums[-1] / losses.elements == pytest.approx(plan_error(plan, WHERE, table), rel=1e-9, abs=1e-12)
        assert losses.of(strategy, [0, 1, 2]) == pytest.approx(sums[1], rel=1e-9, abs=1e-9)


def test_without_a_table_every_element_weighs_the_same():
    losses = Losses(WORKLOAD.gradients, WHERE)
    for strategy in strategies_within(0.5, WHERE):
        assert losses.errors(strategy) == pytest.approx(strategy_error(strategy, WHERE), rel=1e-12)
    assert losses.weights.sum() == WORKLOAD.dense_bytes / 4


def test_a_small_budget_offers_vectors_what_balanced_mode_does_and_none_offers_nothing():
    names = {str(c) for each in strategies_within(0.01, WHERE, Content.VECTORS) for c in each.compressors}
    assert names == {"bf16"}
    assert all(each.is_dense for each in strategies_within(0.0, WHERE))
    offered = {c for each in strategies_within(0.9, WHERE) for c in each.compressors}
    assert offered == set(LADDER_COMPRESSORS)
