"""Compare the demo's contestants, and write what was found: a few sentences, then a bar for each contestant's step."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

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

    def summary(self) -> dict[str, object]:
        return {"median_ms": self.median_ms, **asdict(self)}


@dataclass(frozen=True)
class Speedup:
    """Divide the median of another's steps by one's: the speed-up, with a 95 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        return self.low > 1.0

    @property
    def is_slower(self) -> bool:
        return self.high < 1.0


def speedup(mine: Contestant, theirs: Contestant) -> Speedup:
    """Compare two contestants. The interval comes from drawing rounds again with replacement."""
    ours, others = _blocks(mine.step_s), _blocks(theirs.step_s)
    generator = random.Random(0)
    drawn: list[float] = []
    for _ in range(_RESAMPLES):
        rounds = generator.choices(range(len(ours)), k=len(ours))
        drawn.append(_median_of([others[k] for k in rounds]) / _median_of([ours[k] for k in rounds]))
    drawn.sort()
    low, high = (drawn[round(share * (_RESAMPLES - 1))] for share in (0.025, 0.975))
    return Speedup(theirs.median_ms / mine.median_ms, low, high)


def best_hook(contestants: Sequence[Contestant]) -> Contestant:
    """Find the faster hook, by the same steps that it is shown with: chance is on its side, not on fxcomp's."""
    return min((each for each in contestants if each.name in HOOKS), key=lambda each: each.median_ms)


def _blocks(step_s: Sequence[float]) -> list[Sequence[float]]:
    return [step_s[first : first + BLOCK_STEPS] for first in range(0, len(step_s), BLOCK_STEPS)]


def _median_of(blocks: Sequence[Sequence[float]]) -> float:
    return statistics.median(step for block in blocks for step in block)


WIDTH = 110  # columns that the widest chart needs
_BAR = 36  # characters, for the longest step
_LEAST_BAR = 8
_FEW_STEPS = 8  # of each; with fewer nothing is compared, and one verified step could decide
_GAP = "  "
_LEAST_COST = 0.03  # of DDP's step: a network that costs less has nothing to recover


def describe(contestants: Sequence[Contestant], title: str, plan: str = "", *, width: int = WIDTH) -> str:
    """Write what was found. The chart is last, and no wider than `width` columns."""
    named = {each.name: each for each in contestants}
    hook = best_hook(contestants)
    other = next(each for each in contestants if each.name in HOOKS and each is not hook)
    shown = [named[DDP], hook, named[FXCOMP], named[FREE]]
    steps = len(named[DDP].step_s)
    compared = [f"{count(steps, 'step')} of each are too few to compare; {_FEW_STEPS} are the least."]
    if steps >= _FEW_STEPS:
        compared = [
            _against(speedup(named[FXCOMP], named[DDP]), "DDP"),
            _recovered(*(named[name] for name in (DDP, FXCOMP, FREE))),
            _against(speedup(named[FXCOMP], hook), f"{_spoken(hook)}, the faster hook here"),
        ]
    sentences = [
        *compared,
        f"{_spoken(other)} took {other.median_ms:.0f} ms a step.",
        f"fxcomp's plan: {plan}." if plan else "",
    ]
    foot = (
        f"Medians of {steps} steps, taken in turns, and what a host sent in one; losses after the same number of steps"
        " on the same batches."
    )
    return "\n".join([title, "", *filter(None, sentences), foot, "", *chart(shown, width)])


def chart(contestants: Sequence[Contestant], width: int = WIDTH) -> list[str]:
    """Draw a bar for each contestant's step, with its bytes and losses as far as `width` columns have room."""
    rows = [("", "ms a step", "", "MB sent", "train loss", "validation loss")]
    for each in contestants:
        sent = "–" if each.name == FREE else f"{each.wire_bytes / 1e6:.2f}"
        losses = ["–" if loss is None else f"{loss:.3f}" for loss in (each.train_loss, each.validation_loss)]
        rows.append((LABELS[each.name], f"{each.median_ms:.0f}", "", sent, losses[0], losses[1]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while len(widths) > 3 and _rest(widths) + _LEAST_BAR > width:
        widths.pop()
    widths[2] = max(_LEAST_BAR, min(_BAR, width - _rest(widths)))
    longest = max(each.median_ms for each in contestants)
    bars = ["", *("█" * max(round(widths[2] * each.median_ms / longest), 1) for each in contestants)]
    are_left = (True, False, True, False, False, False)
    return [
        _GAP.join(
            cell.ljust(size) if is_left else cell.rjust(size)
            for cell, size, is_left in zip((*row[:2], bar, *row[3:]), widths, are_left, strict=False)
        ).rstrip()
        for row, bar in zip(rows, bars, strict=True)
    ]


def _rest(widths: Sequence[int]) -> int:
    """Count the columns beside the bars, which are the third."""
    return sum(widths) - widths[2] + len(_GAP) * (len(widths) - 1)


def _against(found: Speedup, whom: str) -> str:
    interval = f"95 % interval {found.low:.2f} to {found.high:.2f}"
    if found.is_faster:
        return f"fxcomp makes a step {found.ratio:.2f} times as fast as {whom} ({interval})."
    if found.is_slower:
        return f"fxcomp is SLOWER here than {whom}: {found.ratio:.2f} times as fast ({interval})."
    return (
        f"fxcomp is not faster here than {whom}, as far as can be told: {found.ratio:.2f} times as fast ({interval})."
    )


def _recovered(ddp: Contestant, fxcomp: Contestant, free: Contestant) -> str:
    cost = ddp.median_ms - free.median_ms
    if cost < _LEAST_COST * ddp.median_ms:
        return "The network costs DDP next to nothing here, so there is nothing to win."
    if not speedup(fxcomp, ddp).is_faster:
        return ""
    share = 100 * (ddp.median_ms - fxcomp.median_ms) / cost
    return f"It recovers {share:.0f} % of the {cost:.0f} ms that the network costs DDP."


def _spoken(contestant: Contestant) -> str:
    return LABELS[contestant.name].replace(", ", " with the ")
