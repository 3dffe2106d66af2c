"""torch's own switches show fxcomp: TORCH_LOGS its logger, TORCH_TRACE its graphs, plan, timeline and source."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy

import fxcomp
from fxcomp.codegen import traced
from fxcomp.pipeline import pass_names

ROOT = Path(__file__).parents[2]
TRAINING = """
import {first}
import {second}
import sys
sys.path.insert(0, {tests!r})
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
job = JOBS["mlp"]
model = job.build()
step = fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))
step(job.batch(0, 0))
"""


def run_with(folder: Path, first: str, second: str, **switches: str) -> str:
    """Compile a step in a process with these switches, which torch reads when it is imported; what it wrote."""
    script = folder / "train.py"
    script.write_text(TRAINING.format(first=first, second=second, tests=str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **switches}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def artifacts(folder: Path) -> dict[str, str]:
    """The payloads of fxcomp's artifacts, by name."""
    (log,) = folder.glob("*.log")
    found: dict[str, str] = {}
    name = ""
    for line in log.read_text().splitlines():
        if not line.startswith("\t"):
            record = json.loads(line[line.index("] ") + 2 :])
            name = record.get("artifact", {}).get("name", "")
        elif name.startswith("fxcomp_"):
            found[name] = f"{found.get(name, '')}{line[1:]}\n"
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("trace")
    said = run_with(folder, "torch", "fxcomp", TORCH_LOGS="fxcomp", TORCH_TRACE=str(folder / "trace"))
    return folder / "trace", said


def test_torchs_logs_show_the_phases(trace: tuple[Path, str]):
    assert re.search(r"I\d{4} .*capturing the step: ", trace[1])
    assert "a step is predicted to take" in trace[1]


@pytest.mark.slow
def test_torchs_logs_show_them_where_fxcomp_is_imported_first(tmp_path: Path):
    assert "capturing the step: " in run_with(tmp_path, "fxcomp", "torch", TORCH_LOGS="+fxcomp")
    assert run_with(tmp_path, "fxcomp", "torch") == ""


def test_a_trace_has_the_graph_after_each_pass_the_plan_the_timeline_and_the_source(trace: tuple[Path, str]):
    found = artifacts(trace[0])
    graphs = [name.partition("_graph_")[2][3:] for name in found if "_graph_" in name]
    assert graphs == pass_names()
    assert json.loads(found["fxcomp_plan"]) == {"version": 1, "buckets": []}
    timeline = json.loads(found["fxcomp_timeline"])
    assert max(task["end_ms"] for task in timeline["tasks"]) == pytest.approx(timeline["step_ms"])
    assert "def step(" in found["fxcomp_source"]
    last = next(text for name, text in found.items() if name.endswith(graphs[-1]))
    assert "output(" in last


@pytest.mark.skipif(shutil.which("tlparse") is None, reason="tlparse is not installed: pip install tlparse")
def test_tlparse_lays_a_trace_out(trace: tuple[Path, str], tmp_path: Path):
    (log,) = trace[0].glob("*.log")
    subprocess.run(["tlparse", str(log), "-o", str(tmp_path / "out"), "--no-browser"], check=True, capture_output=True)
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert any(re.fullmatch(r"fxcomp_source_\d+\.txt", name) for name in names)
    assert any(re.fullmatch(r"fxcomp_plan_\d+\.json", name) for name in names)
    assert "fxcomp_timeline" in (tmp_path / "out" / "index.html").read_text()


def test_nothing_is_written_down_where_nobody_traces(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> str:
        raise AssertionError("a graph was dumped for nobody")

    monkeypatch.setattr(traced, "dump", refuse)
    job = JOBS["mlp"]
    model = job.build()
    step = fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))
    step(job.batch(0, 0))
