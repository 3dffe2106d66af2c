"""Steps on a device that works late have the bits of the CPU by any schedule, and the host runs ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.late.training import CASES, HOOK_CASES, SHARDED_CASES, STEPS, Trained, all_trained, begins
from helpers.ranks import run_ranks

TWO_STEPS_LATE = "an event at rider.py:begin"
"""Ranks read two steps later what they compare of a step: a host is never further ahead."""

FROM_ASIDE = "an event at aside.py:read"
"""Small numbers that have travelled beside the step."""

LEFT_OUT = "item at packing.py:all_finite"
"""The one read that decides if a step is left out."""

ZEROS = "a copy at unused.py:put_back"
"""The one read of which gradients of a backward pass are zero on all ranks."""

RATES = "a copy at optimizer.py:read_together"
"""The one read of all rates that are tensors."""

READS = {
    **{name: {TWO_STEPS_LATE} for name in CASES},
    "accumulated": {TWO_STEPS_LATE, FROM_ASIDE},
    "unused": {TWO_STEPS_LATE, FROM_ASIDE},
    "left out": {TWO_STEPS_LATE, LEFT_OUT},
    "two shots": {TWO_STEPS_LATE, LEFT_OUT},
    "in turns, not finite": {TWO_STEPS_LATE, LEFT_OUT},
    "scaled, rates as tensors": {TWO_STEPS_LATE, LEFT_OUT, RATES},
    "rates as tensors": {TWO_STEPS_LATE, RATES},
    "hook, unused and scaled": {LEFT_OUT, ZEROS},
    "hook, agreed": {LEFT_OUT},
}

QUICK = (
    "in the pool",
    "in turns, not finite",
    "accumulated",
    "unused",
    "scaled, rates as tensors",
    "hook, unused and scaled",
)
"""The last two read the device each step, so they cannot show what a host that runs ahead overwrites."""


def check(name: str, found: Trained, schedules: int) -> None:
    assert found.wrong == [], f"{name} differs from the CPU after these schedules"
    assert found.waits.keys() <= READS.get(name, set()), name
    assert all(count <= STEPS * (schedules - begins(name)) for count in found.waits.values()), "more than one a step"


def check_all(names: Sequence[str], seeds: range) -> None:
    for rank in run_ranks(2, all_trained, names, list(seeds), timeout_s=900):
        for name, found in rank.items():
            check(name, found, len(seeds))


def test_steps_and_passes_train_as_on_the_cpu_and_the_host_does_not_wait():
    check_all(QUICK, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *HOOK_CASES, *SHARDED_CASES])
def test_by_many_schedules(name: str):
    check_all([name], range(100, 116))
