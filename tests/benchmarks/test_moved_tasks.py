"""The small tasks as modules are the tasks themselves, and runs are planned and watched as they are asked for."""

import argparse

import pytest
import torch
from moved_tasks import OPTIMIZERS, RATES, SHORT_RUNS, Cell, Lion, Shaped, loss_fn, planned, updates_squared
from tasks import TASKS, make_task
from torch import nn


def options(**changes: object) -> argparse.Namespace:
    given = {"tasks": "charlm,images,logreg", "optimizers": "adamw,lion", "names": "dense,sign", "seeds": "0,1"}
    return argparse.Namespace(**given, rates=None, short=False, **changes)


@pytest.mark.parametrize("name", TASKS)
def test_the_module_of_a_task_has_its_loss_and_its_gradients(name: str):
    task = make_task(name)
    assert task.batch_at is not None
    model = Shaped(task)
    loss_fn(model, task.batch_at(3, 1)).backward()
    found = torch.cat([value.grad.flatten() for value in model.values if value.grad is not None])
    torch.testing.assert_close(found, task.gradients(task.start, 3)[1], rtol=1e-4, atol=1e-6)
    assert torch.equal(model.flat(), task.start)


def test_every_task_has_a_rate_for_every_optimizer():
    assert set(RATES) == set(TASKS)
    assert all(list(rates) == list(OPTIMIZERS) for rates in RATES.values())


def test_each_seed_is_trained_by_all_contestants():
    cells = list(planned(options()))
    assert len(cells) == 3 * 2 * 2 * 2
    first = [("dense", 0), ("sign", 0), ("dense", 1)]
    assert cells[:3] == [Cell("charlm", "adamw", name, seed, 8e-3) for name, seed in first]


def test_short_runs_have_seeds_of_their_own_and_a_dense_one_beside_each():
    arguments = options()
    arguments.short = True
    cells = list(planned(arguments))
    assert len(cells) == 2 * SHORT_RUNS
    assert len({cell.seed for cell in cells}) == SHORT_RUNS
    assert {(cell.task, cell.optimizer) for cell in cells} == {(t, o) for t in TASKS for o in ("adamw", "lion")}


def test_adams_first_update_is_as_long_as_its_rate():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 8)).square().sum().backward()
    optimizer.step()
    assert updates_squared(optimizer) == pytest.approx([0.01] * 2, rel=1e-3)  # (1 - beta1)^2: the mean begins at zero


def test_lion_moves_by_signs():
    value = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = Lion([value], lr=0.1)
    value.grad = torch.tensor([3.0, -0.2])
    optimizer.step()
    assert value.tolist() == pytest.approx([0.9, 1.1])
