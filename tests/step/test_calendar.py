"""A step is for one thing at most, by what ranks have agreed on and its number."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from fxcomp.plan.verified_steps import NO_STEPS, VerifiedSteps
from fxcomp.step.calendar import BEGINS, IS_SETTLED, LASTS, SETTLED, WINDOW, Calendar, RaceTurn, Use

VERIFIED = [NO_STEPS, VerifiedSteps(None), *map(VerifiedSteps, (1, 2, 3, 5, 7, 20))]
"""Never, sampled, each, and others."""

FIRST = [0, 7, 1000]
"""The first step, resumed ones."""

QUIET = [
    Calendar(verified, (0,), first, look_from=look_from)
    for verified, first in itertools.product(VERIFIED, FIRST)
    for look_from in (None, first, first + SETTLED + 11)
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


def test_looks_wait_until_they_are_due_and_then_take_the_first_step_that_is_free():
    for calendar in QUIET:
        found = uses(calendar)
        settled = calendar.followed_from + SETTLED
        due, steps = calendar.look_from, [step for step, use in found.items() if use is Use.LOOK]
        assert not steps or (due is not None and min(steps) >= max(due, settled)), calendar
        if calendar.look_from is not None:
            due = max(calendar.look_from, settled)
            assert all(use in (Use.LOOK, Use.VERIFY) for step, use in found.items() if step >= due), calendar


def test_ranks_judge_where_a_window_is_full():
    calendar = Calendar(followed_from=100)
    assert [steps for steps in range(501) if calendar.judges_after(steps)] == [200, 300, 400, 500]
    calendar.warm_from = (0, 250)
    assert [steps for steps in range(501) if calendar.judges_after(steps)] == [300, 400, 500], "not in a warm-up"


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
    turn = RaceTurn(2, calendar.free_steps(6, 4))
    assert turn.steps == (7, 8, 10, 11)
    assert turn.ends == 12


def test_patience_doubles_as_long_as_planning_again_changes_nothing():
    calendar = Calendar()
    until: list[int] = []
    for changed in (False, False, True, False):
        calendar.be_patient(100, changed=changed)
        until.append(calendar.patient_until)
    assert until == [100 + k * WINDOW for k in (2, 4, 1, 2)]


def test_what_was_waited_for_lasts_over_a_start_and_all_else_is_of_the_new_one():
    before = Calendar(VerifiedSteps(3), (0, 5), 30, RaceTurn(1, (40, 41)), look_from=50)
    before.be_patient(35, changed=False)
    saved = json.loads(json.dumps(before.to_json(steps=9)))
    after = Calendar(VerifiedSteps(7))
    after.resume(39, saved)
    assert after.to_json(steps=9) == {**before.to_json(steps=9), IS_SETTLED: True, BEGINS: 0}
    lasting = {name: getattr(before, name) for name in LASTS}
    assert after == Calendar(VerifiedSteps(7), followed_from=39, **lasting)
    after.resume(10)
    assert after == Calendar(VerifiedSteps(7), (0,), 10, patient_until=10)


def test_free_steps_are_the_same_on_a_rank_that_knows_of_one_more_verified_step():
    here, there = (Calendar(VerifiedSteps(3), verified_too=too) for too in (7, None))
    assert here.free_steps(5, 4) == there.free_steps(5, 4) == (5, 7, 8, 10)
    here.timed = here.free_steps(5, 4)
    assert here.use_of(7) is Use.VERIFY


def test_a_state_from_before_the_plan_began_begins_with_it():
    calendar = Calendar(warm_from=(10, 40))
    assert [calendar.to_json(steps)[BEGINS] for steps in (0, 5, 10, 50)] == [0, 5, 10, 10]


@pytest.mark.parametrize("uses", [{"timed": (3,)}, {"checked": (1, 3)}, {"turn": RaceTurn(0, (4,))}])
def test_a_saved_calendar_says_whether_the_plan_of_then_was_to_stay(uses: dict[str, Any]):
    assert Calendar().to_json(steps=9)[IS_SETTLED]
    assert not Calendar(**uses).to_json(steps=9)[IS_SETTLED]
