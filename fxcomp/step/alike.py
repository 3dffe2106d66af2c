"""Compare numbers and options of the optimizers' parameter groups between ranks in every step.

Without this check replicas would drift apart, for example if a rank schedules its learning rate by its own loss. A
digest of the values is sent with a collective of the step (`runtime/rider.py`). If digests differ, ranks exchange the
values through the store. All ranks raise an error if the values differ.

A rank that captures a new kind of batch changes its digest on purpose, so that all ranks verify the same later step
(`verified_after`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

from fxcomp.capture.training import Training
from fxcomp.cluster.cluster import Level
from fxcomp.codegen.program import Program
from fxcomp.errors import ReplicasDiffer
from fxcomp.runtime.rider import LATE, Rider
from fxcomp.runtime.runtime import Runtime
from fxcomp.site import Site

WHAT_TO_DO = (
    "  Set the same value on every rank: give schedulers and rules the same input, such as a loss averaged over all"
    " ranks\n  (torch.distributed.all_reduce), or set the value on rank 0 and broadcast it."
)

_UPDATED = {
    False: "no parameter had been updated yet; buffers and residuals may have",
    True: "some parameters had been updated: load a state on all ranks before you go on",
}

VERIFIED_AFTER = 2 * LATE + 1
"""Number of steps from a new capture to the step that all ranks verify. By then all ranks know of the capture.

With two levels, the digest crosses one level after the other, each up to LATE steps late.
"""

SELDOM = 50
"""Minimum number of steps between two verified steps that follow new captures."""

_CAPTURED, _DIGEST = "captured in step", "digest"

Numbers = Sequence[Mapping[str, float]]
"""Numbers of each parameter group that are inputs of the program, such as `lr`."""


class Alike:
    """Optimizer numbers and options of this rank, and the `Rider` that sends their digest."""

    def __init__(self, training: Training, site: Site) -> None:
        self._training, self._site = training, site
        self._numbers: Numbers = ()
        self._options: Sequence[Hashable] = ()
        self._check_of_options = self._check = self._step = 0
        self._captured: int | None = None
        """Step of the announced capture, on this or another rank."""
        self._runtime: Runtime | None = None
        self.rider = Rider(self._differ)

    def begin(
        self, step: int, program: Program, runtime: Runtime, numbers: Numbers, options: Sequence[Hashable]
    ) -> None:
        """Set the numbers and the compiled-in options that this step compares between ranks."""
        self._step, self._runtime = step, runtime
        self.rider.begin(program.carriers)
        if options != self._options:
            self._options, self._numbers = options, ()
            self._check_of_options = zlib.crc32(repr(_digestible(options)).encode())
        if numbers != self._numbers:
            self._numbers = numbers
            values = [value + 0.0 for group in numbers for value in group.values()]  # their names are in the options
            self._check = zlib.crc32(struct.pack(f"{len(values)}d", *values), self._check_of_options)
        if self._captured is not None and step >= self._captured + SELDOM:
            self._captured = None
        self._carry()
        runtime.rider, runtime.gradients.are_applied = self.rider, False

    def note_capture(self) -> None:
        """Announce a new capture to the other ranks, unless one is announced already."""
        if self._captured is None:
            self._captured = self._step
            self._carry()

    @property
    def verified_after(self) -> int | None:
        return None if self._captured is None else self._captured + VERIFIED_AFTER

    def _carry(self) -> None:
        is_told = self._captured is not None and self._step < self._captured + VERIFIED_AFTER
        digest = self._check ^ (zlib.crc32(b"%d" % self._captured) if is_told and self._captured is not None else 0)
        if digest != self.rider.digest:
            self.rider.carry(digest)

    def facts(self) -> dict[str, Any]:
        """Return all compared values of this rank."""
        facts: dict[str, Any] = {}
        for group, (numbers, (options, _)) in enumerate(zip(self._numbers, cast("Any", self._options), strict=True)):
            facts |= {f"{name} in parameter group {group}": value for name, value in numbers.items()}
            facts |= {f"{name} in parameter group {group}": _plain(value) for name, value in options}
        return facts

    def _differ(self, level: str, late: int) -> None:
        """Handle digests that differ in a group of `level`: record another rank's capture, or raise ReplicasDiffer."""
        ranks = self._site.ranks
        groups = self._site.cluster.groups(Level(level))
        members = next(tuple(group) for group in groups if ranks.rank in group)
        mine = {**self.facts(), _DIGEST: self._check, _CAPTURED: self._captured}
        told = ranks.tell("comparing the optimizers' numbers", mine, members, f"{level}/{self._step}")
        captured = [step for each in told.values() if (step := each.pop(_CAPTURED)) is not None]
        digests = {each.pop(_DIGEST) for each in told.values()}
        if captured and len(digests) == 1:
            self._captured = min(captured)
            self._carry()
            return
        assert self._runtime is not None, "a step is under way"
        has_changed = late > 0 or self._runtime.gradients.are_applied
        error = ReplicasDiffer(
            f"{_first_difference(told)}: replicas would drift apart.\n{WHAT_TO_DO}\n"
            f"  It was found in step {self._step}, where {_UPDATED[has_changed]}."
        )
        error.is_everywhere = len(members) == ranks.world_size
        raise error


def _first_difference(told: Mapping[int, Mapping[str, Any]]) -> str:
    first, *others = told
    for rank in others:
        for name in {**told[first], **told[rank]}:
            mine, theirs = (told[each].get(name, "nothing") for each in (first, rank))
            if mine != theirs:
                what, _, where = name.partition(" in ")
                return f"rank {rank} has {what} {theirs} in {where}, rank {first} has {mine}"
    return f"the optimizers of ranks {', '.join(map(str, told))} compute with different numbers"


def _plain(value: Any) -> Any:
    """Remove `id`s, which stand for tensors and long collections, because they differ between processes."""
    if not isinstance(value, tuple):
        return value
    items = cast("tuple[Any, ...]", value)
    if len(items) == 2 and isinstance(items[0], str) and isinstance(items[1], int) and items[1] > 1 << 20:
        return items[0]
    return tuple(map(_plain, items))


def _digestible(options: Sequence[Any]) -> Any:
    """Sort options, and map equal numbers (0, 0.0, False) to one form."""
    return [(sorted((name, _text(_plain(value))) for name, value in own), live) for own, live in options]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return str(list(map(_text, cast("tuple[Any, ...]", value))))
    return repr(float(value) + 0.0 if isinstance(value, int | float) else value)
