"""Training scripts for a GPU, as people write them, go through the command line where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "tests" / "jobs_for_gpus"


def told(command: str, job: str, *options: str) -> str:
    """Run a command on a job for H100s; returns what it prints."""
    words = [sys.executable, "-m", "fxcomp", command, str(JOBS / f"{job}.py"), "--device", "h100", *options]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("job", "gradients"),
    [("nanogpt", 28), ("trainer", 27), ("images", 17), pytest.param("lora_7b", 128, marks=pytest.mark.slow)],
)
@pytest.mark.one_in(2)
def test_a_training_script_for_a_gpu_is_predicted_and_dumped(job: str, gradients: int) -> None:
    explained = told("explain", job, "--cluster", "4x1", "--inter", "25gbit")
    assert f"{gradients} gradients" in explained
    assert "NVIDIA" in explained
    dumped = told("dump", job, "--compress", "dense")
    assert dumped.count("gradient ") >= gradients
    assert "# forward and backward: " in dumped
