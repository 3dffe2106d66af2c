"""Bugs to plant in what a running step keeps true: watched values, the schedule, agreement, optimizers, checkpoints."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fxcomp.capture import fake_mode, optimizer, probe, step_guard, untouched, updates, watch
from fxcomp.runtime import packing
from fxcomp.state import checkpoint, inputs, momenta, saved_state
from fxcomp.step import drift, race, schedule
from fxcomp.step.alike import Alike
from fxcomp.step.calendar import Calendar
from fxcomp.step.errors import adaptation
from fxcomp.step.race import Race
from fxcomp.step.schedule import Schedule, StepSchedule
from helpers.planting import caught_by, exchange, wrap

SCHEDULE, CALENDAR = "tests/step/test_schedule.py", "tests/step/test_calendar.py"

# The schedule


@caught_by(f"{SCHEDULE}::test_plans_take_turns_and_the_measured_best_stays")
def the_plan_in_force_wins_every_race() -> None:
    Race._winner = lambda _: 0


@caught_by("tests/step/test_race.py::test_a_tie_goes_to_the_plan_that_loses_less")
def a_tie_goes_to_the_lowest_time() -> None:
    race.TIE = 0.0


@caught_by("tests/step/test_race.py::test_a_slow_runner_is_out_after_its_heat")
def a_slow_plan_runs_to_the_end_of_a_race() -> None:
    Race._is_beaten = lambda *_: False


@caught_by("tests/step/test_race.py::test_a_runner_that_is_predicted_far_from_the_best_does_not_run")
def a_race_may_cost_whatever_it_costs() -> None:
    race.FAR = 1e9


@caught_by(f"{CALENDAR}::test_a_turn_is_of_steps_that_are_not_verified")
def verified_steps_count_in_a_race() -> None:
    Calendar.free_steps = lambda _, step, count: tuple(range(step, step + count))


@caught_by(f"{CALENDAR}::test_the_verified_steps_are_verified_whatever_else_is_due")
def a_race_takes_verified_steps() -> None:
    Calendar.is_verified = lambda self, step: self.turn is None and step in self.verified


@caught_by(f"{CALENDAR}::test_nothing_but_verification_while_error_feedback_warms_up")
def looks_are_taken_in_a_warm_up() -> None:
    Calendar.is_warm_at = lambda *_: True


@caught_by(f"{CALENDAR}::test_patience_doubles_as_long_as_planning_again_changes_nothing")
def patience_stays_as_it_is() -> None:
    own = Calendar.be_patient
    Calendar.be_patient = lambda self, step, **_: own(self, step, changed=True)


@caught_by(f"{SCHEDULE}::test_a_race_waits_for_the_warm_up_and_none_is_held_where_it_is_off")
def a_race_begins_in_the_warm_up() -> None:
    race_of = schedule.Race
    schedule.Race = lambda runners, _, free: race_of(runners, race.WARM_STEPS, free)


@caught_by(f"{SCHEDULE}::test_a_race_under_way_refuses_to_plan_again_and_one_to_come_does_not")
def a_plan_is_made_again_in_the_middle_of_a_race() -> None:
    Schedule.takes_turns = lambda *_: False


@caught_by(f"{SCHEDULE}::test_a_drift_that_changes_no_plan_is_waited_for_twice_as_long")
def the_settled_time_outlives_its_plan() -> None:
    def keeping(self: StepSchedule, own: Any, step: int) -> None:
        settled = self._settled
        own(self, step)
        self._settled = settled

    wrap(StepSchedule, "_settle_anew", keeping)


@caught_by(f"{SCHEDULE}::test_a_job_that_goes_back_begins_its_race_again")
def a_race_goes_on_where_a_job_goes_back() -> None:
    Schedule.wait = lambda *_: None


@caught_by(f"{SCHEDULE}::test_where_a_rank_never_times_a_step_the_plan_in_force_stays")
def a_step_counts_where_one_rank_has_timed_it() -> None:
    def end_turn(self: Race, own: Any, slowest_ms: Any) -> None:
        own(self, [10.0 - self.turn.number if ms is None else ms for ms in slowest_ms])

    wrap(Race, "end_turn", end_turn)


@caught_by(f"{SCHEDULE}::test_a_rank_that_becomes_slow_is_drift_for_all")
def the_fastest_rank_tells_of_drift() -> None:
    vars(schedule)["max"] = lambda *values: max(values) if len(values) > 1 else min(*values)


@caught_by(
    "tests/step/test_drift.py::test_noise_and_a_moment_that_is_shorter_than_half_a_window_do_not_move_the_median"
)
def the_mean_of_a_window_stands_for_its_median() -> None:
    drift.statistics = SimpleNamespace(median=lambda values: sum(values) / len(values))


@caught_by("tests/step/test_change_of_errors.py::test_errors_of_rounding_are_no_change")
def rounding_is_taken_for_a_change_of_errors() -> None:
    adaptation.ROUNDING = 0.0


# Watched values

WATCHED = "tests/capture/test_watched_values.py"


@caught_by(f"{WATCHED}::test_a_global_is_followed")
def globals_are_not_watched() -> None:
    watch._globals_named = lambda _: ()


@caught_by(f"{WATCHED}::test_equal_values_in_other_objects_are_no_change")
def values_are_compared_by_identity() -> None:
    watch.is_plain_value = lambda _: False


@caught_by(f"{WATCHED}::test_a_state_that_comes_again_is_not_captured_again")
def a_state_that_comes_again_is_new() -> None:
    def number(self: watch.Watch, own: Any, before_look: Any = lambda: None) -> int:
        self._numbers = getattr(self, "_numbers", 0) + 1
        own(self, before_look)
        return self._numbers

    wrap(watch.Watch, "number", number)


@caught_by("tests/capture/test_step_guard.py::test_hooks_that_come_later_run")
def hooks_of_modules_are_not_watched() -> None:
    def without_hooks(self: watch.Watched, own: Any, kind: str, *given: Any, **more: Any) -> None:
        if "hook" not in kind:
            own(self, kind, *given, **more)

    wrap(watch.Watched, "_follow_entry", without_hooks)


@caught_by("tests/capture/test_step_guard.py::test_a_default_dtype_is_baked_in_and_watched")
def the_default_dtype_is_not_watched() -> None:
    step_guard.READ["the default dtype"] = lambda: None


@caught_by("tests/capture/test_step_guard.py::test_not_a_number_equals_itself")
def a_value_that_is_no_number_changes_in_every_step() -> None:
    numbers = itertools.count()

    def of(kind: Any, value: Any, text: str | None = None) -> watch.Plain:
        is_number = value == value
        return kind(type(value), (text or repr(value)) if is_number else f"nan {next(numbers)}")

    watch.Plain.of = classmethod(of)


@caught_by(
    "tests/capture/test_left_by_tracing.py::test_python_that_counts_its_calls_outside_the_model_is_refused_and_the_count_is_put_back"
)
def a_count_that_tracing_has_moved_stays() -> None:
    untouched._put_back = lambda *_: None


@caught_by(
    "tests/capture/test_left_by_tracing.py::test_drawing_with_python_or_numpy_is_refused_and_leaves_their_states"
)
def a_draw_of_pythons_random_is_not_seen() -> None:
    untouched._is_same = lambda *_: True


LIVE = "tests/capture/test_live_floats.py::test_a_float_that_changes_in_every_step_trains_as_in_eager"


@caught_by(LIVE)
def a_live_float_that_decides_stays_live() -> None:
    fake_mode.StepInputs.decided = property(lambda _: [])


@caught_by(LIVE)
def a_live_float_is_read_when_the_step_is_captured() -> None:
    first = dict[str, Any]()

    def read_once(own: Any, self: Any, *given: Any) -> Any:
        live = self.training.watch.live
        fixed = {name: first.setdefault(name, SimpleNamespace(value=place.value)) for name, place in live.items()}
        with patch.object(watch.Watch, "live", fixed):
            return own(self, *given)

    wrap(inputs.Inputs, "of", read_once)


# Optimizers


@caught_by("tests/capture/test_optimizers.py::test_sgd_follows_its_schedules_with_every_option")
def an_update_is_traced_with_the_rates_of_now() -> None:
    optimizer.is_number = lambda _: False
    exchange(optimizer.is_number, optimizer.is_number)


@caught_by("tests/capture/test_optimizers.py::test_gradients_are_clipped_by_value_as_in_eager_pytorch")
def gradients_are_clipped_at_twice_the_value() -> None:
    def twice(own: Any, graph: Any, gradient: Any, owner: Any, limit: float, inputs: Any) -> Any:
        return own(graph, gradient, owner, 2 * limit, inputs)

    own = updates.clip_by_value
    wrap(updates, "clip_by_value", twice)
    exchange(own, updates.clip_by_value)


@caught_by(
    "tests/capture/test_optimizers.py::test_an_optimizer_that_knows_its_parameters_is_refused_and_leaves_them_alone"
)
def an_optimizer_that_keeps_its_parameters_is_taken() -> None:
    probe._check_tells_by_values = lambda *_: None
    probe._check_are_apart = lambda *_: None


@caught_by("tests/step/test_freeze_again.py::test_steps_to_forget")
def a_thaw_is_forgotten_at_once() -> None:
    exchange(momenta.steps_to_forget, lambda *_: 0)


# Agreement


@caught_by(
    "tests/step/test_alike.py::test_a_number_that_one_rank_changes_alone_is_named_on_all_ranks_before_any_update"
)
def numbers_that_differ_are_told_of_nobody() -> None:
    Alike.facts = lambda _: {}


@caught_by("tests/step/test_feedback_commit.py::test_one_value_that_is_not_finite_is_found_wherever_it_lies")
def infinity_counts_as_finite() -> None:
    packing._is_finite = lambda value: not bool(value.isnan().any())


# States and checkpoints


@caught_by(
    "tests/state/test_saved_states.py::test_states_of_other_steps_or_of_another_number_of_ranks_are_refused_on_all"
)
def states_of_different_steps_are_joined() -> None:
    exchange(saved_state.check_shared_facts, lambda _: None)


@caught_by("tests/state/test_saved_states.py::test_what_nobody_loads_is_told")
def what_is_lost_in_a_state_is_not_said() -> None:
    exchange(saved_state.tell_what_is_lost, lambda *_: None)


@caught_by("tests/state/test_checkpoint.py::test_names_of_ranks_differ_so_that_all_of_them_fit_into_one_file")
def ranks_write_their_states_under_one_name() -> None:
    wrap(checkpoint, "to_tensors", lambda own, state, *_: own(state, 0))
    exchange(checkpoint.to_tensors.args[0], checkpoint.to_tensors)


@caught_by("tests/state/test_checkpoint.py::test_the_plan_that_was_followed_is_read_back")
def a_checkpoint_has_no_plan() -> None:
    exchange(checkpoint.saved_plan, lambda _: None)
