"""Contention and links from a measured step: what each number explains, and no more."""

import math
from dataclasses import replace

import pytest

from fxcomp.cluster.cluster import Processors
from fxcomp.cost.contention import NOISE, FittedContention, SeenStep, alone_on_wires, fit_contention
from fxcomp.cost.timeline import Task, simulate, step_time_us
from fxcomp.plan.kinds import Stream

ONE = Processors(1.0, 1.0)


def step(wire_us: float, buckets: int = 6, load: float = 0.2) -> tuple[Task, ...]:
    tasks: list[Task] = []
    for k in range(buckets):
        tasks.append(Task(f"region {k}", Stream.COMPUTE, 20_000.0))
        tasks.append(Task(f"send {k}", Stream.INTER, wire_us, (f"region {k}",), load=load))
    return (*tasks, *(Task(f"update {k}", Stream.COMPUTE, 1000.0, (f"send {k}",)) for k in range(buckets)))


def seen(tasks: tuple[Task, ...], *, processors: Processors = ONE, **true: float) -> SeenStep:
    """Return the step as it runs with true contention."""
    ran = FittedContention(**true).under(tasks)
    timeline = simulate(ran, processors)
    wire_us = step_time_us(alone_on_wires(ran))
    return SeenStep(tasks, timeline.step_time_us, timeline.slowed_us(Stream.COMPUTE), wire_us)


@pytest.mark.parametrize("true", [0.7, 1.0, 2.0, 3.0])
def test_contention_that_slows_compute_is_found(true: float):
    found = fit_contention(seen(step(19_000.0), factor=true), ONE)
    assert found.factor == pytest.approx(true, rel=0.15)
    assert found.error < 0.03


@pytest.mark.parametrize("true", [0.8, 1.0, 1.15, 1.3])
def test_links_are_fitted_to_collectives_without_compute(true: float):
    found = fit_contention(seen(step(60_000.0), link_factor=true), ONE)
    assert found.link_factor == pytest.approx(true, rel=0.03)
    assert found.factor == pytest.approx(1.0, rel=0.1)
    assert found.error < 0.01


@pytest.mark.parametrize("true", [1.0, 0.8, 0.6])
def test_collectives_that_are_slow_during_compute_lengthen_the_step(true: float):
    found = fit_contention(seen(step(24_000.0), overlap_speed=true), ONE)
    assert found.overlap_speed == pytest.approx(true, rel=0.1)
    assert found.link_factor == pytest.approx(1.0, rel=0.05)
    assert found.error < 0.02


def test_all_three_are_found_together():
    true = {"factor": 2.0, "link_factor": 1.1, "overlap_speed": 0.8}
    found = fit_contention(seen(step(19_000.0), **true), ONE)
    assert found.link_factor == pytest.approx(1.1, rel=0.05)
    assert found.error < NOISE
    again = seen(step(19_000.0), factor=found.factor, link_factor=found.link_factor, overlap_speed=found.overlap_speed)
    assert again.slowed_us == pytest.approx(seen(step(19_000.0), **true).slowed_us, rel=0.1)


def test_a_number_that_the_step_hardly_depends_on_stays_near_one():
    """Nearly all of this step is spent on the wire: the slowdown of compute is within its noise."""
    found = fit_contention(seen(step(400_000.0, load=0.01), factor=4.0), ONE)
    assert found.factor == pytest.approx(1.0, rel=0.5)
    assert found.error < 0.02


def test_given_links_are_not_fitted_and_their_error_is_reported():
    slower = replace(seen(step(400_000.0), link_factor=1.15), wire_us=None)
    found = fit_contention(slower, ONE)
    assert found.link_factor == 1.0
    assert found.error == pytest.approx(1 - 1 / 1.15, abs=0.03)


def test_with_processors_to_spare_only_links_are_fitted():
    two = Processors(2.0, 1.0)
    found = fit_contention(seen(step(60_000.0), processors=two, link_factor=1.2), two)
    assert (found.factor, found.overlap_speed) == (1.0, 1.0)
    assert found.link_factor == pytest.approx(1.2, rel=0.03)


def test_contention_changes_the_network_and_nothing_else():
    tasks = [
        Task("work", Stream.COMPUTE, 1.0, load=0.5, overlap_speed=0.5),
        Task("send", Stream.INTER, 1.0, load=0.5),
    ]
    work, send = FittedContention(2.0, 1.25, 0.5).under(tasks)
    assert work == tasks[0]
    assert (send.duration_us, send.overlap_speed) == (1.25, 0.5)
    assert math.isclose(send.load, 0.5 * 2.0 / 1.25), "a slower link does not cost more processor time"
