"""A linear layer's compiled step on every rank, quick to compile again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxcomp
from fxcomp.step.compiled_step import CompiledStep
from helpers.drifting import links_become, table
from helpers.gathered import gathered
from helpers.jobs import cross_entropy, rows


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    return rows(torch.Generator().manual_seed(100 * number + dist.get_rank()), 6)


def compiled(**options: Any) -> CompiledStep:
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"costs": table(2.0), "race": "off", **options}
    return fxcomp.compile_step(model, cross_entropy, optimizer, batch(), **gathered(**given))


def parameters_of(step: CompiledStep) -> list[float]:
    return nn.utils.parameters_to_vector(step.training.model.parameters()).tolist()


def replanning() -> Callable[[], CompiledStep]:
    """Plan again at each call, by links that are slow and fast in turns."""
    step, speeds = compiled(), itertools.cycle((0.05, 2.0))

    def plan() -> CompiledStep:
        with links_become(next(speeds)):
            step.replan()
        return step

    return plan
