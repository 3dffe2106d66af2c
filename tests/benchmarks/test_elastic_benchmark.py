"""A job loses a rank and gets another one under torchrun, goes on by itself, and loses no gradient."""

import subprocess
import sys
from pathlib import Path

import pytest
from elastic import SAVE_EVERY
from records import read

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_killed_rank_and_a_new_one_cost_no_gradient(tmp_path: Path):
    command = [sys.executable, str(CHECKOUT / "benchmarks/elastic.py"), "--json", str(tmp_path / "found.json")]
    done = subprocess.run([*command, "--cases", "kill, short waits"], timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = read(tmp_path / "found.json")
    assert len(found["notices_s"]) == 3, "every rank that survives gets an error"
    assert all(error.startswith("PeerFailed: ") for error in found["errors"])
    after_kill, after_joining = found["lost_steps"]
    assert 0 <= after_kill <= SAVE_EVERY + 1, "steps since the last checkpoint, and the one under way"
    assert after_joining == 0, "ranks that are stopped save first"
    assert found["owes"], "the plan compresses: residuals went from four ranks to three and back"
