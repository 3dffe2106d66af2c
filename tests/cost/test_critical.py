"""A timeline tells the critical path, what compute waits for, and where streams stand still."""

import itertools
import random

import pytest

from fxcomp.cluster.cluster import Processors
from fxcomp.cost.timeline import Task, Timeline, critical_path, exposed_by_task, simulate
from fxcomp.plan.kinds import Stream

STEP = [
    Task("backward 0", Stream.COMPUTE, 10.0),
    Task("send 0", Stream.INTER, 30.0, ("backward 0",)),
    Task("backward 1", Stream.COMPUTE, 5.0),
    Task("send 1", Stream.INTER, 20.0, ("backward 1",)),
    Task("update 0", Stream.COMPUTE, 4.0, ("send 0",)),
    Task("update 1", Stream.COMPUTE, 2.0, ("send 1",)),
]


def random_step(seed: int) -> Timeline:
    numbers = random.Random(seed)
    tasks: list[Task] = []
    for k in range(40):
        names = [task.name for task in tasks]
        after = tuple(numbers.sample(names, min(len(names), numbers.randint(0, 2))))
        stream = numbers.choice(list(Stream))
        tasks.append(Task(f"t{k}", stream, numbers.choice([0.0, numbers.uniform(1, 20)]), after, numbers.random()))
    return simulate(tasks, numbers.choice([Processors(), Processors(1.0, 1.0)]))


def test_the_critical_path_is_what_the_end_hangs_on():
    assert [span.task.name for span in critical_path(simulate(STEP))] == ["backward 0", "send 0", "send 1", "update 1"]
    assert critical_path(simulate([])) == ()


@pytest.mark.parametrize("seed", range(50))
def test_the_critical_path_has_no_gap_and_is_as_long_as_the_step(seed: int):
    timeline = random_step(seed)
    path = critical_path(timeline)
    assert path[0].start_us == 0.0
    assert path[-1].end_us == timeline.step_time_us
    for earlier, later in itertools.pairwise(path):
        assert earlier.end_us == pytest.approx(later.start_us)


def test_compute_waits_for_the_transfer_that_arrives_last():
    assert exposed_by_task(simulate(STEP)) == pytest.approx({"send 0": 25.0, "send 1": 16.0})


@pytest.mark.parametrize("seed", range(50))
def test_what_compute_waits_for_adds_up_to_the_exposed_time(seed: int):
    timeline = random_step(seed)
    assert sum(exposed_by_task(timeline).values()) == pytest.approx(timeline.exposed_us, abs=1e-9)


def test_compute_does_not_wait_for_a_host_that_takes_longer():
    alone, timeline = simulate(STEP), simulate([Task("hand out", Stream.HOST, 90.0), *STEP])
    assert timeline.step_time_us == 90.0
    assert timeline.exposed_us == alone.exposed_us
    assert exposed_by_task(timeline) == exposed_by_task(alone)
