"""The benchmark of the search against the best possible."""

import sys
from pathlib import Path

import optimality
import pytest
from records import read


def test_drawn_workloads_are_judged_and_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found: list[list[dict[str, float]]] = []
    for name in ("one.json", "two.json"):
        words = ["optimality.py", "--only", "0", "3", "--plans", "--json", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", words)
        assert optimality.main() in (0, 1)
        found.append(read(tmp_path / name))
    for record in found[0]:
        assert record["bound_ms"] <= record["oracle_ms"] <= record["step_ms"] <= record["dense_ms"]
    one, two = ([{k: v for k, v in each.items() if k != "decide_ms"} for each in records] for records in found)
    assert one == two
