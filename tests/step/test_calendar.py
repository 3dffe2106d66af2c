"""What a step is for: one thing at most, by what ranks have agreed on and the step's number."""

import itertools

import pytest

from fxcomp.plan.verified_steps import NO_STEPS, VerifiedSteps
from fxcomp.step.calendar import Calendar, Use
from fxcomp.step.drift.watch import WINDOW, Schedule

VERIFIED = [NO_STEPS, VerifiedSteps(None), *map(VerifiedSteps, (1, 2, 3, 5, 7, 20))]
"""Never, sampled, each, and others."""

FIRST = [0, 7, 1000]
"""The first step, resumed ones."""

CALENDARS = [
    Calendar(verified, every, first, is_quiet, look_from, check_from)
    for verified, every, first, is_quiet in itertools.product(VERIFIED, (0, 1, 2, 6, 10), FIRST, (True, False))
    for look_from in (None, first, first + 11)
    for check_from in (None, first, first + 4)
]

STEPS = 60


def uses(calendar: Calendar) -> dict[int, Use | None]:
    return {step: calendar.use_of(step) for step in range(calendar.timed_from, calendar.timed_from + STEPS)}


def test_the_verified_steps_are_verified_whatever_else_is_due():
    for calendar in CALENDARS:
        assert all((use is Use.VERIFY) == (step in calendar.verified) for step, use in uses(calendar).items())


def test_nothing_but_verification_while_plans_race_or_warm_up():
    for calendar in CALENDARS:
        if not calendar.is_quiet:
            assert set(uses(calendar).values()) <= {None, Use.VERIFY}, calendar


def test_looks_and_checks_wait_until_they_are_due_and_then_take_the_first_step_that_is_free():
    for calendar in CALENDARS:
        found = uses(calendar)
        for use, due in ((Use.LOOK, calendar.look_from), (Use.CHECK, calendar.check_from)):
            steps = [step for step, other in found.items() if other is use]
            assert not steps or (due is not None and min(steps) >= due), calendar
        due = calendar.look_from
        if calendar.is_quiet and due is not None:
            seldom = calendar.timed_every > 1
            taken = (Use.VERIFY, Use.TIMED) if seldom else (Use.VERIFY,)
            assert all(use is Use.LOOK or use in taken for step, use in found.items() if step >= due), calendar


def test_a_look_comes_before_a_check_and_both_before_timing_of_every_step():
    every_step = Calendar(timed_every=1, look_from=3, check_from=2)
    assert [every_step.use_of(step) for step in range(5)] == [Use.TIMED, Use.TIMED, Use.CHECK, Use.LOOK, Use.LOOK]
    seldom = Calendar(timed_every=2, look_from=3, check_from=1)
    assert [seldom.use_of(step) for step in range(5)] == [Use.TIMED, Use.CHECK, Use.TIMED, Use.LOOK, Use.TIMED]


def test_one_of_each_so_many_steps_is_timed_whatever_is_looked_at():
    for calendar in CALENDARS:
        every, first = calendar.timed_every, calendar.timed_from
        if every > 1 and calendar.is_quiet:
            timed = [step for step, use in uses(calendar).items() if use is Use.TIMED]
            assert len({(step - first) // every for step in timed}) == len(timed), calendar
            is_free = [any(step not in calendar.verified for step in range(k, k + every))
                       for k in range(first, first + STEPS, every)]  # fmt: skip
            assert len(timed) == sum(is_free), calendar


def test_a_calendar_without_data_leaves_every_step_alone():
    assert not any(uses(Calendar()).values())


@pytest.mark.parametrize("begun", [0, 7, 20])
@pytest.mark.parametrize("verify", [2, 3, 4, 5, 7, 10, 20])
@pytest.mark.parametrize("step_us", [1e3, 50e3, 100e3, 1e6])
def test_verified_steps_are_not_timed_and_leave_enough_that_are(step_us: float, verify: int, begun: int):
    verified = VerifiedSteps(verify)
    every = Schedule.of(step_us, verified).every
    calendar = Calendar(verified, every, begun)
    timed = [step for step in range(begun, begun + every * WINDOW) if calendar.use_of(step) is Use.TIMED]
    assert all(step % verify != 0 for step in timed)
    assert WINDOW // 2 < len(timed) <= WINDOW
    assert every == 1 or len(timed) == WINDOW


def test_where_every_step_is_verified_none_is_timed():
    every = Schedule.of(1e3, VerifiedSteps(1)).every
    assert all(Calendar(VerifiedSteps(1), every).use_of(step) is Use.VERIFY for step in range(100))
