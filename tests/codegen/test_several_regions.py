"""Steps of several ranks are cut into several regions; compiled by Inductor they train as eager ones do."""

from __future__ import annotations

import itertools

import pytest
from helpers.region_jobs import CHOICES, Case, Trained, cases, eagerly, met, missed, step_by

CASES = cases()


def test_every_two_choices_meet():
    assert len(CASES) <= 32
    (model, plan), *others = itertools.combinations([len(choices) for choices in CHOICES.values()], 2)
    assert plan > 2
    assert len(met(CASES)) == 2 * model + sum(one * other for one, other in others)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.one_in(30)
def test_compiled_regions_train_the_same(case: Case):
    compiled, plain = step_by(case, "inductor"), step_by(case, "eager")
    assert compiled.regions > 1
    assert_trained_alike(compiled, plain, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.plan == "dense"], ids=str)
@pytest.mark.one_in(4)
def test_dense_ranks_with_the_same_gradients_train_as_one(case: Case):
    assert_trained_alike(step_by(case, "eager"), eagerly(case), case)


def assert_trained_alike(found: Trained, plain: Trained, case: Case) -> None:
    """Compare to rounding; in 16 bits Inductor rounds less often than eager operators do, and oneDNN elsewhere."""
    loss_bound, bound = (5e-3, 0.05) if case.autocast else (1e-5, 1e-4)
    assert found.losses == pytest.approx(plain.losses, rel=loss_bound)
    assert missed(plain, found, case) < bound
