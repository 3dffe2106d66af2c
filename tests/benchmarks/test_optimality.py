"""The benchmark of the search against the best possible, on workloads made here."""

import json
import re
import sys
from pathlib import Path

import optimality
import pytest

ONE = {
    "name": "two layers",
    "cluster": "2x1, inter 1gbit",
    "tensors": [[1_000_000, 100.0], [768, 100.0], [400_000, 900]],
}


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["optimality.py", *words])
    return optimality.main()


def written(tmp_path: Path, data: object) -> str:
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_listed_workloads_are_judged_in_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.json"
    assert run(monkeypatch, "--workloads", written(tmp_path, [ONE]), "--json", str(out), "--plans") == 0
    records = json.loads(out.read_text())
    assert [record["mode"] for record in records] == ["lossless", "balanced", "aggressive"]
    assert {record["workload"] for record in records} == {"two layers"}
    for record in records:
        assert set(record) == {
            "workload", "tensors", "mode", "step_ms", "oracle_ms", "bound_ms", "dense_ms", "decide_ms",
        }  # fmt: skip
        assert record["tensors"] == 3
        assert 0.9 < record["bound_ms"] <= record["oracle_ms"] <= record["step_ms"] <= record["dense_ms"]
    assert "mean gap 0.0" in capsys.readouterr().out


def test_drawn_workloads_are_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found: list[object] = []
    for name in ("one.json", "two.json"):
        assert run(monkeypatch, "--only", "0", "3", "--json", str(tmp_path / name)) in (0, 1)
        records = json.loads((tmp_path / name).read_text())
        found.append([{key: value for key, value in record.items() if key != "decide_ms"} for record in records])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "must be a list of {name, cluster, tensors}, not {}"),
        ([{"name": "a"}], r"\[0\] must have name, cluster and tensors"),
        ([{**ONE, "name": 3}], r"\[0\].name must be a text, not 3"),
        ([{**ONE, "cluster": "many"}], r"\[0\].cluster: cannot read the cluster 'many'"),
        ([{**ONE, "cluster": 8}], r"\[0\].cluster must be a text"),
        ([{**ONE, "tensors": []}], r"\[0\].tensors must be a list of \[elements, ready_us\], at least one"),
        ([ONE, {**ONE, "tensors": [[5]]}], r"\[1\].tensors\[0\] must be \[elements, ready_us\], not \[5\]"),
        ([{**ONE, "tensors": [[0, 1.0]]}], "elements, must be 1 to"),
        ([{**ONE, "tensors": [[5, -1]]}], "ready_us, must be a time"),
        ([{**ONE, "tensors": [[5, 2], [5, 1]]}], r"tensors\[1\] is ready before the one before it"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: object,
    message: str,
):
    assert run(monkeypatch, "--workloads", written(tmp_path, data)) == 2
    said = capsys.readouterr().err
    assert said.startswith("optimality.py: ")
    assert re.search(message, said), said


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert run(monkeypatch, "--workloads", "nowhere.json") == 2
    assert "cannot read the workloads nowhere.json" in capsys.readouterr().err


MODELS = {"models": {"tiny": {"tensors": [["b", 512], ["w", 400_000], ["v", 300_000]], "ready_gap_us": [0, 50, 400]}}}
SCHEDULE = {
    "model": "tiny",
    "compressor": "randomk",
    "nodes": 4,
    "gpus_per_node": 2,
    "PCIe": True,
    "options": [0, 4, 5],
}
CONSTANTS = {
    "alpha_us": 150,
    "beta_intra_us_per_KB": {"nvlink": 0.02, "pcie": 0.4},
    "beta_inter_us_per_KB": 0.8,
    "cpu_throughput_Gbps": {"used_hard_coded": 20},
    "gpu_overhead_us": {
        "base_elements": 1 << 20,
        **{name: [[0, 26, 90, 900], [0, 22, 30, 100]] for name in ("randomk", "dgc", "efsignsgd")},
    },
}


def published(folder: Path, **changed: object) -> str:
    schedules = {"schedules": {"tiny/pcie": {**SCHEDULE, **changed}}}
    for name, data in (("models", MODELS), ("schedules", schedules), ("cost_constants", CONSTANTS)):
        (folder / f"espresso_{name}.json").write_text(json.dumps(data))
    return str(folder)


def test_a_published_schedule_is_not_faster_on_the_same_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.json"
    assert run(monkeypatch, "--published", published(tmp_path), "--json", str(out)) == 0
    [record] = json.loads(out.read_text())
    assert record["workload"] == "tiny/pcie"
    assert record["bound_ms"] <= record["step_ms"] <= record["published_ms"]
    assert "slower than published: none" in capsys.readouterr().out


def test_what_is_not_as_published_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, "--published", str(tmp_path)) == 2
    assert "cannot read" in capsys.readouterr().err
    assert run(monkeypatch, "--published", published(tmp_path, options=[0, 77, 5])) == 2
    assert "tiny/pcie is not as published: KeyError: 77" in capsys.readouterr().err
