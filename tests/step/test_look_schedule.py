"""Looks are scheduled by what they take: seldom enough, and spread over steps where they are long."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest

from fxcomp.step.look_schedule import LEAST, ROOM, SHARE, LookSchedule

STEP_US, STEPS = 1e5, 20_000


def is_due(schedule: LookSchedule, step: int) -> bool:
    return schedule.due_from is not None and step >= schedule.due_from


def looks(
    costs_us: list[float], steps: int, estimates_us: list[float] | None = None
) -> list[tuple[int, tuple[int, ...]]]:
    """When looks of families that take so long are taken, and at which families."""
    schedule, found = LookSchedule(estimates_us or costs_us), list[tuple[int, tuple[int, ...]]]()
    for step in range(steps):
        families = schedule.families if is_due(schedule, step) else ()
        if families:
            found.append((step, families))
            schedule.took(step + 1, sum(costs_us[place] for place in families), STEP_US)
        elif schedule.asks_at(step + 1):
            schedule.begin(step + 1, STEP_US)
    return found


@pytest.mark.parametrize("cost_us", [10.0, 3e4, 7e4, 5e5])
@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_looks_take_no_more_than_their_share(cost_us: float, wrong: float):
    costs_us = [cost_us, 1.5 * cost_us, 0.5 * cost_us]
    found = looks(costs_us, STEPS, [wrong * each for each in costs_us])
    times_us = [sum(costs_us[place] for place in families) for _, families in found]
    assert sum(times_us) <= SHARE * found[-1][0] * STEP_US + 1
    if cost_us > 1e4:
        assert sum(times_us) >= 0.6 * SHARE * STEPS * STEP_US, "nor much less, where looks cost anything"


def test_cheap_looks_are_at_all_families_every_twentieth_step():
    found = looks([10.0, 10.0, 10.0], 500)
    assert [families for _, families in found[:4]] == [(0,), (1,), (2,), (0, 1, 2)]
    steps = [step for step, _ in found]
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps[:2] == [2, 2], "the first ones come at once"
    assert set(gaps[2:]) == {LEAST}


def test_first_looks_come_at_once_and_are_paid_for_before_the_next_one():
    costs_us = [0.3 * STEP_US] * 3
    found = looks(costs_us, 500)
    assert [step for step, _ in found[:3]] == [LEAST, LEAST + 2, LEAST + 4]
    assert found[3][0] >= LEAST + 4 + (0.9 + 0.3 * len(found[3][1])) / SHARE
    long = looks([8 * STEP_US] * 3, 5000)
    assert long[0][0] >= LEAST + 8 / SHARE, "what takes many steps is paid for beforehand"


def test_families_take_turns_where_a_look_at_all_would_make_the_step_twice_as_long():
    found = looks([0.5 * STEP_US, 0.2 * STEP_US, 0.6 * STEP_US], 2000)
    assert [families for _, families in found[3:7]] == [(0, 1), (2,), (0, 1), (2,)]


def test_a_look_that_was_disturbed_does_not_stop_looks():
    schedule = LookSchedule([1e4])
    schedule.begin(20, STEP_US)
    schedule.took(41, 1e4, STEP_US)
    schedule.took(61, 1e9, STEP_US)
    paid = ceil((3e4 + 2.5e4) / (SHARE * STEP_US))  # what it took longer, up to four times, and the next by the mean
    assert not schedule.is_too_long(0)
    assert not is_due(schedule, 60 + paid - 1)
    assert is_due(schedule, 60 + paid)
    assert ROOM < 1


def test_nothing_is_due_until_quiet_steps_have_passed():
    schedule = LookSchedule([1e4])
    schedule.postpone(100)
    assert not schedule.asks_at(100 + LEAST - 1)
    assert schedule.asks_at(100 + LEAST)
    schedule.begin(100 + LEAST, 0.0)
    assert not schedule.asks_at(100 + LEAST), "a rank that has timed no step is asked again later"
    schedule.begin(100 + 2 * LEAST, STEP_US)
    schedule.postpone(200)
    assert not is_due(schedule, 200 + LEAST - 1)
    assert is_due(schedule, 200 + LEAST)


def test_gradients_take_turns_where_one_family_takes_longer_than_a_step():
    schedule = LookSchedule([2e4, 3e5])
    schedule.begin(20, STEP_US)
    assert schedule.is_too_long(0)
    schedule.split(0, 0.4)
    assert [schedule.is_too_long(group) for group in (0, 1)] == [True, True]
    schedule.split(0, 0.5)
    schedule.split(2, 0.5)
    seen: list[tuple[int, tuple[int, ...]]] = []
    for step in range(100, 2000, 100):
        families = schedule.families
        seen.append((schedule.group, families))
        schedule.took(step, sum((5e3, 7e4)[place] for place in families), STEP_US)
    alone = [(group, (place,)) for group in range(4) for place in (0, 1)]
    assert seen[:8] == alone
    assert seen[8:12] == [(group, (0, 1)) for group in range(4)], "known to fit together"


def test_a_group_that_is_split_before_its_turn_leaves_the_turn_where_it_is():
    schedule = LookSchedule([1e5])
    schedule.begin(20, STEP_US)
    schedule.split(0, 0.5)
    schedule.took(50, 5e4, STEP_US)
    assert schedule.group == 1
    schedule.split(0, 0.5)
    assert schedule.group == 2


@pytest.mark.parametrize("epoch", [3, 7, 21])
def test_an_epoch_whose_last_batch_is_shorter_does_not_refuse_every_look(epoch: int):
    schedule = LookSchedule([1.0])
    schedule.begin(LEAST, 1e6)
    tried = [step for step in range(1000) if is_due(schedule, step) and not schedule.was_refused(step + 1)]
    assert len(tried) > 10
    refused = [step for step in tried if step % epoch == tried[0] % epoch]
    assert len(refused) <= len(tried) / 2 + 1
