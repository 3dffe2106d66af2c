"""The schedule of a job on virtual ranks and in virtual time: races, drift and looks, without a step that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.virtual_ranks import VirtualRank, run_virtual

from fxcomp.cost.table import CostTable
from fxcomp.errors import CannotReplan
from fxcomp.options import Checks, StepOptions
from fxcomp.plan.compress import Compress
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.plan.verified_steps import VerifiedSteps
from fxcomp.search.decision import Decision
from fxcomp.search.runners import Runner
from fxcomp.step.calendar import WINDOW, Calendar, Use
from fxcomp.step.drift import SMALL_BYTES
from fxcomp.step.race import WARM_STEPS
from fxcomp.step.schedule import StepSchedule

NAMES = "dense", "int8", "bf16"
UNVERIFIED, PLANNED_AGAIN = Checks(verify="never"), Checks(verify="never", replan="auto")

Times = Callable[[str, int, int], float | None]
"""The time of a step under a plan, by the plan's name, the step and the rank, in ms; None where it is not timed."""


def plan_of(name: str) -> Plan:
    text = f"compress({name}) > all_gather@world > decompress"
    return Plan((Bucket(("weight",), (8,), DENSE if name == "dense" else Strategy.parse(text)),))


PLANS = {name: plan_of(name) for name in NAMES}


def named(plan: Plan) -> str:
    return next(name for name, each in PLANS.items() if each == plan)


def runner(name: str, predicted_ms: float) -> Runner:
    return Runner(name, PLANS[name], 1e3 * predicted_ms, 0.5, 0.0 if name == "dense" else 1e-4)


@dataclass
class Force:
    """A plan in force, and those that take turns with it; it keeps no gradients and runs nothing."""

    decision: Any
    calendar: Calendar = field(default_factory=Calendar)
    racing: list[Plan] = field(default_factory=list[Plan])
    is_warm: bool = True
    switches: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.plan = self.lasting = self.decision.plan
        self.momenta = SimpleNamespace(is_due=lambda _: False, is_thawed=False, freezes_at=None)
        self.standing = SimpleNamespace(timeline=SimpleNamespace(step_time_us=1e3))
        self.inputs = SimpleNamespace(training=None)

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (self.plan,)

    @property
    def is_racing(self) -> bool:
        return bool(self.racing)

    def enter_stage_of(self, _: int) -> bool:
        return False

    def line_up(self, plans: Sequence[Plan], _: str) -> None:
        self.racing = [self.plan, *plans]

    def take_turn(self, number: int) -> None:
        self.plan = self.racing[number]

    def settle_on(self, number: int) -> None:
        self.plan = self.lasting = self.racing[number]
        self.racing = []

    def switch(self, decision: Any, topic: str) -> None:
        self.decision, self.plan, self.lasting, self.racing = decision, decision.plan, decision.plan, []
        self.switches.append(topic)


class Clock:
    """The times of steps, as a table says; ranks agree on the slowest."""

    def __init__(self, times: Times, rank: VirtualRank) -> None:
        self._times, self._rank, self._known = times, rank, dict[int, float | None]()

    def run(self, step: int, plan: Plan) -> None:
        self._known[step] = self._times(named(plan), step, self._rank.rank)

    def forget(self) -> None:
        self._known.clear()

    def since(self, first: int) -> list[float]:
        return [ms for step, ms in self._known.items() if step >= first and ms is not None]

    def slowest(self, steps: Sequence[int], site: Any) -> list[float | None]:
        mine = [-1.0 if (ms := self._known.get(step)) is None else ms for step in steps]
        everyone = site.gather_numbers("turns", mine)
        return [max(times) if min(times) >= 0 else None for times in zip(*everyone, strict=True)]


@dataclass
class Planner:
    """Chooses a plan again whenever it is asked."""

    chosen: str
    links_us: Callable[[int], float]
    """The time of an all_reduce of SMALL_BYTES, by the number of steps so far."""
    measures: int = 0
    sums: list[int] = field(default_factory=list[int])
    """The sizes of all_reduces that were timed."""
    steps: int = 0
    terms: Any = None

    @property
    def earlier(self) -> Planner:
        return self

    def again(self, costs: CostTable, topic: str, errors: Any) -> Any:
        del topic, errors
        return decided(self.chosen, costs)

    def forget(self) -> None:
        self.measures += 1

    def sum_us(self, size: int) -> float:
        self.sums.append(size)
        return self.links_us(self.steps) * size / SMALL_BYTES


def decided(name: str, costs: CostTable, *runners: Runner) -> Any:
    workload = SimpleNamespace(dense_bytes=32)
    choice = SimpleNamespace(runners=runners, dense_us=1e3)
    return Decision(PLANS[name], costs, cast(Any, workload), cast(Any, choice))


@dataclass(frozen=True)
class Job:
    """Hold one rank's view: the plan and the use of each step, and the notes."""

    plans: list[str]
    uses: list[Use | None]
    notes: list[str]
    switches: list[str]
    measures: int
    sums: list[int]
    patience: int


class Costs:
    def collective(self, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(us=500.0)


def follow(
    times: Times,
    steps: int,
    runners: Sequence[Runner] = (),
    ranks: int = 2,
    checks: Checks = UNVERIFIED,
    chosen: str = "dense",
    before: Callable[[StepSchedule, int], None] = lambda *_: None,
    links_us: Callable[[int], float] = lambda _: 50e3,
) -> Job:
    """Let ranks follow a schedule; all must see the same."""

    def work(rank: VirtualRank) -> Job:
        told = [0]

        def gather(what: str, values: list[float]) -> list[list[float]]:
            told[0] += 1
            return rank.gather(f"{what} {told[0]}", values)

        def from_rank_0(topic: str, made: Callable[[], Any]) -> Any:
            return gather(topic, made())[0]

        talk = SimpleNamespace(
            world_size=ranks, rank=rank.rank, together=lambda _: nullcontext(), from_rank_0=from_rank_0
        )
        site = SimpleNamespace(ranks=talk, cluster=None, gather_numbers=gather)
        options = StepOptions(compress=Compress.of("balanced"), checks=checks)
        first = runners[0].name if runners else "dense"
        force, notes = Force(decided(first, cast(CostTable, Costs()), *runners)), list[str]()
        clock, planner = Clock(times, rank), Planner(chosen, links_us)
        schedule = StepSchedule(cast(Any, force), cast(Any, clock), planner, options, cast(Any, site), notes.append)
        plans, uses = list[str](), list[Use | None]()
        for step in range(steps):
            before(schedule, step)
            schedule.before_step(step)
            use = schedule.calendar.use_of(step)
            uses.append(use)
            plans.append(named(force.plan))
            if use is not Use.VERIFY:
                clock.run(step, force.plan)
            planner.steps = step + 1
            schedule.between(step + 1)
        counts = planner.measures, planner.sums
        return Job(plans, uses, notes, force.switches, *counts, schedule.calendar.patience)

    first, *others = run_virtual(ranks, work)
    assert all(other == first for other in others), "all ranks see the same"
    return first


def steady(times_ms: Mapping[str, float]) -> Times:
    return lambda plan, step, rank: times_ms[plan] + 0.01 * ((7 * step + rank) % 5)


RUNNERS = runner("int8", 10.0), runner("bf16", 14.0), runner("dense", 20.0)


@pytest.mark.parametrize(
    ("times_ms", "stays"),
    [
        ({"int8": 10.0, "bf16": 14.0, "dense": 20.0}, "int8"),
        ({"int8": 30.0, "bf16": 14.0, "dense": 20.0}, "bf16"),
        ({"int8": 30.0, "bf16": 31.0, "dense": 9.0}, "dense"),
    ],
)
def test_plans_take_turns_and_the_measured_best_stays(times_ms: dict[str, float], stays: str):
    found = follow(steady(times_ms), 80, RUNNERS)
    assert set(found.plans[:40]) == set(times_ms)
    assert set(found.plans[60:]) == {stays}
    assert [note.split()[0] for note in found.notes] == ["raced"]
    turns = [step for step, use in enumerate(found.uses) if use is Use.TURN]
    assert turns[-1] < 60
    assert found.uses[60:] == [None] * 20


def test_verified_steps_belong_to_no_turn():
    found = follow(steady({"int8": 10.0, "bf16": 14.0, "dense": 20.0}), 80, RUNNERS, checks=Checks(verify=3))
    verified = VerifiedSteps(3)
    assert all((use is Use.VERIFY) == (step in verified) for step, use in enumerate(found.uses))
    assert set(found.plans[60:]) == {"int8"}


def slow_from(step: int, factor: float, base: Mapping[str, float]) -> Times:
    return lambda plan, now, _: base[plan] * (factor if now >= step else 1.0)


def test_drift_measures_links_again_and_follows_the_plan_that_is_chosen_then():
    times = {"dense": 10.0, "int8": 12.0}
    found = follow(slow_from(WINDOW + 10, 2.0, times), 4 * WINDOW, chosen="int8", checks=PLANNED_AGAIN)
    assert found.switches == ["planning again"]
    assert found.measures == 1
    assert found.plans[2 * WINDOW - 1 : 2 * WINDOW + 1] == ["dense", "int8"]
    assert found.notes[0].startswith(f"step {2 * WINDOW}: steps take 20 ms, and took 10")
    assert "another plan is followed" in found.notes[1]


def test_a_drift_that_changes_no_plan_is_waited_for_twice_as_long():
    found = follow(
        slow_from(WINDOW + 10, 2.0, {"dense": 10.0}),
        6 * WINDOW,
        chosen="dense",
        checks=PLANNED_AGAIN,
    )
    assert found.plans == ["dense"] * 6 * WINDOW
    assert len(found.switches) == 1, "the median is settled again after it"
    assert found.patience == 2


def test_a_rank_that_becomes_slow_is_drift_for_all():
    def times(plan: str, step: int, rank: int) -> float:
        del plan
        return 30.0 if rank == 1 and step >= WINDOW else 10.0

    found = follow(times, 3 * WINDOW, checks=PLANNED_AGAIN)
    assert found.notes[0].startswith(f"step {2 * WINDOW}: steps take 30 ms, and took 10")


def faster_from(step: int, us: float) -> Callable[[int], float]:
    return lambda steps: us if steps >= step else 50e3


def test_faster_links_are_noticed_though_a_compressed_step_takes_as_long():
    times = steady({"int8": 100.0, "bf16": 140.0, "dense": 200.0})
    links = faster_from(2 * WINDOW, 20e3)
    found = follow(times, 4 * WINDOW, RUNNERS, chosen="dense", checks=PLANNED_AGAIN, links_us=links)
    raced, drift, planned = found.notes
    assert raced.startswith("raced")
    assert "all_reduces of 19.2 KiB take 6.001 ms, and took 15 when their plan was settled" in drift
    assert found.sums[0] == SMALL_BYTES
    assert len(set(found.sums[1:])) == 1, "windows are compared by all_reduces of one size"
    assert planned.startswith("planned again")
    assert (found.switches, found.plans[-1], found.measures) == (["planning again"], "dense", 1)


@pytest.mark.parametrize("us", [26e3, 500e3], ids=["a little faster", "slower"])
def test_other_changes_of_links_show_in_step_times_or_do_not_matter(us: float):
    times = steady({"int8": 100.0, "bf16": 140.0, "dense": 200.0})
    found = follow(times, 4 * WINDOW, RUNNERS, checks=PLANNED_AGAIN, links_us=faster_from(2 * WINDOW, us))
    assert (found.plans[-1], len(found.notes)) == ("int8", 1)
    assert len(found.sums) == 1 + 3, "one for the size, one for each window of the plan that stays"


def test_a_difference_of_less_than_a_millisecond_is_noise():
    times = steady({"int8": 6.0, "bf16": 8.0, "dense": 12.0})
    found = follow(times, 4 * WINDOW, RUNNERS, checks=PLANNED_AGAIN, links_us=faster_from(2 * WINDOW, 1.0))
    assert (found.plans[-1], len(found.notes)) == ("int8", 1)
    assert len(found.sums) == 2, "a shorter time than the first one's 0.9 ms would be no drift"


def test_a_dense_plan_times_no_links():
    found = follow(steady({"dense": 10.0}), 4 * WINDOW, checks=PLANNED_AGAIN, links_us=faster_from(2 * WINDOW, 1.0))
    assert (found.sums, found.notes) == ([], [])


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_change_while_plans_race_is_noticed_after_the_first_window(factor: float):
    base = {"int8": 10.0, "bf16": 14.0, "dense": 20.0}
    turns = [step for step, use in enumerate(follow(steady(base), 80, RUNNERS).uses) if use is Use.TURN]
    times = slow_from(turns[-1] + 1, factor, base)
    found = follow(times, turns[-1] + 2 * WINDOW, RUNNERS, checks=PLANNED_AGAIN)
    drift = [] if factor == 1.0 else [f"step {turns[-1] + 1 + WINDOW}: steps take {10 * factor:g} ms, and took 10"]
    noticed = [note.partition(" when")[0] for note in found.notes if " when" in note]
    assert noticed == drift
    assert found.switches == ["planning again"] * len(drift)


def test_faster_links_let_the_plans_race_again_where_none_is_made():
    def times(plan: str, step: int, rank: int) -> float:
        del rank
        return {"int8": 100.0, "bf16": 140.0, "dense": 200.0 if step < 250 else 90.0}[plan]

    found = follow(times, 5 * WINDOW, RUNNERS, links_us=faster_from(250, 5e3))
    assert (found.plans[250], found.plans[-1]) == ("int8", "dense")
    assert [note.split()[0] for note in found.notes].count("raced") == 2


def test_drift_lets_the_plans_race_again_where_none_is_made():
    def times(plan: str, step: int, rank: int) -> float:
        del rank
        slow = step >= 250 and plan == "int8"
        return {"int8": 10.0, "bf16": 14.0, "dense": 20.0}[plan] * (3.0 if slow else 1.0)

    found = follow(times, 5 * WINDOW, RUNNERS)
    assert found.plans[200] == "int8"
    assert found.plans[-1] == "bf16"
    assert [note.split()[0] for note in found.notes].count("raced") == 2


def test_a_race_under_way_refuses_to_plan_again_and_one_to_come_does_not():
    def ask(schedule: StepSchedule, step: int) -> None:
        if step == 0:
            schedule.check_replan(step)
        if step == 4:
            with pytest.raises(CannotReplan, match="plans are racing, and this is step 4"):
                schedule.check_replan(step)

    follow(steady({"int8": 10.0, "bf16": 14.0, "dense": 20.0}), 10, RUNNERS, before=ask)


def test_a_job_that_goes_back_begins_its_race_again():
    def back(schedule: StepSchedule, step: int) -> None:
        if step == 6:
            schedule.resume(step)

    found = follow(steady({"int8": 10.0, "bf16": 14.0, "dense": 20.0}), 90, RUNNERS, before=back)
    assert set(found.plans[70:]) == {"int8"}
    assert "in steps 8 to" in found.notes[0]


def test_a_race_waits_for_the_warm_up_and_none_is_held_where_it_is_off():
    def warm(schedule: StepSchedule, step: int) -> None:
        if step == 0:
            schedule.calendar.warm_from = (0, 6)
            schedule.wait(step)

    times = steady({"int8": 10.0, "bf16": 14.0, "dense": 20.0})
    found = follow(times, 80, RUNNERS, before=warm)
    assert found.uses.index(Use.TURN) == 6 + WARM_STEPS
    off = follow(times, 80, RUNNERS, checks=Checks(verify="never", race="off"))
    assert (set(off.plans), off.notes) == ({"int8"}, [])


def test_where_a_rank_never_times_a_step_the_plan_in_force_stays():
    found = follow(lambda _, __, rank: 10.0 if rank == 0 else None, 130, RUNNERS)
    assert found.plans[-1] == "int8"
    assert "no step was timed by all ranks" in found.notes[0]
