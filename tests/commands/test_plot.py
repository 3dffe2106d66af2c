"""`fxcomp plot` writes one page of the runs that it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxcomp.__main__ import main


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    paths = [Path("a/run.jsonl"), Path("b/run.jsonl"), Path("other.jsonl")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        lines = [{"step": k, "loss": 2.0 / k, "accuracy": 0.1 * k, "seconds": 0.1 * k} for k in range(1, 9)]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return list(map(str, paths))


def test_runs_are_named_by_files_and_those_of_one_name_by_paths(logs: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["plot", *logs]) == 0
    assert "plots.html: 3 runs, 24 lines" in capsys.readouterr().out
    page = Path("plots.html").read_text()
    assert "<h1>a/run.jsonl, b/run.jsonl, other</h1>" in page
    assert "<h2>Loss</h2>" in page
    assert "Norm of residuals" not in page


def test_other_numbers_are_drawn_if_they_are_named(logs: list[str]):
    assert main(["plot", "--metrics", "accuracy,none, accuracy", logs[0], "-o", "other.html"]) == 0
    page = Path("other.html").read_text()
    assert "<h2>accuracy</h2>" in page
    assert "<h2>Loss</h2>" not in page
    assert "a/run.jsonl: no line has &#39;none&#39;" in page


def test_a_page_takes_the_place_of_a_page_alone(logs: list[str], capsys: pytest.CaptureFixture[str]):
    Path("link.jsonl").symlink_to(logs[0])
    Path("hard.jsonl").hardlink_to(logs[0])
    Path("notes.txt").write_text("read me")
    Path("empty.html").touch()
    before = Path(logs[0]).read_text()
    for output in (logs[0], f"./{logs[0]}", "link.jsonl", "hard.jsonl"):
        assert main(["plot", *logs, "-o", output]) == 2
        assert f"--output {output} would overwrite {Path(logs[0]).resolve()}, which is read" in capsys.readouterr().err
    assert main(["plot", *logs, "-o", "notes.txt"]) == 2
    assert "--output notes.txt would overwrite a file that is no page" in capsys.readouterr().err
    assert (Path(logs[0]).read_text(), Path("notes.txt").read_text()) == (before, "read me")
    for _ in range(2):
        assert main(["plot", *logs, "-o", "empty.html"]) == 0
        assert Path("empty.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["none.jsonl"], "cannot read none.jsonl: No such file"),
        (["other.jsonl", "--smooth", "0"], "--smooth is a number of points, from 1; it is 0"),
        (["other.jsonl", "-o", "."], "cannot write .: "),
        (["other.jsonl", "-o", "none/plots.html"], "cannot write none/plots.html: there is no folder "),
        (["other.jsonl", "./other.jsonl"], "other.jsonl is given twice"),
        (["other.jsonl", "--metrics", " , "], "--metrics names no number"),
        (["other.jsonl"] * 13, "a plot shows at most 12 runs; these are 13"),
    ],
)
def test_a_mistake_is_told(options: list[str], said: str, logs: list[str], capsys: pytest.CaptureFixture[str]):
    before = [Path(path).read_bytes() for path in logs]
    assert main(["plot", *options]) == 2
    assert said in capsys.readouterr().err
    assert [Path(path).read_bytes() for path in logs] == before
    assert not list(Path().rglob("*.html"))
