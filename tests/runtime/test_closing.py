"""Process groups that take long to close while Python ends."""

import subprocess
import sys
from pathlib import Path

import pytest

CLOSES_AND_ENDS = """
import os, sys, time
import torch
import torch.distributed as dist
from fxcomp.compat import destroy_groups

class EndsSlowly:
    sleep = time.sleep
    def __del__(self):
        self.sleep(2)

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
kept, group = EndsSlowly(), dist.new_group([0, 1])
dist.barrier(group)
if rank:
    time.sleep(1)
    os._exit(0)
dist.all_reduce(torch.zeros(1), group=group, async_op=True)
handles = [group]
del group
destroy_groups(handles)
"""
"""Rank 0 closes a group in which it waits for rank 1, which ends a second later; until then Python would have ended."""


@pytest.mark.slow
def test_python_ends_in_order_while_a_group_is_being_closed(tmp_path: Path):
    command = [sys.executable, "-c", CLOSES_AND_ENDS, str(tmp_path / "store")]
    other = subprocess.Popen([*command, "1"])
    ended = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=100)
    other.wait(100)
    assert ended.returncode == 0, ended.stderr
