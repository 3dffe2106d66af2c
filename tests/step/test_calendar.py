"""A step is for one thing at most, by what ranks have agreed on and its number."""

import itertools
import json
from dataclasses import replace

import pytest

from fxcomp.errors import BadState
from fxcomp.plan.verified_steps import NO_STEPS, VerifiedSteps
from fxcomp.step.calendar import LASTS, SETTLED, WINDOW, Calendar, RaceTurn, Use
from fxcomp.step.drift.watch import timing_interval

VERIFIED = [NO_STEPS, VerifiedSteps(None), *map(VerifiedSteps, (1, 2, 3, 5, 7, 20))]
"""Never, sampled, each, and others."""

FIRST = [0, 7, 1000]
"""The first step, resumed ones."""

QUIET = [
    Calendar(verified, (0,), first, timed_every=every, look_from=look_from, check_from=check_from)
    for verified, every, first in itertools.product(VERIFIED, (0, 1, 2, 6, 10), FIRST)
    for look_from in (None, first, first + SETTLED + 11)
    for check_from in (None, first, first + 4)
]
"""One plan is followed."""

RACING = [replace(each, turn=RaceTurn(1, each.free_steps(each.followed_from + 3, 4)))
          for each in QUIET if not each.verified.is_all]  # fmt: skip

WARMING = [replace(each, warm_from=(each.followed_from, each.followed_from + 5, 10_000)) for each in QUIET]

STEPS = 60


def uses(calendar: Calendar) -> dict[int, Use | None]:
    return {step: calendar.use_of(step) for step in range(calendar.followed_from, calendar.followed_from + STEPS)}


def test_the_verified_steps_are_verified_whatever_else_is_due():
    for calendar in (*QUIET, *RACING, *WARMING):
        assert all((use is Use.VERIFY) == (step in calendar.verified) for step, use in uses(calendar).items())


def test_only_the_steps_of_its_turn_count_for_a_plan_that_races_and_none_has_another_use():
    for calendar in RACING:
        found, turn = uses(calendar), calendar.turn
        assert turn is not None
        assert tuple(step for step, use in found.items() if use is Use.TURN) == turn.steps, calendar
        assert set(found.values()) <= {None, Use.VERIFY, Use.TURN}, calendar
        assert not any(map(calendar.judges_after, found)), calendar


def test_nothing_but_verification_while_error_feedback_warms_up():
    for calendar in WARMING:
        assert set(uses(calendar).values()) <= {None, Use.VERIFY}, calendar


def test_looks_and_checks_wait_until_they_are_due_and_then_take_the_first_step_that_is_free():
    for calendar in QUIET:
        found = uses(calendar)
        settled = calendar.followed_from + SETTLED
        for use, due in ((Use.LOOK, calendar.look_from), (Use.CHECK, calendar.check_from)):
            steps = [step for step, other in found.items() if other is use]
            assert not steps or (due is not None and min(steps) >= due), calendar
            assert use is Use.CHECK or not steps or min(steps) >= settled, calendar
        if calendar.look_from is not None:
            taken = (Use.VERIFY, Use.TIMED) if calendar.timed_every > 1 else (Use.VERIFY,)
            due = max(calendar.look_from, settled)
            assert all(use is Use.LOOK or use in taken for step, use in found.items() if step >= due), calendar


def test_a_look_comes_before_a_check_and_both_before_timing_of_every_step():
    every_step = Calendar(timed_every=1, followed_from=-SETTLED, look_from=3, check_from=2)
    assert [every_step.use_of(step) for step in range(5)] == [Use.TIMED, Use.TIMED, Use.CHECK, Use.LOOK, Use.LOOK]
    seldom = Calendar(timed_every=2, followed_from=-SETTLED, look_from=3, check_from=1)
    assert [seldom.use_of(step) for step in range(5)] == [Use.TIMED, Use.CHECK, Use.TIMED, Use.LOOK, Use.TIMED]


def test_one_of_each_so_many_steps_is_timed_whatever_is_looked_at():
    for calendar in QUIET:
        every, first = calendar.timed_every, calendar.followed_from
        if every > 1:
            timed = [step for step, use in uses(calendar).items() if use is Use.TIMED]
            assert len({(step - first) // every for step in timed}) == len(timed), calendar
            is_free = [any(step not in calendar.verified for step in range(k, k + every))
                       for k in range(first, first + STEPS, every)]  # fmt: skip
            assert len(timed) == sum(is_free), calendar


def test_ranks_judge_where_two_windows_are_full():
    calendar = Calendar(timed_every=3, window=4, followed_from=100)
    assert [steps for steps in range(200) if calendar.judges_after(steps)] == [124, 148, 172, 196]
    assert calendar.judged_every == 24
    assert not any(map(Calendar().judges_after, range(100))), "nothing is timed"


def test_a_calendar_without_data_leaves_every_step_alone():
    assert not any(uses(Calendar()).values())


def test_a_step_is_of_the_last_stage_that_has_begun():
    calendar = Calendar(warm_from=(0, 3, 10))
    assert [calendar.stage_at(step) for step in (0, 2, 3, 9, 10, 99)] == [0, 0, 1, 1, 2, 2]
    assert [calendar.is_warm_at(step) for step in (9, 10)] == [False, True]
    calendar.stay()
    assert calendar.stage_at(0) == 0
    assert calendar.is_warm_at(0)


def test_a_turn_is_of_steps_that_are_not_verified():
    calendar = Calendar(VerifiedSteps(3))
    calendar.give_turn(2, 6, 4)
    assert calendar.turn == RaceTurn(2, (7, 8, 10, 11))
    assert calendar.turn.ends == 12


def test_patience_doubles_as_long_as_planning_again_changes_nothing():
    calendar = Calendar(timed_every=1, window=10)
    until: list[int] = []
    for changed in (False, False, True, False):
        calendar.be_patient(100, changed=changed)
        until.append(calendar.patient_until)
    assert until == [140, 180, 120, 140]


def test_what_was_waited_for_lasts_over_a_start_and_all_else_is_of_the_new_one():
    before = Calendar(VerifiedSteps(3), (0, 5), 30, RaceTurn(1, (40, 41)), 2, look_from=50, check_from=60)
    before.be_patient(35, changed=False)
    before.solved_at = 20
    saved = json.loads(json.dumps(before.to_json()))
    after = Calendar(VerifiedSteps(7), timed_every=4)
    after.resume(39, saved)
    assert after.to_json() == before.to_json()
    lasting = {name: getattr(before, name) for name in LASTS}
    assert after == Calendar(VerifiedSteps(7), followed_from=39, timed_every=4, **lasting)
    after.resume(10)
    assert after == Calendar(VerifiedSteps(7), (0,), 10, timed_every=4, patient_until=10, solved_at=10)


def test_a_calendar_that_is_none_is_refused():
    with pytest.raises(BadState, match="solved_at = 'soon', which is no number of steps"):
        Calendar().resume(3, {"solved_at": "soon"})


@pytest.mark.parametrize("begun", [0, 7, 20])
@pytest.mark.parametrize("verify", [2, 3, 4, 5, 7, 10, 20])
@pytest.mark.parametrize("step_us", [1e3, 50e3, 100e3, 1e6])
def test_verified_steps_are_not_timed_and_leave_enough_that_are(step_us: float, verify: int, begun: int):
    verified = VerifiedSteps(verify)
    every = timing_interval(step_us, verified)
    calendar = Calendar(verified, followed_from=begun, timed_every=every)
    timed = [step for step in range(begun, begun + every * WINDOW) if calendar.use_of(step) is Use.TIMED]
    assert all(step % verify != 0 for step in timed)
    assert WINDOW // 2 < len(timed) <= WINDOW
    assert every == 1 or len(timed) == WINDOW


def test_where_every_step_is_verified_none_is_timed():
    calendar = Calendar(VerifiedSteps(1), timed_every=timing_interval(1e3, VerifiedSteps(1)))
    assert all(calendar.use_of(step) is Use.VERIFY for step in range(100))
