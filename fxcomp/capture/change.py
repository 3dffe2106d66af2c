"""A difference between the step that was captured and the present one, as reports and errors show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs between two snapshots, or two batches."""

    what: str
    before: str
    after: str
    remedy: str = "Pass it as a tensor in the batch, or keep it out of what the loss function and the model read."

    def __str__(self) -> str:
        return f"{self.what} changed from {self.before} to {self.after}"
