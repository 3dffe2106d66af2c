"""Keep residuals in one flat arena, with a part for each slot of a bucket that needs one.

A bucket has a slot for each time that its strategy compresses. Two shots compress twice, so a rank keeps two residuals:
of its own gradients, and of the mean of the shard that it owns. What is kept is named by parameter:

    bucket   a[0:6] b[0:3] c[0:7]
    [4, 11)  a[4:6] b[0:3] c[0:2]
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a parameter."""

    name: str
    start: int
    """The first one's place in the parameter."""
    length: int
    size: int
    """The number of elements of the whole parameter."""
    index: int = 0
    """The number of the parameter in its bucket."""

    @property
    def extent(self) -> range:
        """The places of those that are the parameter's: padding lies after its end."""
        return range(min(self.start, self.size), min(self.start + self.length, self.size))

    @property
    def is_whole(self) -> bool:
        return self.length == self.size


def parts_in(bucket: Sequence[Part], pieces: Sequence[range]) -> tuple[Part, ...]:
    """Cut ranges of a bucket's values into parts of parameters, in order; empty ones are left out."""
    return tuple(part for piece in pieces for part in _parts_in(bucket, piece))


def _parts_in(bucket: Sequence[Part], piece: range) -> list[Part]:
    found: list[Part] = []
    offset = 0
    for part in bucket:
        first, last = max(piece.start, offset), min(piece.stop, offset + part.length)
        if first < last:
            found.append(replace(part, start=part.start + first - offset, length=last - first))
        offset += part.length
    return found


Key = tuple[int, int]
"""The number of a bucket, and of a slot in it."""

ONE = Fraction(1)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The values that a rank keeps for one slot of a bucket: those of `pieces`, one after the other.

    `on_host` for a compressor that runs there: what it keeps never crosses the bus. `weight`, `total` and `place` are
    those of a Slice.
    """

    bucket: tuple[Part, ...]
    """All parts of parameters in the bucket."""
    pieces: tuple[range, ...]
    slot: int = 0
    place: int = 0
    weight: Fraction = ONE
    total: Fraction = ONE
    takes_over: bool = True
    """The first slot of its bucket: what is handed over goes into it."""
    on_host: bool = False

    @property
    def elements(self) -> int:
        """The number of values that this rank keeps."""
        return sum(map(len, self.pieces))

    def slices(self, kept: Tensor) -> list[tuple[str, Slice]]:
        """Cut what this rank keeps into parts of parameters, each with its parameter's name, without padding."""
        parts = parts_in(self.bucket, self.pieces)
        pairs = zip(parts, torch.split(kept, [part.length for part in parts]), strict=True)
        return [(part.name, self._slice(part, values[: len(part.extent)])) for part, values in pairs if part.extent]

    def _slice(self, part: Part, values: Tensor) -> Slice:
        return Slice(values, part.start, part.size, self.slot, self.place, self.weight, self.total, self.takes_over)


@dataclass(frozen=True, slots=True)
class Slice:
    """The values that one rank keeps for some elements of a parameter, from `start` on, and their unit.

    Together the ranks hold the sum of `weight · values` over all ranks and slots, in the mean gradient's unit.
    """

    values: Tensor
    start: int
    size: int
    """The number of elements of the whole parameter."""
    slot: int = 0
    place: int = 0
    """This rank's number among those that keep other values for the same elements; equal numbers, equal values."""
    weight: Fraction = ONE
    total: Fraction = ONE
    """The sum of the weights of all ranks that keep something for one element."""
    takes_over: bool = True
    """The slots that take the mean that is handed over; other slots start at zero."""

    @property
    def extent(self) -> range:
        """The range of the parameter's elements."""
        return range(self.start, self.start + self.values.numel())

    def lies_like(self, other: Slice) -> bool:
        """Return whether as many ranks share the same elements in the same way: values can go on from the other's."""
        is_same_place = (self.slot, self.place, self.extent) == (other.slot, other.place, other.extent)
        return is_same_place and self.total * other.weight == other.total * self.weight

    def add_to(self, mean: Tensor, times: int = 1) -> None:
        """Add to a whole parameter's mean what this slice stands for, so many times."""
        part = mean[self.start : self.extent.stop]
        part.add_(self.values.to(mean.device), alpha=float(self.weight * times))

    def stand_for(self, mean: Tensor) -> None:
        """Hold the values that stand for a whole parameter's mean if every rank does the same."""
        if not self.takes_over:
            self.values.zero_()
            return
        self.values.copy_(mean[self.start : self.extent.stop])
        if self.total != 1:
            self.values.div_(float(self.total))

    def go_on_from(self, other: Slice) -> None:
        """Hold what another slice of the same elements holds, in this one's unit."""
        self.values.copy_(other.values)
        if self.weight != other.weight:
            self.values.mul_(float(other.weight / self.weight))


class Arena:
    """An fp32 value, zero at first, for each element that this rank keeps of the slots in `layout`: its residuals.

    Slots that need nothing are not in the layout and take no memory.
    """

    def __init__(self, layout: Mapping[Key, SlotLayout], device: torch.device):
        self.layout = dict(layout)
        self.device = device
        self._kept: dict[Key, Tensor] = {}
        apart = {key for key, slot in layout.items() if slot.on_host and device.type != "cpu"}
        self.arena = torch.zeros(sum(s.elements for key, s in layout.items() if key not in apart), device=device)
        slices: defaultdict[str, list[Slice]] = defaultdict(list)
        offset = 0
        for key, slot in layout.items():
            if key in apart:
                kept = torch.zeros(slot.elements, pin_memory=True)
            else:
                kept = self.arena[offset : offset + slot.elements]
                offset += slot.elements
            self._kept[key] = kept
            for name, piece in slot.slices(kept):
                slices[name].append(piece)
        self.slices: dict[str, tuple[Slice, ...]] = {name: tuple(pieces) for name, pieces in slices.items()}
        """Of each parameter, what this rank keeps in the arena now."""
        self.covered = _covered(self.layout)
        """Of each parameter, the elements that some rank keeps something for."""

    @property
    def is_zero(self) -> bool:
        """Nothing is kept. Waits for the device."""
        return not any(bool(kept.any()) for kept in self._kept.values())

    @property
    def norm(self) -> float:
        """The root of the sum of squares of all that is kept here. Waits for the device."""
        return math.sqrt(sum(float(kept.double().square().sum()) for kept in self._kept.values()))

    def of(self, bucket: int, slot: int = 0) -> Tensor:
        """The values that a bucket reads and replaces."""
        return self._kept[bucket, slot]


def _covered(layout: Mapping[Key, SlotLayout]) -> dict[str, tuple[range, ...]]:
    covered: defaultdict[str, list[range]] = defaultdict(list)
    for slot in layout.values():
        if slot.takes_over:
            for part in slot.bucket:
                covered[part.name].append(part.extent)
    return {name: tuple(extents) for name, extents in covered.items()}
