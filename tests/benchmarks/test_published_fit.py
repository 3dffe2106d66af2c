"""The benchmark of published timings, on timings made here."""

import json
import sys
from pathlib import Path

import published_fit
import pytest

SIZES = [2**k for k in range(10, 22)]


def published(tmp_path: Path, decode_us: list[float]) -> Path:
    path = tmp_path / "timings.json"
    rows = [[n, 10 + n / 1000, us] for n, us in zip(SIZES, decode_us, strict=True)]
    path.write_text(json.dumps({"runs": {"run_4": {"onebit": rows}}}))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["published_fit.py", *words])
    return published_fit.main()


def test_a_series_is_judged_in_sample_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    data = published(tmp_path, [5 + n / 500 for n in SIZES])
    out, report = tmp_path / "out.json", tmp_path / "report.md"
    assert run(monkeypatch, "--data", str(data), "--json", str(out), "--report", str(report)) == 0
    found = json.loads(out.read_text())
    assert found["summary"]["all runs"]["series"] == 2
    assert found["summary"]["all runs"]["left_out"] < 0.01
    assert [series["work"] for series in found["series"]] == ["encode", "decode"] * 2
    assert [series["sizes"] for series in found["series"]] == [12, 12, 3, 3]
    assert "| run_4 | onebit | encode | 1 | 0.0 %" in report.read_text()
    assert "asked for: 10.0 % at most" in capsys.readouterr().out


def test_timings_that_are_noise_miss_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    noise = [1000.0, 2.0] * (len(SIZES) // 2)
    data = published(tmp_path, noise)
    text = json.loads(data.read_text())
    for row in text["runs"]["run_4"]["onebit"]:
        row[1] = row[2]
    data.write_text(json.dumps(text))
    assert run(monkeypatch, "--data", str(data)) == 1


def test_data_that_are_not_there_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, "--data", str(tmp_path / "nowhere.json")) == 2
    assert "say with --data where the timings lie" in capsys.readouterr().err
