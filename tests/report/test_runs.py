"""Logs of runs are read with their gaps, and refused with the line and the field that are wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fxcomp.errors import BadLog
from fxcomp.report.runs import read_run

METRICS = ("loss", "residual_norm")


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / (step + 1), "seconds": 0.5 * step, "plan": "aaaa", **more}


def written(folder: Path, *lines: Any, end: str = "\n") -> Path:
    path = folder / "run.jsonl"
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("\n".join(texts) + end)
    return path


def test_a_run_is_read(tmp_path: Path):
    path = written(tmp_path, line(1), line(2, residual_norm=0.5), line(3, plan="bbbb"))
    run = read_run(path, "one", METRICS)
    assert (run.name, run.steps, run.seconds) == ("one", [1, 2, 3], [0.5, 1.0, 1.5])
    assert (run.series["loss"].places, run.series["loss"].values) == ([0, 1, 2], [1 / 2, 1 / 3, 1 / 4])
    assert (run.series["residual_norm"].places, run.series["residual_norm"].values) == ([1], [0.5])
    assert run.plans == [(1, "aaaa"), (3, "bbbb")]
    assert run.notes == []


def test_what_is_not_finite_stays_so(tmp_path: Path):
    texts = ['{"step": 1, "loss": NaN}', '{"step": 2, "loss": null}', '{"step": 3, "loss": -Infinity}', "", "  "]
    run = read_run(written(tmp_path, *texts), "one", METRICS)
    first, second, third = run.series["loss"].values
    assert math.isnan(first)
    assert math.isnan(second)
    assert third == -math.inf
    assert run.seconds is None
    assert "no line has 'seconds'" in run.notes[0]


def test_a_run_that_went_on_has_one_clock(tmp_path: Path):
    lines = [*(line(step) for step in range(1, 13)), *(line(step, seconds=0.1 * step) for step in range(10, 20))]
    run = read_run(written(tmp_path, *lines), "one", METRICS)
    assert run.seconds is not None
    assert (run.seconds[11], run.seconds[12], run.seconds[-1]) == (6.0, 7.0, pytest.approx(7.9))
    assert "step 12 is followed by step 10" in run.notes[0]
    assert "begins again 1 time;" in run.notes[1]


def test_a_line_that_was_cut_off_at_the_end_is_left_out(tmp_path: Path):
    run = read_run(written(tmp_path, line(1), '{"step": 2, "lo', end=""), "one", METRICS)
    assert run.steps == [1]
    assert run.notes[0].endswith("run.jsonl:2: the last line is cut off, and left out")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (['{"step": 1, "loss": 2}', '{"step": 2, "lo', '{"step": 3, "loss": 2}'], r"run.jsonl:2: this is no JSON: "),
        (["[1, 2]"], r"run.jsonl:1: a line must be an object, not list"),
        (["7"], r"run.jsonl:1: a line must be an object, not int"),
        (['{"loss": 1}'], r"run.jsonl:1: 'step' must be a whole number, from 0; it is None"),
        (['{"step": 1.5, "loss": 1}'], r"'step' must be a whole number, from 0; it is 1.5"),
        (['{"step": -1, "loss": 1}'], r"'step' must be a whole number, from 0; it is -1"),
        (['{"step": NaN, "loss": 1}'], r"'step' must be a whole number, from 0; it is nan"),
        (['{"step": true, "loss": 1}'], r"'step' must be a number; it is 'True'"),
        (['{"step": 1, "loss": "2.5"}'], r"run.jsonl:1: 'loss' must be a number; it is '2.5'"),
        (['{"step": 1, "loss": [2]}'], r"'loss' must be a number"),
        ([f'{{"step": 1, "loss": 1{"0" * 400}}}'], r"'loss' is larger than a number of 64 bits"),
        (['{"step": 1, "loss": 1, "seconds": -1}'], r"'seconds' must be the time since the run began; it is -1.0"),
        (['{"step": 1, "loss": 1, "seconds": Infinity}'], r"'seconds' must be the time since the run began; it is inf"),
        (['{"step": 1, "loss": 1, "seconds": 1}', '{"step": 2, "loss": 1}'], r"'seconds' is in 1 line of 2"),
        (['{"step": 1, "accuracy": 1}'], r"run.jsonl: no line has 'loss' or 'residual_norm'"),
        ([""], r"run.jsonl has no line to draw"),
        (["[" * 100_000], r"run.jsonl:1: this is no JSON"),
    ],
)
def test_a_bad_line_is_named(texts: list[str], said: str, tmp_path: Path):
    with pytest.raises(BadLog, match=said):
        read_run(written(tmp_path, *texts), "one", METRICS)


def test_the_time_of_a_step_is_not_the_time_since_the_run_began(tmp_path: Path):
    lines = [line(step, seconds=0.1 + 0.01 * (step % 2)) for step in range(100)]
    with pytest.raises(BadLog, match="'seconds' falls back 49 times in 100 lines: it must be the time since"):
        read_run(written(tmp_path, *lines), "one", METRICS)


def test_a_file_that_is_none(tmp_path: Path):
    with pytest.raises(BadLog, match=r"cannot read .*none\.jsonl: No such file"):
        read_run(tmp_path / "none.jsonl", "one", METRICS)
    with pytest.raises(BadLog, match=r"cannot read .*: Is a directory"):
        read_run(tmp_path, "one", METRICS)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadLog, match="bytes: it is no text"):
        read_run(tmp_path / "bytes", "one", METRICS)
