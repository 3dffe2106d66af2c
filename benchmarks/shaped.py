"""Run a benchmark's ranks on hosts with shaped links or on this machine.

The parent starts its own file as ranks with `run`. A rank calls `join`, and rank 0 sends results to the parent with a
`Teller`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from records import show_progress

from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, shape_this_host, why_not
from fxcomp.errors import FxcompError

__all__ = ["UNSHAPED", "Teller", "agree", "ends_well", "is_rank", "join", "run", "set_rate", "slowest"]

UNSHAPED = "loopback"
_MARK = "@benchmark "  # prefix of rank 0's lines for the parent

Found = dict[str, Any]


def run(
    command: Sequence[str],
    hear: Callable[[Found], None],
    *,
    hosts: int | None,
    ranks_per_host: int = 1,
    timeout_s: float = math.inf,
) -> None:
    """Run `python <command>` as ranks on `hosts` shaped hosts or on this one; pass rank 0's results to `hear`."""

    def on_line(_rank: int, line: str) -> None:
        if line.startswith(_MARK):
            content = json.loads(line.removeprefix(_MARK))
            if "note" in content:
                _show(content["note"])
            else:
                show_progress("")
                hear(content)

    if hosts is None:
        run_ranks(command, ranks_per_host=ranks_per_host, timeout_s=timeout_s, on_line=on_line)
        return
    if (missing := why_not()) is not None:
        sys.exit(f"cannot measure: {missing}")
    with ShapedHosts(hosts) as shaped:
        run_ranks(command, hosts=shaped, ranks_per_host=ranks_per_host, timeout_s=timeout_s, on_line=on_line)


def _show(note: str) -> None:
    show_progress(note)
    if not sys.stderr.isatty() and "round " not in note:  # not one line per round in a file
        print(note, file=sys.stderr, flush=True)


def ends_well(main: Callable[[], int | None]) -> int:
    """Run a benchmark's command, clean up ranks and hosts on exit, and print fxcomp's errors in one line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return main() or 0
    except FxcompError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


# Calls of ranks


def is_rank() -> bool:
    return "RANK" in os.environ


class Teller:
    """Sends notes and results from rank 0 to the parent."""

    def __init__(self) -> None:
        self.prefix = ""

    def __call__(self, note: str) -> None:
        self.send({"note": self.prefix + note})

    def send(self, found: Found) -> None:
        if dist.get_rank() == 0:
            print(_MARK + json.dumps(found), flush=True)


def set_rate(inter: str) -> None:
    """Shape all hosts for a bandwidth, between two barriers."""
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0" and os.environ["GLOO_SOCKET_IFNAME"] != "lo":
        shape_this_host(None if inter == UNSHAPED else inter)
    dist.barrier()


def slowest(times: Sequence[float]) -> list[float]:
    """Return the maximum of each time over ranks."""
    found = torch.tensor(times)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def agree(number: int) -> int:
    told = torch.tensor(number)
    dist.broadcast(told, 0)
    return int(told)
