"""Each benchmark can be imported: what moves in the package must not break it unseen."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_imports(name: str) -> None:
    assert importlib.import_module(name).__doc__
