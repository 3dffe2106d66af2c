"""Looks are as seldom as what they take asks for."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest

from fxcomp.step.errors.error_looks import FIRST, LOOKS, LOOKS_SHARE, steps_after_look

STEP_US, STEPS = 1e5, 20_000


def looks(costs_us: list[float], steps: int) -> list[tuple[int, int]]:
    """When looks at families that take so long are taken, and at which family."""
    found, due, unpaid_us = list[tuple[int, int]](), LOOKS, 0.0
    while due < steps:
        family = len(found) % len(costs_us)
        found.append((due, family))
        first = len(found) < len(costs_us)
        wait, unpaid_us = steps_after_look(unpaid_us + costs_us[family], STEP_US, more_come_first=first)
        due += wait
    return found


@pytest.mark.parametrize("cost_us", [10.0, 3e4, 7e4, 5e5, 3e6])
def test_looks_take_no_more_than_their_share(cost_us: float):
    costs_us = [cost_us, 1.5 * cost_us, 0.5 * cost_us]
    found = looks(costs_us, STEPS)
    paid_us = sum(costs_us[family] for _, family in found[:-1])
    assert paid_us <= LOOKS_SHARE * found[-1][0] * STEP_US + 1, "each is paid for before the next one, but at first"
    if cost_us > 1e4:
        assert paid_us >= 0.5 * LOOKS_SHARE * STEPS * STEP_US, "nor much less, where looks cost anything"


def test_families_take_turns_every_twentieth_step_where_looks_are_cheap():
    found = looks([10.0, 10.0, 10.0], 500)
    assert [family for _, family in found[:6]] == [0, 1, 2, 0, 1, 2]
    gaps = [after - before for (before, _), (after, _) in pairwise(found)]
    assert gaps[:2] == [FIRST, FIRST], "the first ones follow each other"
    assert set(gaps[2:]) == {LOOKS}


def test_first_looks_follow_each_other_and_are_paid_for_together():
    found = looks([0.3 * STEP_US] * 3, 500)
    first = [LOOKS + FIRST * k for k in range(3)]
    assert [step for step, _ in found[:4]] == [*first, first[-1] + ceil(0.9 / LOOKS_SHARE)]


def test_what_takes_many_steps_is_paid_for_before_the_next_one_even_at_first():
    found = looks([8 * STEP_US, 15 * STEP_US, 8 * STEP_US], 10_000)
    assert [step for step, _ in found[:3]] == [LOOKS, LOOKS + FIRST, LOOKS + FIRST + ceil(23 / LOOKS_SHARE)]


def test_no_look_waits_longer_where_no_step_has_been_timed():
    for first in (True, False):
        assert steps_after_look(1e9, 0.0, more_come_first=first) == (LOOKS, 0.0)
