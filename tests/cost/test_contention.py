"""Contention from measured steps: found where they tell it, and links' errors are not taken for it."""

from dataclasses import replace

import pytest

from fxcomp.cluster.cluster import Processors
from fxcomp.cost.contention import SeenStep, fit_contention, under_contention
from fxcomp.cost.timeline import Task, simulate
from fxcomp.plan.kinds import Stream

ONE = Processors(1.0, 1.0)


def step(wire_us: float, buckets: int = 6, load: float = 0.2) -> tuple[Task, ...]:
    tasks: list[Task] = []
    for k in range(buckets):
        tasks.append(Task(f"region {k}", Stream.COMPUTE, 20_000.0))
        tasks.append(Task(f"send {k}", Stream.INTER, wire_us, (f"region {k}",), load=load, overlap_speed=0.8))
    return (*tasks, *(Task(f"update {k}", Stream.COMPUTE, 1000.0, (f"send {k}",)) for k in range(buckets)))


def seen(tasks: tuple[Task, ...], factor: float = 1.0, slower: float = 1.0) -> SeenStep:
    """A step as it would run with this contention, over links that take so many times as long for the same work."""
    links = [
        replace(task, duration_us=task.duration_us * slower, load=task.load / slower)
        if task.stream is Stream.INTER
        else task
        for task in tasks
    ]
    ran = simulate(under_contention(links, factor), ONE)
    return SeenStep(tasks, ran.step_time_us, ran.slowed_us(Stream.COMPUTE))


@pytest.mark.parametrize("true", [0.7, 1.0, 2.0, 3.0])
def test_contention_that_slows_compute_is_found(true: float):
    found = fit_contention([seen(step(19_000.0), true), seen(step(9_000.0), true)], ONE)
    assert found.factor == pytest.approx(true, rel=0.15)
    assert found.error < 0.03


def test_a_link_slower_than_its_table_is_an_error_and_no_contention():
    found = fit_contention([seen(step(400_000.0), slower=1.15), seen(step(100_000.0), slower=1.15)], ONE)
    assert found.factor == pytest.approx(1.0, rel=0.1)
    assert found.error == pytest.approx(1 - 1 / 1.15, abs=0.02)


def test_what_a_step_hardly_depends_on_stays_as_it_was():
    """Nearly all of this step is spent on the wire: what slows compute is within its noise."""
    found = fit_contention([seen(step(400_000.0, load=0.01), 4.0)], ONE)
    assert found.factor == pytest.approx(1.0, rel=0.5)
    assert found.error < 0.02


def test_each_step_is_predicted_without_what_it_told_itself():
    """The second step contradicts the first: together they tell something between, and the error says so."""
    alike, other = seen(step(19_000.0)), seen(step(19_000.0, load=0.4), 3.0)
    errors = [fit_contention([one], ONE).error for one in (alike, other)]
    assert fit_contention([alike, other], ONE).error > 2 * max(errors)


def test_a_step_alone_is_predicted_with_its_own_factor():
    lengthened = replace(seen(step(19_000.0), 2.0), step_us=1.2 * seen(step(19_000.0), 2.0).step_us)
    found = fit_contention([lengthened], ONE)
    assert found.factor == pytest.approx(2.0, rel=0.3)
    assert found.error == pytest.approx(1 - 1 / 1.2, abs=0.03)


def test_processors_to_spare_have_no_contention():
    longer = replace(seen(step(19_000.0)), step_us=1e6, slowed_us=1e5)
    assert fit_contention([longer], Processors(2.0, 1.0)).factor == 1.0


def test_contention_changes_what_is_sent_and_nothing_else():
    tasks = [
        Task("work", Stream.COMPUTE, 1.0, load=0.5, overlap_speed=0.5),
        Task("send", Stream.INTER, 1.0, load=0.5, overlap_speed=0.5),
    ]
    work, send = under_contention(tasks, 2.0)
    assert work == tasks[0]
    assert (send.load, send.overlap_speed) == (1.0, 0.5)
