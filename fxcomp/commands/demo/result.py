"""Hold what the demo measured: each contestant's steps, bytes and losses; compare two of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

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
