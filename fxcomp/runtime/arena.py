"""Residuals of a rank in one flat tensor, the arena, with a range for each slot with error feedback.

A slot is one compression of a bucket: two-shot strategies also compress the mean of a rank's shard.
A slot that covers elements [4, 11) of a bucket is split by parameter:

    bucket   a[0:6] b[0:3] c[0:7]
    slot     a[4:6] b[0:3] c[0:2]
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
    name: str
    start: int
    """Index of the first element in the parameter."""
    length: int
    size: int
    """Elements of the whole parameter."""
    index: int = 0
    """Index of the parameter in its bucket."""

    @property
    def extent(self) -> range:
        """Range of indices in the flat parameter, without padding."""
        return range(min(self.start, self.size), min(self.start + self.length, self.size))

    @property
    def is_whole(self) -> bool:
        return self.length == self.size


def parts_in(bucket: Sequence[Part], pieces: Sequence[range]) -> tuple[Part, ...]:
    """Split ranges of a bucket into non-empty parts of parameters, in order."""
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
"""Bucket index, slot index."""

ONE = Fraction(1)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Residual layout of one slot on one rank. The slot concatenates the ranges `pieces` of a bucket.

    `on_host` is True if the compressor runs on the host. For the other attributes, see Slice.
    """

    bucket: tuple[Part, ...]
    pieces: tuple[range, ...]
    slot: int = 0
    place: int = 0
    weight: Fraction = ONE
    total: Fraction = ONE
    takes_over: bool = True
    """True for the bucket's first slot with error feedback."""
    on_host: bool = False

    @property
    def elements(self) -> int:
        return sum(map(len, self.pieces))

    def slices(self, kept: Tensor) -> list[tuple[str, Slice]]:
        """Split the slot's values into (parameter name, slice), without padding."""
        parts = parts_in(self.bucket, self.pieces)
        pairs = zip(parts, torch.split(kept, [part.length for part in parts]), strict=True)
        return [(part.name, self._slice(part, values[: len(part.extent)])) for part, values in pairs if part.extent]

    def _slice(self, part: Part, values: Tensor) -> Slice:
        return Slice(values, part.start, part.size, self.slot, self.place, self.weight, self.total, self.takes_over)


@dataclass(frozen=True, slots=True)
class Slice:
    """Residual of one rank for consecutive elements of a parameter, and its weight.

    The total residual, in units of the mean gradient, is the sum of `weight · values` over all ranks and slots.
    """

    values: Tensor
    start: int
    size: int
    slot: int = 0
    place: int = 0
    """Index of this rank among the ranks with different values of the same elements."""
    weight: Fraction = ONE
    total: Fraction = ONE
    """Sum of the weights of all ranks for one element."""
    takes_over: bool = True
    """True if the slot receives the residuals of an earlier plan, False if it starts at zero."""

    @property
    def extent(self) -> range:
        return range(self.start, self.start + self.values.numel())

    def lies_like(self, other: Slice) -> bool:
        """Return whether another slice has the same elements, slot, place, and share of the total weight."""
        is_same_place = (self.slot, self.place, self.extent) == (other.slot, other.place, other.extent)
        return is_same_place and self.total * other.weight == other.total * self.weight

    def add_to(self, mean: Tensor, times: int = 1) -> None:
        """Add `times * weight * values` to a parameter's mean residual."""
        part = mean[self.start : self.extent.stop]
        part.add_(self.values.to(mean.device), alpha=float(self.weight * times))

    def stand_for(self, mean: Tensor) -> None:
        """Set values whose weighted sum over all ranks is the residual `mean`; zeros unless `takes_over`."""
        if not self.takes_over:
            self.values.zero_()
            return
        self.values.copy_(mean[self.start : self.extent.stop])
        if self.total != 1:
            self.values.div_(float(self.total))

    def go_on_from(self, other: Slice) -> None:
        """Copy another slice of the same elements, rescaled to this slice's weight."""
        self.values.copy_(other.values)
        if self.weight != other.weight:
            self.values.mul_(float(other.weight / self.weight))


class Arena:
    """Residuals of this rank: an fp32 value, initially zero, per element of the slots in `layout`."""

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
        self.covered = _covered(self.layout)
        """Ranges of elements for which any rank keeps residuals, by parameter."""

    @property
    def is_zero(self) -> bool:
        """True if all residuals are zero. Synchronises with the device."""
        return not any(bool(kept.any()) for kept in self._kept.values())

    @property
    def norm(self) -> float:
        """L2 norm of all residuals. Synchronises with the device."""
        return math.sqrt(sum(float(kept.double().square().sum()) for kept in self._kept.values()))

    def of(self, bucket: int, slot: int = 0) -> Tensor:
        return self._kept[bucket, slot]


def _covered(layout: Mapping[Key, SlotLayout]) -> dict[str, tuple[range, ...]]:
    covered: defaultdict[str, list[range]] = defaultdict(list)
    for slot in layout.values():
        if slot.takes_over:
            for part in slot.bucket:
                covered[part.name].append(part.extent)
    return {name: tuple(extents) for name, extents in covered.items()}
