"""Steps whose times vary: distributions, and plans compared under the same luck."""

import math
import statistics

import pytest

from fxcomp.cost.robust import Jitter, draw_steps, jitter_of
from fxcomp.cost.roofline import Measured
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, step_time_us
from fxcomp.plan.kinds import Stream

STEADY = Jitter(0.0, 0.0, 0.0)


def step(wire_us: float, compute_us: float = 100.0) -> list[Task]:
    return [
        Task("backward", Stream.COMPUTE, compute_us),
        Task("send", Stream.INTER, wire_us, ("backward",)),
        Task("update", Stream.COMPUTE, 10.0, ("send",)),
    ]


def test_a_machine_that_never_varies_always_takes_the_predicted_time():
    assert set(draw_steps(step(50.0), STEADY).draws) == {step_time_us(step(50.0))}


def test_times_spread_around_the_prediction():
    found = draw_steps(step(50.0), Jitter())
    assert found.at(0.1) < found.median_us < found.at(0.9)
    assert found.median_us == pytest.approx(160.0, rel=0.03)


def test_more_ranks_make_the_slowest_one_slower():
    medians = [draw_steps(step(50.0), Jitter(compute=0.1, ranks=ranks)).median_us for ranks in (1, 4, 64)]
    assert medians == sorted(medians)
    # The slowest of 64 is about 2.4 standard deviations out (Blom's approximation).
    assert medians[-1] == pytest.approx(110 * 2.718 ** (0.1 * 2.4) + 50, rel=0.05)


def test_plans_are_compared_under_the_same_luck():
    jitter = Jitter(compute=0.3, links=0.3, tasks=0.0)
    small, large = draw_steps(step(50.0), jitter), draw_steps(step(51.0), jitter)
    assert small.share_faster_than(large) == 1.0
    assert large.share_faster_than(small) == 0.0
    # A plan that computes more and sends less wins only while the link is slow.
    other = draw_steps(step(20.0, 130.0), jitter)
    assert 0.1 < other.share_faster_than(small) < 0.9


def test_a_plan_that_depends_on_the_link_is_less_sure():
    jitter = Jitter(compute=0.0, links=0.3, tasks=0.0)
    on_wire, on_device = draw_steps(step(200.0, 10.0), jitter), draw_steps(step(10.0, 200.0), jitter)
    assert on_wire.at(0.9) / on_wire.at(0.1) > 1.3 > on_device.at(0.9) / on_device.at(0.1)


def test_a_measured_spread_is_a_range_of_several_deviations():
    costs = CostTable(compute={"a": Measured(1.0, 0.25), "b": Measured(1.0, 0.25), "c": Measured(1.0)})
    assert jitter_of(costs, 3).compute == pytest.approx(math.log(1.25) / 2.5)


def test_a_machine_that_stood_still_once_is_not_predicted_to_stand_still_for_ever():
    """A pause of sixty steps within a short step is a factor of sixty, not e to the power of 24."""
    jitter = jitter_of(CostTable(compute={"a": Measured(1.0, 60.0)}), 1)
    drawn = draw_steps(step(10.0), jitter)
    assert drawn.at(0.9) / drawn.at(0.1) < 61


def test_every_task_varies_by_itself():
    """The mean of many varies less than one does."""
    jitter = Jitter(compute=0.0, links=0.0, tasks=0.2)
    many = draw_steps([Task(str(k), Stream.COMPUTE, 1.0) for k in range(100)], jitter)
    one = draw_steps([Task("one", Stream.COMPUTE, 100.0)], jitter)
    spreads = [statistics.pstdev(map(math.log, found.draws)) for found in (many, one)]
    assert spreads[0] == pytest.approx(0.02, rel=0.4)
    assert spreads[1] == pytest.approx(0.2, rel=0.4)
