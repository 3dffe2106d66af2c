"""Losses by step and times of steps are joined into loss against seconds."""

from typing import Any

import pytest
from time_to_loss_page import (
    BASE,
    CONTENDERS,
    FLOOR,
    Contender,
    Run,
    joined,
    page,
    recovered,
    seconds_at,
    summaries,
    time_to,
)

CURVE = [(10.0, 4.0), (20.0, 2.0), (30.0, 3.0), (40.0, 1.0)]
TIMES = {
    "ddp_fp32": 100.0,
    "free": 20.0,
    "ddp_bf16": 60.0,
    "dense": 90.0,
    "int4": 40.0,
    "momentum_sign": 26.0,
    "momentum_cmax8": 24.0,
}


def times_of(**ms: float) -> list[dict[str, Any]]:
    return [
        {"model": "small", "inter": "1gbit", "name": name, "measured_ms": {"median": value}}
        for name, value in ms.items()
    ]


def losses_of(name: str, final: float, inter: str | None = None) -> dict[str, Any]:
    return {"name": name, "inter": inter, "steps": 1000, "curve": [[500, final + 1], [1000, final]]}


def runs() -> dict[str, Run]:
    losses = [losses_of("ddp_fp32", 2.0), losses_of("momentum_cmax8", 2.005), losses_of("diloco", 3.0)]
    return {run.label: run for run in joined(times_of(**TIMES), losses)}


@pytest.mark.parametrize(("step", "seconds"), [(0, 0), (50, 5), (100, 10), (110, 10.2), (1000, 28), (2000, 48)])
def test_time_runs_through_the_warm_up_and_then_at_the_pace_of_the_last_phase(step: int, seconds: float):
    assert seconds_at(step, [100, 900], [100, 20]) == pytest.approx(seconds)


@pytest.mark.parametrize(("aim", "seconds"), [(5.0, 10.0), (4.0, 10.0), (3.0, 15.0), (2.0, 20.0), (1.5, 37.5)])
def test_a_loss_is_reached_where_the_curve_first_crosses_it(aim: float, seconds: float):
    assert time_to(CURVE, aim) == pytest.approx(seconds)


def test_a_loss_below_the_whole_curve_is_never_reached():
    assert time_to(CURVE, 0.9) is None
    assert time_to([], 0.9) is None


def test_what_the_network_costs_is_recovered_in_part():
    assert recovered(30, 100, 20) == pytest.approx(70 / 80)
    assert recovered(120, 100, 20) == pytest.approx(-20 / 80)
    assert recovered(None, 100, 20) is None
    assert recovered(10, 20, 20) is None


def test_a_job_takes_its_warm_up_at_one_pace_and_the_rest_at_another():
    run = runs()["fxcomp momenta, cmax(8)"]
    assert run.step_ms == pytest.approx((40.0, 24.0))
    assert run.job_s == pytest.approx(200 * 0.040 + 800 * 0.024)
    assert [seconds for seconds, _ in run.curve] == pytest.approx([200 * 0.040 + 300 * 0.024, run.job_s])
    assert [loss for _, loss in run.curve] == pytest.approx([3.005, 2.005])


def test_diloco_pays_for_the_network_once_in_25_steps():
    assert runs()["DiLoCo, H 25"].step_ms == pytest.approx((20 + 80 / 25,))


def test_contestants_without_losses_or_times_are_left_out():
    assert list(runs()) == [BASE, FLOOR, "DiLoCo, H 25", "fxcomp momenta, cmax(8)"]


def test_what_was_learned_over_a_link_counts_there_alone():
    losses = [losses_of("ddp_fp32", 2.0), losses_of("fxcomp", 2.1, "1gbit"), losses_of("fxcomp", 1.0, "100mbit")]
    found = {run.label: run for run in joined(times_of(**TIMES, fxcomp=50.0), losses)}
    assert found["fxcomp balanced"].loss == 2.1


def test_the_summary_measures_at_the_loss_and_over_the_job():
    found = {each["label"]: each for each in summaries(list(runs().values()))}
    mine, base, floor = found["fxcomp momenta, cmax(8)"], found[BASE], found[FLOOR]
    assert base["aim"] == pytest.approx(2.01)
    assert base["aim_s"] == pytest.approx(50 + 0.99 * 50)
    assert mine["recovered"] == pytest.approx((100 - mine["job_s"]) / 80)
    assert mine["recovered_at_aim"] == pytest.approx((base["aim_s"] - mine["aim_s"]) / (base["aim_s"] - floor["aim_s"]))
    assert mine["compute"] == pytest.approx(20 / mine["job_s"])
    assert found["DiLoCo, H 25"]["aim_s"] is None


def test_the_first_to_reach_the_loss_stands_first_and_who_never_does_last():
    lines = page(list(runs().values())).splitlines()
    labels = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:]
    assert labels == [FLOOR, "fxcomp momenta, cmax(8)", BASE, "DiLoCo, H 25"]
    assert "| never |" in lines[-1]


def test_every_contestant_has_a_label_of_its_own_and_phases_that_fill_the_job():
    assert len({each.label for each in CONTENDERS}) == len(CONTENDERS)

    def filled(each: Contender) -> float:
        return sum(phase.share for phase in each.phases)

    assert [filled(each) for each in CONTENDERS] == pytest.approx([1.0] * len(CONTENDERS))
