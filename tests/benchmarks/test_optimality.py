"""The benchmark of the search against the best possible."""

import json
import sys
from pathlib import Path

import optimality
import pytest


def test_drawn_workloads_are_judged_and_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found: list[list[dict[str, object]]] = []
    for name in ("one.json", "two.json"):
        words = ["optimality.py", "--only", "0", "3", "--plans", "--json", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", words)
        assert optimality.main() in (0, 1)
        found.append(json.loads((tmp_path / name).read_text()))
    for record in found[0]:
        assert record["bound_ms"] <= record["oracle_ms"] <= record["step_ms"] <= record["dense_ms"]  # type: ignore[operator]
    one, two = ([{k: v for k, v in each.items() if k != "decide_ms"} for each in records] for records in found)
    assert one == two
