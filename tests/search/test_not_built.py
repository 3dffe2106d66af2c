"""Without the compiled search, plans of one strategy everywhere are compared by simulation, and reports say so."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers.workloads import COSTS, cluster, layers

from fxcomp.__main__ import main
from fxcomp.compressors import kernels
from fxcomp.plan.budget import Budget, ErrorBudget, plan_error
from fxcomp.plan.modes import Content, Mode, error_limit, strategies
from fxcomp.plan.pins import Pins
from fxcomp.search.choose import choose, flip_gbit, predict_us, uniform
from fxcomp.search.descent.engine import search_notes
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms
from fxcomp.search.resolve import Resolve

WHERE = cluster(2, 2, "1gbit")
WORKLOAD = layers(2)


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("not_built")
@pytest.mark.parametrize("mode", Mode)
def test_no_uniform_plan_is_faster_than_the_choice(mode: Mode):
    choice = choose(WORKLOAD, COSTS, WHERE, mode)
    choice.plan.check_covers(WORKLOAD.sizes)
    assert choice.fastest_us == predict_us(WORKLOAD, choice.fastest, COSTS, WHERE)
    assert plan_error(choice.fastest, WHERE) <= error_limit(mode)
    assert choice.fastest_us <= choice.dense_us
    for strategy in strategies(mode, WHERE, Content.MATRICES, offload=COSTS.offloads):
        plan = uniform(str(strategy), WORKLOAD, COSTS, WHERE)
        if plan_error(plan, WHERE) <= error_limit(mode):
            assert choice.fastest_us <= predict_us(WORKLOAD, plan, COSTS, WHERE)


@pytest.mark.usefixtures("not_built")
def test_a_slow_link_leaves_dense_and_a_fast_one_does_not():
    slow = choose(WORKLOAD, COSTS, WHERE, Mode.BALANCED)
    assert not slow.stays_dense
    assert not any(slow.alternatives)
    assert choose(WORKLOAD, COSTS, cluster(2, 2, "1000gbit"), Mode.BALANCED).stays_dense
    flips_at = flip_gbit(WORKLOAD, COSTS, WHERE, Mode.BALANCED, choice=slow)
    assert flips_at is not None
    assert flips_at > 1


@pytest.mark.usefixtures("not_built")
def test_pins_and_budgets_hold():
    pinned = choose(WORKLOAD, COSTS, WHERE, Terms(Mode.BALANCED, pins=Pins.read({"*.bias": "dense"})))
    biases = [bucket for bucket in pinned.plan.buckets if any(name.endswith("bias") for name in bucket.names)]
    assert biases
    assert all(bucket.strategy.is_dense for bucket in biases)
    terms = Terms(Mode.BALANCED, budget=Budget(ErrorBudget.parse(0.01)))
    within = choose(WORKLOAD, COSTS, WHERE, terms)
    assert 0 < plan_error(within.fastest, WHERE, terms.table) <= terms.limit(WORKLOAD, WHERE)
    assert within.fastest_us < within.dense_us


@pytest.mark.usefixtures("not_built")
def test_a_plan_in_force_that_loses_too_much_is_solved_again():
    terms = Terms(Mode.BALANCED, budget=Budget(ErrorBudget.parse(1e-3)))
    wasteful = uniform("int4", WORKLOAD, COSTS, WHERE)
    solving = Resolve(StepPrices(WORKLOAD, COSTS, WHERE), wasteful, terms)
    while (plan := solving.turn()) is None:
        pass
    assert plan_error(wasteful, WHERE, terms.table) > terms.limit(WORKLOAD, WHERE)
    assert plan_error(plan, WHERE, terms.table) <= terms.limit(WORKLOAD, WHERE)


@pytest.mark.usefixtures("not_built")
def test_a_report_says_so(capsys: pytest.CaptureFixture[str]):
    job = Path(__file__).parents[2] / "examples" / "mlp.py"
    assert main(["explain", f"{job}:job", "--inter", "10mbit"]) == 0
    assert "The search is not built: only plans of one strategy" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(not kernels.available(), reason="no kernels are built")
def test_the_compiled_search_is_no_slower_and_says_nothing(monkeypatch: pytest.MonkeyPatch):
    searched = choose(WORKLOAD, COSTS, WHERE, Mode.BALANCED)
    assert search_notes() == ()
    monkeypatch.setattr(kernels, "available", lambda: False)
    compared = choose(WORKLOAD, COSTS, WHERE, Mode.BALANCED)
    assert math.isfinite(compared.fastest_us)
    assert searched.fastest_us <= compared.fastest_us
    [note] = search_notes()
    assert note.startswith("The search is not built: only plans of one strategy everywhere were compared")
