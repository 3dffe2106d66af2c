"""Contention from one measured step: found where the step tells it, left alone where it does not."""

import math
import random
from typing import Any

import pytest

from fxcomp.cluster.processors import Processors
from fxcomp.compressors import kernels
from fxcomp.cost import contention
from fxcomp.cost.contention import LOADS, NOISE, SPEEDS, USUAL_LOAD, USUAL_SPEED, Contention, fit_contention
from fxcomp.cost.timeline import Task, Timeline, simulate
from fxcomp.plan.streams import Stream

ONE = Processors(1.0, 1.0)


def step(wire_us: float, buckets: int = 6) -> list[Task]:
    tasks: list[Task] = []
    for k in range(buckets):
        tasks.append(Task(f"region {k}", Stream.COMPUTE, 20_000.0))
        tasks.append(Task(f"send {k}", Stream.INTER, wire_us, (f"region {k}",), load=0.2, overlap_speed=0.8))
    return [*tasks, *(Task(f"update {k}", Stream.COMPUTE, 1000.0, (f"send {k}",)) for k in range(buckets))]


@pytest.mark.parametrize("true", [Contention(2.0, 0.5), Contention(1.0, 2 ** (-1 / 2)), Contention(0.5, 1.0)])
def test_a_step_that_depends_on_contention_tells_it(true: Contention):
    tasks = step(19_000.0)
    seen = simulate(true.on(tasks), ONE)
    found = fit_contention(tasks, ONE, seen.step_time_us, seen.slowed_us(Stream.COMPUTE))
    again = simulate(found.on(tasks), ONE)
    assert again.step_time_us == pytest.approx(seen.step_time_us, rel=0.03)
    slowed_us = seen.slowed_us(Stream.COMPUTE)
    assert again.slowed_us(Stream.COMPUTE) == pytest.approx(slowed_us, abs=0.03 * seen.step_time_us)
    assert found.speed == pytest.approx(true.speed, rel=0.3)


def test_what_was_predicted_right_is_left_alone():
    seen = simulate(step(19_000.0), ONE)
    assert fit_contention(step(19_000.0), ONE, seen.step_time_us, seen.slowed_us(Stream.COMPUTE)) == Contention()


def test_a_link_that_is_slower_than_measured_is_not_taken_for_contention():
    """Where the wire decides, contention changes little and explains little."""
    tasks = step(400_000.0)
    seen = simulate(tasks, ONE)
    found = fit_contention(tasks, ONE, 1.03 * seen.step_time_us, seen.slowed_us(Stream.COMPUTE))
    assert 0.7 < found.speed < 1.4


def whole_grid(tasks: list[Task], processors: Processors, step_us: float, slowed_us: float) -> Contention:
    """The specification: every point of the grid is simulated."""

    def misfit(one: Contention) -> float:
        timeline = simulate(one.on(tasks), processors)
        step = math.log(timeline.step_time_us / step_us) / NOISE
        slowed = (timeline.slowed_us(Stream.COMPUTE) - slowed_us) / step_us / NOISE
        far = (math.log(one.load) / USUAL_LOAD) ** 2 + (math.log(one.speed) / USUAL_SPEED) ** 2
        return step**2 + slowed**2 + far

    return min((Contention(load, speed) for load in LOADS for speed in SPEEDS), key=misfit)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("built", [True, False], ids=["kernel", "no kernel"])
def test_what_is_left_out_would_not_have_been_chosen(seed: int, built: bool, monkeypatch: pytest.MonkeyPatch):
    if not built:
        monkeypatch.setattr(kernels, "available", lambda: False)
    draw = random.Random(seed)
    tasks, processors = (
        step(10 ** draw.uniform(3, 5.5), draw.randint(1, 4)),
        Processors(draw.choice([0.5, 1.0, 1.5]), 1.0),
    )
    seen = simulate(tasks, processors)
    step_us, slowed_us = seen.step_time_us * draw.uniform(0.5, 3.0), seen.step_time_us * draw.choice([0.0, 0.1, 0.9])
    found = fit_contention(tasks, processors, step_us, slowed_us)
    assert found == whole_grid(tasks, processors, step_us, slowed_us)


def test_a_step_that_was_predicted_right_needs_few_simulations(monkeypatch: pytest.MonkeyPatch):
    count: list[int] = []
    tasks = step(19_000.0)
    seen = simulate(tasks, ONE)

    def counted(*arguments: Any) -> Timeline:
        count.append(1)
        return simulate(*arguments)

    monkeypatch.setattr(contention, "simulate", counted)
    fit_contention(tasks, ONE, seen.step_time_us, seen.slowed_us(Stream.COMPUTE))
    assert len(count) == 1


def test_processors_to_spare_have_no_contention():
    assert fit_contention(step(19_000.0), Processors(2.0, 1.0), 1e6, 1e5) == Contention()


def test_what_is_tried_includes_no_change():
    assert 1.0 in LOADS
    assert 1.0 in SPEEDS


def test_contention_changes_what_is_sent_and_nothing_else():
    tasks = [
        Task("work", Stream.COMPUTE, 1.0, load=0.5, overlap_speed=0.5),
        Task("send", Stream.INTER, 1.0, load=0.5, overlap_speed=0.5),
    ]
    work, send = Contention(2.0, 0.5).on(tasks)
    assert work == tasks[0]
    assert (send.load, send.overlap_speed) == (1.0, 0.25)
