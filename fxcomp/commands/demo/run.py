"""`fxcomp demo`: train a small GPT with DDP, with its hooks and with fxcomp, and compare their network costs.

Two ranks on this machine train over a 300 Mbit/s link between two network namespaces, or over loopback. This process
starts the ranks (`contest.py`) and prints progress and results.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TextIO

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.commands.demo.launch_ranks import of_module, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, why_not
from fxcomp.errors import BadOption
from fxcomp.report.document import count
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
BUDGET_S = 110  # s; no round of contestants begins later, unless --steps is given
MOST_STEPS = 1_000_000  # some days (assumed)
MARK = "@demo "  # prefix of lines for this process
_TIMEOUT_S = 3600.0  # none if --steps is given
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
    if arguments.steps is not None and not 1 <= arguments.steps <= MOST_STEPS:
        raise BadOption(f"--steps is how many steps each takes, 1 to {MOST_STEPS:,}; it is {arguments.steps}")
    if arguments.inter != LOOPBACK:
        parse_gb_per_s(arguments.inter)  # refuse an invalid rate even if links cannot be shaped
    return run_demo(inter=arguments.inter, steps=arguments.steps, as_json=arguments.json)


def run_demo(*, inter: str, steps: int | None, as_json: bool) -> int:
    rate, place = place_for(inter)
    command = of_module(
        "fxcomp.commands.demo.contest", str(steps or STEPS), str(BUDGET_S if steps is None else math.inf)
    )
    found: dict[str, Any] = {"note": f"two ranks start, over {place}"}
    with ExitStack() as stack:
        in_place = takes_status_lines(sys.stderr) and sys.stdout.isatty()
        stack.enter_context(progress(found, sys.stderr, in_place=in_place))
        hosts = stack.enter_context(ShapedHosts(RANKS, rate)) if rate else None
        timeout_s = _TIMEOUT_S if steps is None else math.inf

        run_ranks(
            command,
            hosts=hosts,
            ranks_per_host=1 if hosts else RANKS,
            timeout_s=timeout_s,
            on_line=partial(hear, found),
        )
    contestants = [Contestant(**each) for each in found["contestants"]]
    if as_json:
        facts = {"inter": rate, "parameters": found["parameters"], "plan": found["plan"]}
        named = [{"median_ms": each.median_ms, **asdict(each)} for each in contestants]
        print(json.dumps({**facts, "contestants": named}, indent=2))
    else:
        title = f"Two ranks trained a GPT of {found['parameters'] / 1e6:.1f} M parameters over {place}."
        text = describe(contestants, title, found["plan"], width=width_of(sys.stdout, otherwise=WIDTH))
        print(encodable(text, sys.stdout.encoding))
    return 0


def hear(found: dict[str, Any], _rank: int, line: str) -> None:
    if line.startswith(MARK):
        found |= json.loads(line.removeprefix(MARK))


def place_for(inter: str, why_not: Callable[[], str | None] = why_not) -> tuple[str | None, str]:
    """Return the link's rate and a description. If no link can be shaped, use loopback, whose rate is None."""
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
def progress(found: Mapping[str, Any], out: TextIO, *, in_place: bool) -> Generator[None]:
    """Show `found["note"]` and the elapsed seconds. Overwrite one line if `in_place`, else print lines now and then."""
    begun, done = time.monotonic(), threading.Event()

    def show() -> None:
        is_over = False
        while not is_over:
            line = f"{time.monotonic() - begun:4.0f} s  {found['note']}"
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


# Result


DDP, FXCOMP, FREE = "ddp", "fxcomp", "free"
HOOKS = ("bf16_hook", "powersgd_hook")
LABELS = {
    DDP: "DDP",
    "bf16_hook": "DDP, bf16 hook",
    "powersgd_hook": "DDP, PowerSGD hook",
    FXCOMP: "fxcomp",
    FREE: "no network",
}

BLOCK_STEPS = 2  # steps of one contestant per turn
_RESAMPLES = 1000


@dataclass
class Contestant:
    """Measurements of one way of training. The contestant named `free` never communicates."""

    name: str
    step_s: list[float] = field(default_factory=list[float])
    """Step times of the slowest rank, in s. Each round of all contestants adds `BLOCK_STEPS` values."""
    wire_bytes: int = 0
    """Bytes sent per step and host."""
    train_loss: float | None = None
    validation_loss: float | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_s) * 1e3

    @property
    def spoken(self) -> str:
        return LABELS[self.name].replace(", ", " with the ")


def speedup(mine: Contestant, theirs: Contestant) -> tuple[float, float, float]:
    """Return the ratio `theirs.median_ms / mine.median_ms` and the ratio's 95 % bootstrap interval over rounds."""
    firsts, generator = range(0, len(mine.step_s), BLOCK_STEPS), random.Random(0)
    drawn: list[float] = []
    for _ in range(_RESAMPLES):
        rounds = generator.choices(firsts, k=len(firsts))
        theirs_s, mine_s = (
            statistics.median(step for first in rounds for step in each.step_s[first : first + BLOCK_STEPS])
            for each in (theirs, mine)
        )
        drawn.append(theirs_s / mine_s)
    drawn.sort()
    low, high = (drawn[round(share * (_RESAMPLES - 1))] for share in (0.025, 0.975))
    return theirs.median_ms / mine.median_ms, low, high


WIDTH = 110  # columns of the widest chart
_BAR = 36  # characters, for the longest step
_LEAST_BAR = 8
_FEW_STEPS = 8  # minimum for a comparison
_GAP = "  "
_LEAST_COST = 0.03  # minimum network cost to report on, as a fraction of DDP's step


def describe(contestants: Sequence[Contestant], title: str, plan: str = "", *, width: int = WIDTH) -> str:
    """Write the result, with a chart of at most `width` columns.

    The chart shows only the faster of DDP's two hooks. The same steps determine the faster hook and its result, which
    favors the hook.
    """
    named = {each.name: each for each in contestants}
    ddp, fxcomp, free = (named[name] for name in (DDP, FXCOMP, FREE))
    hook, other = sorted((named[name] for name in HOOKS), key=lambda each: each.median_ms)
    steps = len(ddp.step_s)
    if steps >= _FEW_STEPS:
        against_ddp = speedup(fxcomp, ddp)
        recovered = _recovered(ddp.median_ms, fxcomp.median_ms, free.median_ms, is_faster=against_ddp[1] > 1.0)
        against_hook = _against(speedup(fxcomp, hook), f"{hook.spoken}, the faster hook here")
        compared = [_against(against_ddp, "DDP"), recovered, against_hook]
    else:
        compared = [f"{count(steps, 'step')} of each are too few to compare; {_FEW_STEPS} are the least."]
    foot = (
        f"Medians of {steps} steps, taken in turns, and bytes sent by a host in one; losses after the same number of"
        " steps on the same batches."
    )
    compared += [f"{other.spoken} took {other.median_ms:.0f} ms a step.", f"fxcomp's plan: {plan}." if plan else ""]
    return "\n".join([title, "", *filter(None, compared), foot, "", *chart([ddp, hook, fxcomp, free], width)])


def chart(contestants: Sequence[Contestant], width: int = WIDTH) -> list[str]:
    """Draw a row per contestant: a bar, and as many columns of numbers as fit into `width` characters."""
    rows: list[Sequence[str]] = [("", "ms a step", "MB sent", "train loss", "validation loss")]
    for each in contestants:
        sent = "–" if each.name == FREE else f"{each.wire_bytes / 1e6:.2f}"
        losses = ["–" if loss is None else f"{loss:.3f}" for loss in (each.train_loss, each.validation_loss)]
        rows.append((LABELS[each.name], f"{each.median_ms:.0f}", sent, *losses))
    columns = [(column, max(map(len, column))) for column in zip(*rows, strict=True)]
    while (room := width - sum(size + len(_GAP) for _, size in columns)) < _LEAST_BAR and len(columns) > 2:
        columns.pop()
    longest, bar = max(each.median_ms for each in contestants), max(_LEAST_BAR, min(_BAR, room))
    bars = ("", *("█" * max(round(bar * each.median_ms / longest), 1) for each in contestants))
    (labels, first), *numbers = columns
    right = [[cell.rjust(size) for cell in column] for column, size in numbers]
    left = [[cell.ljust(size) for cell in column] for column, size in ((labels, first), (bars, bar))]
    return [_GAP.join(row).rstrip() for row in zip(left[0], right[0], left[1], *right[1:], strict=True)]


def _against(found: tuple[float, float, float], other: str) -> str:
    ratio, low, high = found
    times = f"{ratio:.2f} times as fast"
    interval = f"95 % interval {low:.2f} to {high:.2f}"
    if low > 1.0:
        return f"fxcomp makes a step {times} as {other} ({interval})."
    slower, equal = "SLOWER here than", "not faster here than"
    chance = "" if high < 1.0 else ", within the measurement's error"
    return f"fxcomp is {slower if high < 1.0 else equal} {other}{chance}: {times} ({interval})."


def _recovered(ddp_ms: float, fxcomp_ms: float, free_ms: float, *, is_faster: bool) -> str:
    cost = ddp_ms - free_ms
    if cost < _LEAST_COST * ddp_ms:
        return "The network costs DDP next to nothing here, so there is nothing to win."
    if not is_faster:
        return ""
    return f"It recovers {100 * (ddp_ms - fxcomp_ms) / cost:.0f} % of the {cost:.0f} ms that the network costs DDP."
