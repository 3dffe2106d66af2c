"""Process groups that a step has given back, at the end of a job that destroys none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch.distributed as dist
import fxcomp
from fxcomp.runtime.transport import Groups

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
Groups.create({"world": [[0]]}, ["main"], []).give_back()
"""


@pytest.mark.slow
def test_a_job_that_never_destroys_its_process_group_ends_without_a_word():
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
