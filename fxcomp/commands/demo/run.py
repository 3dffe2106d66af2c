"""`fxcomp demo`: train a small GPT with plain DDP and with fxcomp, and show what the network cost each.

Two ranks on this machine, over loopback or over a shaped link (`--inter 300mbit`), learn the source of Python's
standard library. This process starts the ranks, which run `contest.py`, and prints what they found.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.commands import status_line
from fxcomp.commands.demo.launch_ranks import run_ranks
from fxcomp.commands.demo.result import Contestant, describe
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, why_not
from fxcomp.errors import BadOption

NAME = "demo"
HELP = "train a small GPT with DDP and with fxcomp, in turns"
EXAMPLES = """\
  fxcomp demo --inter 300mbit                                   train a GPT with DDP and with fxcomp
"""

RANKS = 2
MOST_STEPS = 1_000_000  # some days (assumed)
MARK = "@demo "  # begins the lines that ranks print for this process


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inter", metavar="RATE", help="the bandwidth between two hosts, like 300mbit; needs root")
    parser.add_argument("--steps", type=int, default=40, help="how many steps each takes (default: 40)")
    parser.add_argument("--json", action="store_true", help="print data instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Train the contestants and print the comparison."""
    if not 1 <= arguments.steps <= MOST_STEPS:
        raise BadOption(f"--steps is how many steps each takes, 1 to {MOST_STEPS:,}; it is {arguments.steps}")
    if arguments.inter is not None:
        parse_gb_per_s(arguments.inter)  # refuse a wrong rate even where links cannot be shaped
    return run_demo(inter=arguments.inter, steps=arguments.steps, as_json=arguments.json)


def run_demo(*, inter: str | None, steps: int, as_json: bool) -> int:
    """Run both ranks, over a link of `inter` if hosts can be shaped here, and print what they found."""
    missing = why_not() if inter is not None else None
    if missing is not None:
        print(f"{missing}\n  Running over loopback instead, where the network costs little.", file=sys.stderr)
        inter = None
    where = f"a link of {inter}" if inter else "loopback"
    status_line.show(f"Two ranks train a 14 M parameter GPT on Python's standard library, over {where}.")
    result: list[Contestant] = []

    def hear(_rank: int, line: str) -> None:
        if not line.startswith(MARK):
            return
        content = json.loads(line.removeprefix(MARK))
        if "note" in content:
            status_line.show(content["note"])
        else:
            result.extend(Contestant(**entry) for entry in content["contestants"])

    command = ["-m", "fxcomp.commands.demo.contest", str(steps)]
    previous = signal.signal(signal.SIGTERM, _leave)  # so that ranks and hosts are removed on the way out
    try:
        if inter is None:
            run_ranks(command, ranks_per_host=RANKS, timeout_s=3600, on_line=hear)
        else:
            with ShapedHosts(RANKS, inter) as hosts:
                run_ranks(command, hosts=hosts, timeout_s=3600, on_line=hear)
    except KeyboardInterrupt:
        status_line.clear()
        print("Stopped; the ranks have ended.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    status_line.clear()
    if as_json:
        contestants = [each.summary() for each in result]
        print(json.dumps({"inter": inter, "steps": steps, "contestants": contestants}, indent=2))
    else:
        print(describe(result, where))
    return 0


def _leave(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)
