"""The loops that docs show for metrics over a run write what they say."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy

import fxcomp
from fxcomp.report.runs import read_run

PAGE = (Path(__file__).parents[2] / "docs" / "reports.md").read_text()
SECTION = PAGE.split("## Metrics over a run")[1].split("\n## ")[0]
JSON_LINES, TENSORBOARD = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture(scope="module")
def training() -> tuple[fxcomp.CompiledStep, list[Any]]:
    job = JOBS["mlp"]
    model = job.build()
    step = fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))
    return step, [job.batch(number, 0) for number in range(3)]


def test_a_line_of_json_a_step(
    training: tuple[fxcomp.CompiledStep, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    step, loader = training
    names: dict[str, Any] = {"rank": 1, "step": step, "loader": loader, "json": json, "time": time}
    exec(JSON_LINES, names)
    assert not Path("run.jsonl").exists()
    names["rank"] = 0
    exec(JSON_LINES, names)
    names["log"].close()
    lines = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [step.steps - 2, step.steps - 1, step.steps]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[0]["seconds"] < lines[-1]["seconds"]
    assert lines[-1]["residual_norm"] == 0.0

    with Path("run.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # the run is killed
    exec(JSON_LINES, names)
    names["log"].close()
    run = read_run("run.jsonl", "run", ["loss"])
    assert run.steps[:3] == [line["step"] for line in lines]
    assert len(run.steps) == 6
    assert any("1 broken line left out" in note for note in run.notes)


def test_scalars_for_tensorboard(
    training: tuple[fxcomp.CompiledStep, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("tensorboard")
    import torch
    import torch.utils.tensorboard
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    step, loader = training
    step(loader[0])
    names: dict[str, Any] = {"rank": 1, "step": step, "torch": torch}
    exec(TENSORBOARD, names)
    assert not Path("runs").exists()
    names["rank"] = 0
    exec(TENSORBOARD, names)
    names["writer"].close()
    read = EventAccumulator("runs/one").Reload()
    (found,) = read.Scalars("fxcomp/step_ms")
    assert found.step == step.steps
    assert found.value == pytest.approx(step.metrics()["step_ms"])
    assert "fxcomp/plan" not in read.Tags()["scalars"]
