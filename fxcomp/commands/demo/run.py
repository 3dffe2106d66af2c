"""`fxcomp demo`: train a small GPT with DDP, with its hooks and with fxcomp, and show what the network cost each.

Two ranks on this machine, over a link of 300 Mbit/s between two network namespaces, learn the source of Python's
standard library. Where no link can be shaped they talk over loopback. This process starts the ranks, which run
`contest.py`, says how far they are, and prints what they found.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TextIO

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.commands.demo.launch_ranks import of_module, run_ranks
from fxcomp.commands.demo.result import WIDTH, Contestant, describe
from fxcomp.commands.demo.shaped_hosts import Rights, ShapedHosts, rights_here
from fxcomp.errors import BadOption, Unsupported
from fxcomp.report.terminal import encodable, width_of
from fxcomp.status_line import takes_status_lines, written_over

EVERY_S = 4.0  # between lines
_LOOK_S = 0.5


class Progress:
    """The latest of what `say` was told, with the seconds since the `with` block began."""

    def __init__(self, out: TextIO, *, in_place: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._in_place = in_place
        self._clock = clock
        self._began = clock()
        self._shown_at: float | None = None
        self._text = ""
        self._lock = threading.Lock()  # ranks are heard in threads of their own
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._ticker.join()
        if self._in_place:
            print(written_over(""), end="", file=self._out, flush=True)

    def say(self, text: str) -> None:
        """Show this now if a line is due, and until something else is said."""
        with self._lock:
            self._text = text
        self.show_if_due()

    def show_if_due(self) -> None:
        """Show the latest text if it is time for a line."""
        with self._lock:
            now = self._clock()
            pause = _LOOK_S if self._in_place else EVERY_S
            if not self._text or (self._shown_at is not None and now - self._shown_at < pause):
                return
            self._shown_at = now
            line = f"{now - self._began:4.0f} s  {self._text}"
            if self._in_place:
                print(written_over(line), end="", file=self._out, flush=True)
            else:
                print(line, file=self._out, flush=True)

    def _tick(self) -> None:
        while not self._done.wait(_LOOK_S):
            self.show_if_due()


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


@dataclass(frozen=True)
class MeetingPlace:
    """Where ranks meet: over a shaped link by some right, or over loopback, and why if that was not asked for."""

    inter: str | None
    rights: Rights | None = None
    sentence: str = ""

    def __str__(self) -> str:
        return f"a link of {self.inter} between two network namespaces" if self.inter else LOOPBACK


def place_for(inter: str, find_rights: Callable[[], Rights] = rights_here) -> MeetingPlace:
    """Choose the shaped link if this machine allows one, as root or in a user namespace, and loopback if not."""
    if inter == LOOPBACK:
        return MeetingPlace(None)
    try:
        return MeetingPlace(inter, find_rights())
    except Unsupported as error:
        sentence = f"No link of {inter} can be shaped, so this runs over loopback, where the network costs little"
        return MeetingPlace(None, sentence=f"{sentence} ({error}).")


@dataclass
class Findings:
    """The ranks' messages so far."""

    contestants: list[Contestant] = field(default_factory=list[Contestant])
    parameters: int = 0
    plan: str = ""

    def hear(self, line: str, say: Callable[[str], None]) -> None:
        """Take in a line of a rank, and say what it does."""
        if not line.startswith(MARK):
            return
        content = json.loads(line.removeprefix(MARK))
        if "note" in content:
            say(content["note"])
        self.parameters = content.get("parameters", self.parameters)
        self.plan = content.get("plan", self.plan)
        self.contestants.extend(Contestant(**entry) for entry in content.get("contestants", ()))


def run_demo(*, inter: str, steps: int | None, as_json: bool) -> int:
    """Run both ranks, over a link of `inter` if hosts can be shaped here, and print what they found."""
    budget_s = BUDGET_S if steps is None else math.inf
    place = place_for(inter)
    if place.sentence:
        print(place.sentence, file=sys.stderr, flush=True)
    found = Findings()
    command = of_module("fxcomp.commands.demo.contest", str(steps or STEPS), str(budget_s))
    before = {sign: signal.signal(sign, _leave) for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with ExitStack() as stack:
            is_watched = takes_status_lines(sys.stderr) and sys.stdout.isatty()
            progress = stack.enter_context(Progress(sys.stderr, in_place=is_watched))
            progress.say(f"two ranks start, over {place}")
            hosts = stack.enter_context(ShapedHosts(RANKS, inter, place.rights)) if place.inter else None
            run_ranks(
                command,
                hosts=hosts,
                ranks_per_host=1 if hosts else RANKS,
                timeout_s=_TIMEOUT_S if steps is None else math.inf,
                on_line=lambda _rank, line: found.hear(line, progress.say),
            )
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
    if as_json:
        contestants = [each.summary() for each in found.contestants]
        facts = {"inter": place.inter, "parameters": found.parameters, "plan": found.plan}
        print(json.dumps({**facts, "contestants": contestants}, indent=2))
    else:
        title = f"Two ranks trained a GPT of {found.parameters / 1e6:.1f} M parameters over {place}."
        text = describe(found.contestants, title, found.plan, width=width_of(sys.stdout, otherwise=WIDTH))
        print(encodable(text, sys.stdout.encoding))
    return 0


def _leave(sign: int, _frame: FrameType | None) -> None:
    """Unwind, so that ranks end on the way out. From now on nothing interrupts that."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    print("\nfxcomp: stopping; the ranks are ended", file=sys.stderr, flush=True)
    sys.exit(128 + sign)
