"""Emitted steps are run in one place, for every frontend."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fxcomp

ROOT = Path(fxcomp.__file__).parent

EXECUTOR = ROOT / "step" / "executor.py"

CALLS = {("module", "step"), ("_arriving", "send"), ("running", "send"), ("program", "run")}
"""Calls of an emitted function, and of a step that gradients arrive in: by the object's last name, and the method."""


def calls_of_emitted_code(source: str) -> list[str]:
    """List the calls in a source that run emitted code."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            whose = node.func.value
            name = whose.attr if isinstance(whose, ast.Attribute) else whose.id if isinstance(whose, ast.Name) else ""
            if (name, node.func.attr) in CALLS:
                found.append(f"{name}.{node.func.attr}")
    return found


@pytest.mark.parametrize("room", ["step", "frontends", "codegen", "state"])
def test_only_the_executor_runs_emitted_steps(room: str):
    others = [path for path in sorted((ROOT / room).rglob("*.py")) if path != EXECUTOR]
    assert {path.name: calls for path in others if (calls := calls_of_emitted_code(path.read_text()))} == {}


def test_the_search_finds_the_calls():
    assert sorted(calls_of_emitted_code(EXECUTOR.read_text())) == ["_arriving.send", "module.step", "module.step"]
    assert calls_of_emitted_code("self._program.run(rt, a)\nrunning.send(x)\noptimizer.step()") == ["running.send"]
    assert calls_of_emitted_code("self.program.run(rt, a)") == ["program.run"]
