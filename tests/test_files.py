"""One function writes files, so that a job killed while it writes leaves the old file or the new one."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ErrorTable
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

PACKAGE = Path(fxcomp.__file__).parent

ELSEWHERE = {
    "compat/machine.py": 3,  # write_atomically, also for devices such as /dev/stdout; a lock file
    "commands/bisect/rank.py": 2,  # a temporary folder of one command
}
"""Number of places that open a file for writing, by module."""


def written(tree: ast.AST) -> int:
    """Count calls of `write_text` and `write_bytes`, and opens with a mode that writes."""
    count = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        modes += [
            each.value.value for each in node.keywords if each.arg == "mode" and isinstance(each.value, ast.Constant)
        ]
        opens = name in ("open", "fdopen") and any(set(mode) & set("wax+") and len(mode) <= 3 for mode in modes)
        count += opens or name in ("write_text", "write_bytes")
    return count


def test_no_other_place_opens_a_file_for_writing():
    found = {str(path.relative_to(PACKAGE)): written(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in found.items() if count} == ELSEWHERE


PLAN = Plan((Bucket(("a",), (4,), DENSE),))
SAVED: dict[str, Callable[[Path], None]] = {
    "plan": PLAN.save,
    "costs": lambda path: CostTable().save(path),
    "errors": lambda path: ErrorTable({}).save(path),
}


@pytest.mark.parametrize("kind", SAVED)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "saved.json"
    SAVED[kind](path)
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        SAVED[kind](path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
