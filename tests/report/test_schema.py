"""The report as data fits its schema, which lies beside it in the package."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from helpers.explained import CASES, by_hand
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks

import fxcomp
from fxcomp.__main__ import main
from fxcomp.report.as_json import SCHEMA, to_json

FORM: dict[str, Any] = json.loads(files("fxcomp.report").joinpath("report.schema.json").read_text())
CHECKER: Any = jsonschema.Draft202012Validator(FORM)
LINK = ("--cluster", "4x2", "--inter", "1gbit")


def read_back(data: Any) -> Any:
    return json.loads(json.dumps(data))


@pytest.mark.parametrize("case", CASES)
def test_a_report_fits_its_schema(case: str):
    data = read_back(to_json(CASES[case]()))
    assert list(CHECKER.iter_errors(data)) == []
    assert data["schema"] == SCHEMA == FORM["properties"]["schema"]["const"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [
        LINK,
        (*LINK, "--device", "h100", "--accumulate", "2", "--pin", "*.bias=dense"),
        (*LINK, "--compress", "like(topk(0.01))"),
        (*LINK, "--compress", "aggressive", "--steps", "5000"),
    ],
)
def test_what_explain_prints_fits_the_schema(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "examples/mlp.py:job", "--json", *options]) == 0
    assert list(CHECKER.iter_errors(json.loads(capsys.readouterr().out))) == []


def reports() -> list[Any]:
    """Reports before the first step, in a race, and of a profiled step under a budget."""
    found: list[Any] = []
    for compress, checks in (
        ("balanced", fxcomp.Checks()),
        (fxcomp.Compress(within=0.05, measured=True), fxcomp.Checks(verify="never", race="off")),
    ):
        job = JOBS["mlp"]
        model = job.build()
        optimizer = OPTIMIZERS["plain"](model.parameters())
        step = fxcomp.compile_step(model, cross_entropy, optimizer, job.batch(0, 0), compress=compress, checks=checks)
        found.append(step.report().to_json())
        for number in range(12):
            step(job.batch(number, 0))
        found.append(step.report().to_json())
        step.close()
    return found


@pytest.mark.slow
def test_reports_of_running_steps_fit_the_schema():
    for of_rank in run_ranks(2, reports):
        assert [flaw for data in of_rank for flaw in CHECKER.iter_errors(read_back(data))] == []


def test_the_timeline_is_in_the_data():
    explained = by_hand()
    spans = to_json(explained)["timeline"]
    assert max(span["end_ms"] for span in spans) == pytest.approx(explained.step_us / 1e3)
    first = next(span for span in spans if span["task"] == "compress 0")
    assert (first["stream"], first["bucket"]) == ("compute", 0)
    assert {span["task"] for span in spans} >= set(to_json(explained)["critical_path"])


def test_the_schema_is_one_and_refuses_what_is_no_report():
    CHECKER.check_schema(FORM)
    for change in ({"verdict": "maybe"}, {"racing": 1}, {"extra": 1}, {"schema": 2}, {"timeline": [{"task": "a"}]}):
        assert not CHECKER.is_valid(read_back({**to_json(by_hand()), **change})), change
