"""The benchmark of error budgets applies plans as they are meant, and loses nothing where they change."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from budget import planned, read_cells, run_all
from budget_cells import BYTES_ALONE, Cell, Outcome, bytes_of, minimal_workload, run_cell
from budget_exchange import PlanExchange
from budget_tasks import STEPS, BudgetTask, make_budget_task
from tasks import Task

from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.search.choose import uniform

SHAPES = {"a": (24, 40), "b": (40,), "c": (64, 16)}


def drawn(step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randn(2024, generator=random) for _ in range(4)]


def task() -> BudgetTask:
    shapes = tuple(SHAPES.values())
    made = Task("drawn", shapes, torch.zeros(2024), 10, {}, lambda _, step: drawn(step), lambda _: 0.0)
    return BudgetTask(made, tuple(SHAPES), 0.5)


def plan_of(**texts: str) -> Plan:
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    return Plan(tuple(Bucket((name,), (sizes[name],), Strategy.parse(text)) for name, text in texts.items()))


TOPK = "compress(topk(0.1))@gpu > all_gather@world > decompress@gpu"
TWO = "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(sign)@gpu > all_gather@world > decompress@gpu"
LOW_RANK = "propose(powersgd(2))@gpu > all_reduce@world > compress(powersgd(2))@gpu > all_reduce@world > decompress@gpu"
PLANS = (
    plan_of(a=TOPK, b=str(DENSE), c=TWO),
    plan_of(a=TWO, b=TOPK, c=TOPK),
    plan_of(a=LOW_RANK, b=TOPK, c=LOW_RANK),
    plan_of(a=LOW_RANK, b=TWO, c=TOPK),
    plan_of(a=str(DENSE), b=str(DENSE), c=str(DENSE)),
)


def test_what_is_delivered_and_what_is_owed_add_up_to_the_gradients_whatever_plan_follows() -> None:
    exchange, given, delivered = PlanExchange(task()), torch.zeros(2024), torch.zeros(2024)
    for number, plan in enumerate(PLANS):
        exchange.use(plan)
        for step in range(3):
            gradients = drawn(10 * number + step)
            given += torch.stack(gradients).mean(dim=0)
            delivered += exchange.apply(gradients)
    torch.testing.assert_close(delivered, given, rtol=0, atol=2e-5)


def test_the_error_of_a_step_is_what_its_mean_lacks() -> None:
    exchange = PlanExchange(task())
    exchange.use(PLANS[0])
    gradients = drawn(0)
    mean = torch.stack(gradients).mean(dim=0)
    found, error = exchange.apply_measured(gradients)
    assert error.of_values == pytest.approx(float((found - mean).square().sum() / mean.square().sum()), rel=1e-5)
    assert torch.equal(found[960:1000], mean[960:1000])


def test_all_workers_look_together() -> None:
    exchange = PlanExchange(task())
    exchange.use(PLANS[1])
    for step in range(2):
        exchange.apply(drawn(step), keep=True)
    table = exchange.look(0)
    assert table.is_measured
    assert [row.shape for row in table.rows.values()] == list(SHAPES.values())


def test_a_uniform_plan_sends_what_its_payloads_take() -> None:
    named = task()
    workload, cluster = minimal_workload(named, 4)
    plan = uniform("int4", workload, BYTES_ALONE, cluster)
    payloads = (960 + 1024) / 2 + 4 * (8 + 8)  # a scale of 4 bytes for 128 values of a parameter
    assert bytes_of(plan, cluster, named) == pytest.approx(3 * payloads + 2 * 3 / 4 * 4 * 40, rel=0.02)


def test_cells_that_are_known_are_not_trained_again(tmp_path: Path) -> None:
    cells = [Cell("logreg", "sgd", "dense")]
    known = Outcome("logreg", "sgd", "dense", 0, loss=1.0)
    path = tmp_path / "cells.json"
    path.write_text(json.dumps([asdict(known)]))
    assert run_all(cells, path) == read_cells(path) == [known]


def test_every_setting_is_planned_once() -> None:
    cells = list(planned(["gpt", "logreg"]))
    assert len(cells) == len(set(cells)) == 2 * 9 * (1 + 2)


def test_a_found_plan_is_trained_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    named = make_budget_task("logreg1")
    assert named.task.steps == STEPS
    monkeypatch.setattr("budget_cells.LOOKS", (9, 19))
    monkeypatch.setattr("budget_tasks.STEPS", 30)
    make_budget_task.cache_clear()
    outcome = run_cell(Cell("logreg1", "sgd", "found int4"))
    make_budget_task.cache_clear()
    assert outcome.loss is not None
    assert outcome.loss < 0.69
    assert outcome.error_by_table <= outcome.limit_by_table
