"""Say what a step hands to a device beside forward and backward: kernels by kind, bytes, and where the host waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxcomp.report.document import Block, Column, Table, mb

KINDS = ("pack", "encode", "collective", "decode", "check", "unpack", "clip", "update", "other")
"""The kinds of work, in the order in which a step comes to them."""


@dataclass(frozen=True, slots=True)
class Launches:
    """The work of one kind in one step."""

    launches: int = 0
    """Kernels that are started; of collectives, collectives."""
    touched_bytes: int = 0
    """Bytes of device memory that these read and write."""
    reads: int = 0
    """Values that the host asks the device for, and waits."""
    copies: int = 0
    """Other copies between host and device that the host waits for."""

    @property
    def waits(self) -> int:
        """The calls that do not return before the device has come so far."""
        return self.reads + self.copies


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """The work of one step, by kind."""

    kinds: Mapping[str, Launches]
    operators: int
    """Operators of forward and backward."""
    kernels: int
    """Kernels that Inductor is expected to make of them."""

    def of(self, kind: str) -> Launches:
        return self.kinds.get(kind, Launches())

    @property
    def total(self) -> Launches:
        """All kinds together."""
        found = self.kinds.values()
        sums = (sum(getattr(each, name) for each in found) for name in Launches.__slots__)
        return Launches(*sums)

    def lines(self) -> Iterator[str]:
        """Write the counts as plain lines."""
        yield f"forward and backward: {self.kernels} kernels, of {self.operators} operators"
        for kind, each in (*self._known, ("in all", self.total)):
            yield (
                f"{kind}: {each.launches} launches, {mb(each.touched_bytes)} MB of device memory,"
                f" {each.reads} reads by the host, {each.waits} synchronising calls"
            )

    @property
    def _known(self) -> list[tuple[str, Launches]]:
        return [(kind, self.kinds[kind]) for kind in KINDS if kind in self.kinds]

    def blocks(self) -> list[Block]:
        """Write them for a report."""
        columns = [Column("kind", is_text=True), Column("launches"), Column("device MB"), Column("host reads")]
        columns.append(Column("waits"))
        rows = [
            (kind, str(each.launches), mb(each.touched_bytes), str(each.reads), str(each.waits))
            for kind, each in (*self._known, ("in all", self.total))
        ]
        return [
            Table(columns, rows),
            f"Counted on the emitted step: its lines ran on tensors without memory. Forward and backward are"
            f" {self.kernels} kernels of {self.operators} operators, as Inductor joins them. Not counted: what a"
            " collective or a library starts inside, and whether kernels are hidden.",
        ]

    def to_json(self) -> dict[str, Any]:
        """Give the counts as data."""
        names = Launches.__slots__
        kinds = {kind: {name: getattr(each, name) for name in names} for kind, each in self._known}
        return {"operators": self.operators, "kernels": self.kernels, "kinds": kinds}
