"""Reports of momenta: the algorithm, memory, and time and bytes of the whole job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxcomp.__main__ import main
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import CMax, Int8
from fxcomp.frontends.job import load_job
from fxcomp.frontends.what_if import WhatIf, what_if
from fxcomp.plan.compress import Compress, Warmup
from fxcomp.report.as_json import to_json
from fxcomp.report.explanation import Explanation
from fxcomp.report.terminal import to_text
from fxcomp.report.whole_job import residual_bytes, whole_job

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "mlp.py")
WHERE = Cluster.parse("8x1", intra=Link(5.0, 12.0), inter=Link.parse("10mbit"))
TWICE = (
    "compress(cmax(16))@gpu > all_to_all@world > decompress@gpu > compress(cmax(16))@gpu > all_gather@world"
    " > decompress@gpu"
)
GIVEN = Compress(plan=TWICE, at="momentum", warmup=Warmup(int8_steps=100), steps=1000)


def explained(compress: Compress) -> Explanation:
    job = load_job(EXAMPLE)
    job = replace(job, optimizer=torch.optim.AdamW(job.model.parameters()))
    return what_if(job, WHERE, WhatIf(device="h100", compress=compress, step_ms=10.0))


@pytest.fixture(scope="module")
def given() -> Explanation:
    return explained(GIVEN)


def test_bytes_and_times_of_the_job_add_up(given: Explanation):
    job = whole_job(given)
    assert job is not None
    warm, then = job.stretches
    assert (warm.steps, then.steps, job.steps) == (100, 900, 1000)
    assert then.step_us == pytest.approx(given.step_us)
    assert job.us == pytest.approx(100 * warm.step_us + 900 * then.step_us)
    assert job.bytes == pytest.approx(100 * job.sent_bytes[0] + 900 * job.sent_bytes[1])
    assert job.dense_step_bytes == pytest.approx(2 * 7 / 8 * given.workload.dense_bytes)
    moved = {name: size for name, size in given.workload.sizes.items() if name in given.plan.moved}
    rest = given.workload.elements - sum(moved.values())
    for compressor, sent in zip((Int8(), CMax(16)), job.sent_bytes, strict=True):
        payload = sum(compressor.payload_bytes((size,)) for size in moved.values())
        assert sent == pytest.approx(2 * 7 / 8 * (payload + 4 * rest), rel=0.05)


def test_residuals_are_counted_for_both_shots(given: Explanation):
    moved = sum(size for name, size in given.workload.sizes.items() if name in given.plan.moved)
    assert residual_bytes(given) == pytest.approx(4 * moved * (1 + 1 / 8), rel=0.01)


def test_it_pays_from_where_the_jobs_are_as_long(given: Explanation):
    job = whole_job(given)
    assert job is not None
    assert job.pays_from is not None
    assert given.choice is not None
    warm, then = job.stretches

    def is_shorter(steps: int) -> bool:
        return 100 * warm.step_us + (steps - 100) * then.step_us < steps * given.choice.fastest_us

    assert is_shorter(job.pays_from)
    assert not is_shorter(job.pays_from - 1)


def test_the_report_says_it(given: Explanation):
    text = " ".join(to_text(given).split())
    assert "From step 100 on the optimizer's second moment, where it has one, stays frozen" in text
    assert "bytes of memory a value" in text
    assert "The warm-up is 10% of its steps" in text
    assert f"is longer from {whole_job(given).pays_from:,} steps on" in text
    data = to_json(given)["momenta"]
    assert data["parameters"] == list(given.plan.moved)
    assert data["residual_bytes"] == residual_bytes(given)
    assert data["job"] == whole_job(given).to_json()
    assert json.loads(json.dumps(data)) == data


def test_without_a_length_the_report_says_how_to_give_one():
    found = explained(replace(GIVEN, steps=None))
    assert whole_job(found) is None
    assert "With the length of the job" in to_text(found)
    assert to_json(found)["momenta"]["job"] is None


def test_reports_of_gradients_say_nothing_of_momenta():
    found = explained(Compress(plan="int8", steps=100))
    assert whole_job(found) is None
    assert "Momenta" not in to_text(found)
    assert "momenta" not in to_json(found)


def test_the_chosen_job_is_the_compared_one():
    found = explained(Compress(within="aggressive", steps=3000))
    job, exchanged = whole_job(found), found.choice.exchanged
    assert job.us == pytest.approx(exchanged.momenta_us)
    assert (job.gradients_us, job.pays_from) == (exchanged.gradients_us, exchanged.pays_from)
    assert found.bound_us is None, "the bound is of plans that exchange gradients"


AGGRESSIVE = ["--inter", "1mbit", "--cluster", "8x1", "--device", "h100", "--compress", "aggressive"]

UNDER_ADAM = f"""
from dataclasses import replace
import torch
from fxcomp.frontends.job import load_job

def job():
    known = load_job({EXAMPLE!r})
    return replace(known, optimizer=torch.optim.AdamW(known.model.parameters()))
"""


@pytest.fixture
def under_adam(tmp_path: Path) -> str:
    file = tmp_path / "under_adam.py"
    file.write_text(UNDER_ADAM)
    return str(file)


@pytest.mark.parametrize("at", [[], ["--at", "auto"]], ids=["", "auto"])
def test_the_command_line_leaves_the_point_to_the_compiler(under_adam: str, at: list[str], capsys: Any):
    assert main(["explain", under_adam, *AGGRESSIVE, *at, "--steps", "5000", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["momenta"]["job"]["steps"] == 5000
    assert data["momenta"]["job"]["warm_steps"] == 1000


def test_the_command_line_keeps_gradients_where_that_is_said(under_adam: str, capsys: Any):
    assert main(["explain", under_adam, *AGGRESSIVE, "--at", "gradient", "--steps", "5000", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "momenta" not in data
    assert not [note for note in data["notes"] if "aggressive" in note]


def test_the_command_line_asks_for_the_length(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", EXAMPLE, *AGGRESSIVE]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "aggressive: ranks exchange gradients, because steps= is not given, and whole jobs are compared" in said
    assert "--steps N." in said
