"""Logs of runs are read with their gaps, and refused with the line and the field that are wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fxcomp.errors import BadOption
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
    assert run.series == {"loss": {0: 1 / 2, 1: 1 / 3, 2: 1 / 4}, "residual_norm": {1: 0.5}}
    assert run.plans == [(1, "aaaa"), (3, "bbbb")]
    assert run.notes == []


def test_what_is_not_finite_stays_so(tmp_path: Path):
    texts = ['{"step": 1, "loss": NaN}', '{"step": 2, "loss": null}', '{"step": 3, "loss": -Infinity}', "", "  "]
    run = read_run(written(tmp_path, *texts), "one", METRICS)
    first, second, third = run.series["loss"].values()
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
    assert "run.jsonl:13: step 12 is followed by step 10: the run went on from an earlier step" in run.notes[0]
    assert "begins again 1 time;" in run.notes[1]


def test_a_short_run_that_went_on_is_drawn(tmp_path: Path):
    run = read_run(written(tmp_path, line(1), line(2), line(3, seconds=0.1), line(4, seconds=0.2)), "one", METRICS)
    assert run.seconds == [0.5, 1.0, pytest.approx(1.1), pytest.approx(1.2)]


@pytest.mark.parametrize(
    "broken",
    [
        b'{"step": 3, "lo' + json.dumps(line(4)).encode() + b"\n",  # the next start's line is glued to it
        json.dumps(line(3)).encode() + json.dumps(line(4)).encode() + b"\n",
        b"\0" * 200 + b"\n",
        b"\0" * 200 + json.dumps(line(4)).encode() + b"\n",
        '{"step": 3, "note": "ü'.encode()[:-1] + b"\n",
        b"[3]\n",
    ],
)
def test_a_run_that_was_killed_is_read_without_its_broken_line(broken: bytes, tmp_path: Path):
    path = written(tmp_path, line(1), line(2))
    whole = path.read_bytes()
    path.write_bytes(whole + broken + json.dumps(line(5)).encode() + b"\n")
    run = read_run(path, "one", METRICS)
    assert run.steps == [1, 2, 5]
    assert "run.jsonl:3: " in run.notes[0]
    assert "1 broken line left out" in run.notes[0]
    path.write_bytes(whole + broken.rstrip(b"\n"))
    assert read_run(path, "one", METRICS).steps == [1, 2]
    path.write_bytes(whole + 3 * broken)
    with pytest.raises(BadOption, match=r"run.jsonl:3: .* \(and 2 more of 5 lines\)"):
        read_run(path, "one", METRICS)


def test_a_mark_of_byte_order_is_no_part_of_a_line(tmp_path: Path):
    path = written(tmp_path, line(1), line(2))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    run = read_run(path, "one", METRICS)
    assert (run.steps, run.notes) == ([1, 2], [])


RANKS = "do several ranks write this file"


def test_several_ranks_that_write_one_file_are_told(tmp_path: Path):
    lines = [line(step, seconds=step + 0.01 * rank) for step in range(1, 50) for rank in (0, 1)]
    run = read_run(written(tmp_path, *lines), "one", METRICS)
    assert f"run.jsonl:2: step 1 comes twice (49 such lines): {RANKS}" in run.notes[0]


def test_several_ranks_whose_clocks_or_steps_interleave_are_refused(tmp_path: Path):
    clocks = [line(step, seconds=step - 0.01 * rank) for step in range(1, 50) for rank in (0, 1)]
    with pytest.raises(BadOption, match=f"'seconds' falls back 49 times in 98 lines: {RANKS}"):
        read_run(written(tmp_path, *clocks), "one", METRICS)
    steps = [line(step - 2 * rank, seconds=step) for step in range(3, 50) for rank in (0, 1)]
    with pytest.raises(BadOption, match=f"steps fall back 47 times in 94 lines: {RANKS}"):
        read_run(written(tmp_path, *steps), "one", METRICS)


def test_other_numbers_of_a_step_may_have_a_line_of_their_own(tmp_path: Path):
    lines = [
        each for step in range(9) for each in (line(step), {"step": step, "residual_norm": 1.0, "seconds": 0.5 * step})
    ]
    assert read_run(written(tmp_path, *lines), "one", METRICS).notes == []


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ['{"step": 1, "loss": 2}', *['{"step": 2, "lo'] * 3],
            r"run.jsonl:2: this is no JSON: .*and 2 more of 4 lines",
        ),
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
    with pytest.raises(BadOption, match=said):
        read_run(written(tmp_path, *texts), "one", METRICS)


def test_the_time_of_a_step_is_not_the_time_since_the_run_began(tmp_path: Path):
    lines = [line(step, seconds=0.1 + 0.01 * (step % 2)) for step in range(100)]
    with pytest.raises(BadOption, match="'seconds' falls back 49 times in 100 lines: it must be the time since"):
        read_run(written(tmp_path, *lines), "one", METRICS)


def test_a_file_that_is_none(tmp_path: Path):
    with pytest.raises(BadOption, match=r"cannot read .*none\.jsonl: No such file"):
        read_run(tmp_path / "none.jsonl", "one", METRICS)
    with pytest.raises(BadOption, match=r"cannot read .*: Is a directory"):
        read_run(tmp_path, "one", METRICS)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadOption, match="bytes:1: this is no text: invalid start byte"):
        read_run(tmp_path / "bytes", "one", METRICS)
