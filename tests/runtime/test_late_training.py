"""Steps on a device that works late have the bits of the CPU by any schedule, and the host runs ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.late.training import CASES, STEPS, Trained, all_trained
from helpers.ranks import run_ranks

TWO_STEPS_LATE = "an event at rider.py:begin"
"""Ranks read two steps later what they compare of a step: a host is never further ahead."""

FROM_ASIDE = "an event at aside.py:read"
"""Small numbers that have travelled beside the step."""

LEFT_OUT = "item at packing.py:all_finite"
"""The one read that decides if a step is left out."""

READS = {"accumulated": {FROM_ASIDE}, "unused": {FROM_ASIDE}, "left out": {LEFT_OUT}, "scaled": {LEFT_OUT}}


def check(name: str, found: Trained, schedules: int) -> None:
    assert found.wrong == [], f"{name} differs from the CPU after these schedules"
    assert found.waits.keys() <= {TWO_STEPS_LATE} | READS.get(name, set()), name
    assert all(count <= STEPS * (schedules - 1) for count in found.waits.values()), "more than one read a step"


def check_all(names: Sequence[str], seeds: range) -> None:
    for rank in run_ranks(2, all_trained, names, list(seeds)):
        for name, found in rank.items():
            check(name, found, len(seeds))


def test_every_kind_of_step_trains_as_on_the_cpu_and_the_host_does_not_wait():
    check_all(list(CASES), range(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_by_many_schedules(name: str):
    check_all([name], range(100, 123))
