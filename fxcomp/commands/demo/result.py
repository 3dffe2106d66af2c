"""Compare the demo's contestants, and write the result: a few sentences, then a bar for each contestant's step."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fxcomp.report.document import count

DDP, FXCOMP, FREE = "ddp", "fxcomp", "free"
HOOKS = ("bf16_hook", "powersgd_hook")
LABELS = {
    DDP: "DDP",
    "bf16_hook": "DDP, bf16 hook",
    "powersgd_hook": "DDP, PowerSGD hook",
    FXCOMP: "fxcomp",
    FREE: "no network",
}
"""The contestants, in the order in which they are shown."""

BLOCK_STEPS = 2  # of one contestant, before the next has its turn
_RESAMPLES = 1000


@dataclass
class Contestant:
    """One way of training. `free` never communicates."""

    name: str
    step_s: list[float] = field(default_factory=list[float])
    """Seconds of each step, of the slowest rank; blocks of `BLOCK_STEPS`, whose order in a round was random."""
    wire_bytes: int = 0
    """Per step and host."""
    train_loss: float | None = None
    validation_loss: float | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_s) * 1e3

    @property
    def spoken(self) -> str:
        return LABELS[self.name].replace(", ", " with the ")


class Speedup(NamedTuple):
    """The median of another's steps over the median of one's, with a 95 % interval."""

    ratio: float
    low: float
    high: float


def speedup(mine: Contestant, theirs: Contestant) -> Speedup:
    """Compare two contestants. The interval comes from drawing rounds again with replacement."""
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
    return Speedup(theirs.median_ms / mine.median_ms, low, high)


WIDTH = 110  # columns that the widest chart needs
_BAR = 36  # characters, for the longest step
_LEAST_BAR = 8
_FEW_STEPS = 8  # of each; with fewer nothing is compared, and one verified step could decide
_GAP = "  "
_LEAST_COST = 0.03  # of DDP's step: a network that costs less has nothing to recover


def describe(contestants: Sequence[Contestant], title: str, plan: str = "", *, width: int = WIDTH) -> str:
    """Write the result. The chart is last, and no wider than `width` columns.

    Of the two hooks the faster is shown, by the same steps: chance is on its side, not on fxcomp's.
    """
    named = {each.name: each for each in contestants}
    ddp, fxcomp, free = (named[name] for name in (DDP, FXCOMP, FREE))
    hook, other = sorted((named[name] for name in HOOKS), key=lambda each: each.median_ms)
    steps = len(ddp.step_s)
    if steps >= _FEW_STEPS:
        against_ddp = speedup(fxcomp, ddp)
        recovered = _recovered(ddp.median_ms, fxcomp.median_ms, free.median_ms, is_faster=against_ddp.low > 1.0)
        against_hook = _against(speedup(fxcomp, hook), f"{hook.spoken}, the faster hook here")
        compared = [_against(against_ddp, "DDP"), recovered, against_hook]
    else:
        compared = [f"{count(steps, 'step')} of each are too few to compare; {_FEW_STEPS} are the least."]
    foot = (
        f"Medians of {steps} steps, taken in turns, and what a host sent in one; losses after the same number of steps"
        " on the same batches."
    )
    compared += [f"{other.spoken} took {other.median_ms:.0f} ms a step.", f"fxcomp's plan: {plan}." if plan else ""]
    return "\n".join([title, "", *filter(None, compared), foot, "", *chart([ddp, hook, fxcomp, free], width)])


def chart(contestants: Sequence[Contestant], width: int = WIDTH) -> list[str]:
    """Draw a bar for each contestant's step, with its bytes and losses as far as `width` columns have room."""
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


def _against(found: Speedup, other: str) -> str:
    interval = f"95 % interval {found.low:.2f} to {found.high:.2f}"
    if found.low > 1.0:
        return f"fxcomp makes a step {found.ratio:.2f} times as fast as {other} ({interval})."
    slower = f"fxcomp is SLOWER here than {other}"
    equal = f"fxcomp is not faster here than {other}, as far as can be told"
    return f"{slower if found.high < 1.0 else equal}: {found.ratio:.2f} times as fast ({interval})."


def _recovered(ddp_ms: float, fxcomp_ms: float, free_ms: float, *, is_faster: bool) -> str:
    cost = ddp_ms - free_ms
    if cost < _LEAST_COST * ddp_ms:
        return "The network costs DDP next to nothing here, so there is nothing to win."
    if not is_faster:
        return ""
    return f"It recovers {100 * (ddp_ms - fxcomp_ms) / cost:.0f} % of the {cost:.0f} ms that the network costs DDP."
