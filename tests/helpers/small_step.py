"""A linear layer's compiled step on every rank, quick to compile again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxcomp
from fxcomp.graph.lines import CostKind
from fxcomp.step.compiled_step import CompiledStep
from fxcomp.step.drift.judge import Finding
from fxcomp.step.drift.predicted_costs import Cost
from fxcomp.step.monitor import Monitor
from helpers.drifting import table
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
    """Plan again at each call, for a reason that all ranks see each time, with a pool to be added."""
    step = compiled()
    findings = (Finding(Cost(CostKind.COMPUTE), 1000.0, 3000.0, ((0, 1000.0, 3000.0),)),)
    compare = Monitor.compare

    def seen(self: Monitor, step: int) -> Any:
        compare(self, step)
        return findings

    def plan() -> CompiledStep:
        with patch.object(Monitor, "compare", seen), patch.object(Monitor, "check_timed"):
            step.replan()
        return step

    return plan
