"""A training script for a GPU runs where there is none: its job file, and the trace of its step."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers import imagined

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> Mapping[str, str]:
    """Run all checks in one process, which they leave to itself."""
    ran = subprocess.run([sys.executable, "-m", imagined.__name__], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: Mapping[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", imagined.CHECKS)
def test_a_script_for_a_gpu(name: str, results: Mapping[str, str]) -> None:
    assert not results[name], results[name]
