"""The demo's result: what each contestant took and learned, as a table and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass
class Contestant:
    """One way of training: `ddp`, `fxcomp`, or `free`, which never communicates."""

    name: str
    step_s: list[float] = field(default_factory=list[float])
    """Seconds of each step, of the slowest rank."""
    wire_bytes: int = 0
    """Per step and host."""
    train_loss: float | None = None
    validation_loss: float | None = None
    exposed_ms: float | None = None
    """Communication that a step waits for, where the runtime measures it."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_s) * 1e3

    @property
    def steps_per_s(self) -> float:
        return 1e3 / self.median_ms

    def summary(self) -> dict[str, object]:
        return {"median_ms": self.median_ms, "steps_per_s": self.steps_per_s, **asdict(self)}


def describe(contestants: Sequence[Contestant], where: str) -> str:
    """Write the comparison as a table and a verdict."""
    named = {each.name: each for each in contestants}
    free = named["free"]
    rows: list[tuple[str, ...]] = [
        ("", "steps/s", "exposed ms/step", "MB on the wire/step", "train loss", "validation loss")
    ]
    for each in contestants:
        exposed, sent = f"{exposed_ms(each, free):.0f}", f"{each.wire_bytes / 1e6:.2f}"
        if each is free:
            exposed = sent = "–"
        losses = ("–" if loss is None else f"{loss:.3f}" for loss in (each.train_loss, each.validation_loss))
        rows.append((each.name, f"{each.steps_per_s:.2f}", exposed, sent, *losses))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"GPT, 2 ranks, {where}", *lines, "", verdict(named["ddp"], named["fxcomp"], free)])


def verdict(ddp: Contestant, fxcomp: Contestant, free: Contestant) -> str:
    """Say whether fxcomp helped, and how much of the network's cost it recovered."""
    ratio = ddp.median_ms / fxcomp.median_ms
    cost = ddp.median_ms - free.median_ms
    if abs(ratio - 1) < 0.03:
        text = "fxcomp and DDP are as fast as each other here: the network costs too little to win anything."
    elif ratio > 1:
        text = f"fxcomp makes a step {ratio:.2f} times as fast as DDP."
    else:
        text = f"fxcomp is slower than DDP here, by {1 / ratio - 1:.0%}."
    if cost > 0.03 * ddp.median_ms:
        text += f" It recovers {(ddp.median_ms - fxcomp.median_ms) / cost:.0%} of what the network costs DDP."
    if ddp.validation_loss is not None and fxcomp.validation_loss is not None:
        text += f" The validation losses differ by {fxcomp.validation_loss - ddp.validation_loss:+.3f}."
    return text


def exposed_ms(contestant: Contestant, free: Contestant) -> float:
    """Communication that a step waits for: measured by the runtime, else the time above the free step's."""
    if contestant.exposed_ms is not None:
        return contestant.exposed_ms
    return max(contestant.median_ms - free.median_ms, 0.0)
