"""Say once that a value leads to another capture again and again: a job that captures at every step looks merely slow.

batch['t'] changed: 1, 2, 3, 4
"""

from __future__ import annotations

import statistics
import warnings

from fxcomp import compat
from fxcomp.capture.batch_type import Change

VALUES = 4
"""So many different values in a row are worth a word."""

SOON = 20
"""Captures follow each other in a row if not more than so many steps lie between them."""


class Recaptures:
    """The latest captures that one and the same thing led to."""

    def __init__(self) -> None:
        self._what = ""
        self._values: list[str] = []
        self._seconds: list[float] = []
        self._steps_ago = 0
        self._said: set[str] = set()

    def count_step(self) -> None:
        """Note that a step was run."""
        self._steps_ago += 1

    def add(self, change: Change, seconds: float) -> None:
        """Note a capture, what led to it and what it cost; warn if that happens again and again."""
        if change.what != self._what or self._steps_ago > SOON:
            self._what, self._values, self._seconds = change.what, [change.before], []
        self._steps_ago = 0
        self._values.append(change.after)
        self._seconds.append(seconds)
        different = list(dict.fromkeys(self._values))
        if len(different) < VALUES or change.what in self._said:
            return
        self._said.add(change.what)
        warnings.warn(
            f"fxcomp: {change.what} changed: {', '.join(different[-VALUES:])}. A compiled step takes it for a constant;"
            f" each new value captures the step again, which takes {statistics.median(self._seconds):.2g} s.\n"
            f"  {change.remedy}",
            stacklevel=compat.users_level(),
        )
