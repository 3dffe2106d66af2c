"""`fxcomp demo`: train a small GPT with DDP, with its hooks and with fxcomp, and show what the network cost each.

Two ranks on this machine, over a link of 300 Mbit/s between two network namespaces, learn the source of Python's
standard library. Where no link can be shaped they talk over loopback. This process starts the ranks, which run
`contest.py`, shows their progress, and prints their results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.commands.demo.launch_ranks import of_module, run_ranks
from fxcomp.commands.demo.result import WIDTH, Contestant, describe
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, why_not
from fxcomp.errors import BadOption
from fxcomp.report.terminal import encodable, width_of
from fxcomp.status_line import takes_status_lines, written_over

NAME = "demo"
HELP = "train a small GPT with DDP, with its hooks and with fxcomp, in turns"
EXAMPLES = """\
  fxcomp demo --inter 1gbit                                     train a GPT with DDP and with fxcomp
"""

RANKS = 2
LOOPBACK = "loopback"
STEPS = 30
BUDGET_S = 110  # after which no round begins, unless the steps are given: the whole demo then ends within 3 minutes
MOST_STEPS = 1_000_000  # some days (assumed)
MARK = "@demo "  # begins the lines that ranks print for this process
_TIMEOUT_S = 3600.0  # unless the steps are given
_LINES_EVERY_S, _OVERWRITTEN_EVERY_S = 4.0, 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inter",
        metavar="RATE",
        default="300mbit",
        help="the bandwidth between two hosts, or loopback for none (default: 300mbit)",
    )
    parser.add_argument(
        "--steps", type=int, help=f"how many steps each takes (default: {STEPS}, or fewer within {BUDGET_S} s)"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of a chart")


def run(arguments: argparse.Namespace) -> int:
    """Train the contestants and print the comparison."""
    if arguments.steps is not None and not 1 <= arguments.steps <= MOST_STEPS:
        raise BadOption(f"--steps is how many steps each takes, 1 to {MOST_STEPS:,}; it is {arguments.steps}")
    if arguments.inter != LOOPBACK:
        parse_gb_per_s(arguments.inter)  # refuse a wrong rate even where links cannot be shaped
    return run_demo(inter=arguments.inter, steps=arguments.steps, as_json=arguments.json)


@dataclass
class Findings:
    """The messages of the ranks so far."""

    note: str
    """Current work of the ranks."""
    parameters: int = 0
    plan: str = ""
    contestants: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def hear(self, _rank: int, line: str) -> None:
        """Take in a line of a rank."""
        if line.startswith(MARK):
            for name, value in json.loads(line.removeprefix(MARK)).items():
                setattr(self, name, value)


def run_demo(*, inter: str, steps: int | None, as_json: bool) -> int:
    """Run both ranks, over a link of `inter` if hosts can be shaped here, and print the results."""
    rate, place = place_for(inter)
    command = of_module(
        "fxcomp.commands.demo.contest", str(steps or STEPS), str(BUDGET_S if steps is None else math.inf)
    )
    found = Findings(f"two ranks start, over {place}")
    with ExitStack() as stack:
        in_place = takes_status_lines(sys.stderr) and sys.stdout.isatty()
        stack.enter_context(progress(found, sys.stderr, in_place=in_place))
        hosts = stack.enter_context(ShapedHosts(RANKS, rate)) if rate else None
        timeout_s = _TIMEOUT_S if steps is None else math.inf

        run_ranks(command, hosts=hosts, ranks_per_host=1 if hosts else RANKS, timeout_s=timeout_s, on_line=found.hear)
    contestants = [Contestant(**each) for each in found.contestants]
    if as_json:
        facts = {"inter": rate, "parameters": found.parameters, "plan": found.plan}
        named = [{"median_ms": each.median_ms, **asdict(each)} for each in contestants]
        print(json.dumps({**facts, "contestants": named}, indent=2))
    else:
        title = f"Two ranks trained a GPT of {found.parameters / 1e6:.1f} M parameters over {place}."
        text = describe(contestants, title, found.plan, width=width_of(sys.stdout, otherwise=WIDTH))
        print(encodable(text, sys.stdout.encoding))
    return 0


def place_for(inter: str, why_not: Callable[[], str | None] = why_not) -> tuple[str | None, str]:
    """Return the rate of the link if this machine can shape one, None for loopback, and the place in words."""
    if inter == LOOPBACK:
        return None, LOOPBACK
    if (reason := why_not()) is None:
        return inter, f"a link of {inter} between two network namespaces"
    sentence = (
        f"No link of {inter} can be shaped, so this runs over loopback, where the network costs little ({reason})."
    )
    print(sentence, file=sys.stderr, flush=True)
    return None, LOOPBACK


@contextmanager
def progress(found: Findings, out: TextIO, *, in_place: bool) -> Generator[None]:
    """Show the latest note with the seconds since the beginning: in one line, or in a line every few seconds."""
    begun, done = time.monotonic(), threading.Event()

    def show() -> None:
        is_over = False
        while not is_over:
            line = f"{time.monotonic() - begun:4.0f} s  {found.note}"
            print(written_over(line) if in_place else f"{line}\n", end="", file=out, flush=True)
            is_over = done.wait(_OVERWRITTEN_EVERY_S if in_place else _LINES_EVERY_S)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if in_place:
            print(written_over(""), end="", file=out, flush=True)
