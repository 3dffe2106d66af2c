"""Of gradients that training makes, tables say what compressors lose, and what the applied mean loses."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers.measured import lost, measured_together
from tasks import Task, make_task
from torch import Tensor

from fxcomp.compressors import PowerSGD, parse_compressor
from fxcomp.testing.rounds import average, replicas_of

STEPS = 25


def pieces(task: Task, flat: Tensor) -> dict[str, Tensor]:
    """Cut what belongs to all parameters into gradients."""
    parts = torch.split_with_sizes(flat, list(task.segments))
    return {str(place): part.view(shape) for place, (part, shape) in enumerate(zip(parts, task.shapes, strict=True))}


@cache
def trained(name: str, text: str) -> tuple[list[Tensor], Tensor]:
    """Train with error feedback; what the ranks give to the last step's compression, and the mean that it applies."""
    task, compressor = make_task(name), parse_compressor(text)
    weights, segments = task.start.clone(), task.segments
    replicas = replicas_of(compressor.bound_to(task.shapes, task.workers), segments, task.workers, feedback=True)
    unit = task.workers if compressor.is_linear else 1
    given, decoded = [weights], weights
    for step in range(STEPS):
        gradients = task.gradients(weights, step)
        owed = [replica.residual for replica in replicas]
        given = [one + unit * other for one, other in zip(gradients, owed, strict=True) if other is not None]
        decoded = average(compressor, gradients, replicas, segments, task.shapes)
        weights = weights - task.rates["sgd"] * decoded
    return given, decoded


@pytest.mark.parametrize("name", ["charlm", "logreg"])
def test_codecs_lose_of_a_workers_gradient_what_its_table_says(name: str):
    task = make_task(name)
    given, _ = trained(name, "topk(0.01)")
    gradients = pieces(task, given[0])
    [table] = measured_together([gradients])
    assert all(row.samples for row in table.rows.values())
    for key, gradient in gradients.items():
        for text in ("topk(0.01)", "int8", "int4", "int2", "sign", "bf16"):
            found = table.error_of(key, parse_compressor(text))
            assert found == pytest.approx(lost(parse_compressor(text), gradient.flatten(), gradient.shape), rel=0.05)


@pytest.mark.parametrize(
    ("name", "text", "low", "high"),
    [
        ("logreg", "topk(0.1)", 0.9, 1.1),
        ("logreg", "int4", 0.9, 1.1),
        ("charlm", "topk(0.01)", 0.9, 1.1),
        ("charlm", "sign", 0.7, 1.4),
        ("charlm", "powersgd(2)", 0.99, 1.5),
        ("images", "powersgd(2)", 0.99, 2.0),
    ],
)
def test_the_applied_mean_loses_about_what_the_ranks_table_says(name: str, text: str, low: float, high: float):
    """powersgd's one step from the factors of the step before loses more than the best matrix, and never less."""
    task, compressor = make_task(name), parse_compressor(text)
    given, decoded = trained(name, text)
    table, *others = measured_together([pieces(task, each) for each in given])
    assert all(other == table for other in others)
    mean, kept = pieces(task, torch.stack(given).mean(dim=0)), pieces(task, decoded)
    large = [key for key, value in mean.items() if value.dim() > 1 and value.numel() >= 1000]
    assert large
    for key in large:
        applied = ((mean[key] - kept[key]).square().sum() / mean[key].square().sum()).item()
        said = table.error_of(key, compressor)
        if said:
            assert low <= applied / said <= high, key


def test_each_ranks_own_spectrum_would_say_too_little():
    """Why low rank is measured of the ranks' sum: four workers with 16 images each."""
    task = make_task("images")
    given, decoded = trained("images", "powersgd(2)")
    ranked = [pieces(task, each) for each in given]
    mean, kept = pieces(task, torch.stack(given).mean(dim=0)), pieces(task, decoded)
    together, *_ = measured_together(ranked)
    key = "4"  # of 128 x 512
    applied = ((mean[key] - kept[key]).square().sum() / mean[key].square().sum()).item()
    alone = [measured_together([each])[0].error_of(key, PowerSGD(2)) for each in ranked]
    assert max(alone) < 0.8 * applied
    assert together.error_of(key, PowerSGD(2)) > 0.8 * applied
