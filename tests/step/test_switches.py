"""State that outlives a switch of plans, and device times while one is judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from helpers.ranks import run_ranks
from torch import nn

import fxcomp
from fxcomp.plan.strategy import DENSE
from fxcomp.runtime.clock import Waits
from fxcomp.step import step_times
from fxcomp.step.step_times import StepTimes


def remembered_by_compressors() -> list[dict[str, Any]]:
    """The state of a compressor before a dense plan is followed, under it, and when the first plan comes again."""
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8), (torch.randn(4, 8),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxcomp.compile_step(model, lambda m, b: m(b[0]).square().mean(), optimizer, batch, compress="powersgd(1)")
    compressed = step.in_force.decision
    dense = replace(compressed, plan=compressed.plan.with_strategies([DENSE] * len(compressed.plan.buckets)))
    found: list[dict[str, Any]] = []
    for decision in (compressed, dense, compressed):
        if step.plan != decision.plan:
            step.in_force.switch(decision, "changing plans")
        if decision is dense or not found:
            step(batch)
        kept = step.state_dict()["compressors"].items()
        found.append({name: [part["state"].tolist() for part in parts] for name, parts in kept})
    return found


def test_compressors_remember_over_a_dense_plan():
    for before, under_dense, after in run_ranks(2, remembered_by_compressors):
        assert before
        assert before == under_dense == after


class DeviceTime:
    """The clock of a device that is asked about its work only when somebody waits for it."""

    sees_threads = False

    def __init__(self) -> None:
        self.now = self.done = 0.0

    def look(self) -> float:
        return self.now

    def us(self, start: float, end: float) -> float | None:
        return end - start if end <= self.done else None

    def synchronize(self, _: torch.device) -> None:
        self.done = self.now


def test_plans_are_compared_by_what_the_device_took_and_not_by_how_soon_it_was_given_work():
    clock = DeviceTime()
    with (
        patch.object(step_times, "Clock", lambda _: clock),
        patch.object(step_times.compat, "synchronize", clock.synchronize),
    ):
        times = StepTimes(torch.device("cpu"))
        for number in (3, 4, 6):
            begin = times.look()
            clock.now += 2e6
            times.add(number, [(begin, times.look())], Waits())
        assert not times.step_ms
        assert times.of([3, 4, 5, 6]) == [2000.0, 2000.0, None, 2000.0]
