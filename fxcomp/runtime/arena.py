"""Keep residuals and velocities: one flat arena each, with a part for each bucket that needs one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The part of a bucket that a rank keeps: all of it, or this rank's shard of the padded bucket.

    `on_host` for a compressor that runs there: what it keeps never crosses the bus. `divisor` is what the gradient is
    divided by before: the number of ranks where buckets or payloads are summed on the wire.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shards: int = 1
    shard: int = 0
    on_host: bool = False
    divisor: int = 1

    @property
    def padded(self) -> int:
        return sum(self.sizes) + -sum(self.sizes) % self.shards

    @property
    def elements(self) -> int:
        """The number of values that this rank keeps."""
        return self.padded // self.shards

    def slices(self, kept: Tensor) -> dict[str, Slice]:
        """Each parameter's part of what this rank keeps; an empty one of what lies in other shards."""
        found: dict[str, Slice] = {}
        first, offset = self.shard * self.elements, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            start = max(first, offset)
            stop = max(start, min(first + self.elements, offset + size))
            here = start - offset if stop > start else 0
            found[name] = Slice(kept[start - first : stop - first], here, size, self.shards, self.divisor)
            offset += size
        return found


@dataclass(frozen=True, slots=True)
class Slice:
    """The values that one rank keeps for some elements of a parameter, from `start` on, and their unit.

    The sum of `shards · divisor · values` over all ranks, divided by their number, is in the mean gradient's unit: a
    host's ranks share the work by `shards`, and `divisor` is what the gradient was divided by before.
    """

    values: Tensor
    start: int
    size: int
    """The number of elements of the whole parameter."""
    shards: int = 1
    divisor: int = 1

    @property
    def place(self) -> tuple[int, int]:
        """The range of the parameter's elements: start and length."""
        return self.start, self.values.numel()

    def add_to(self, mean: Tensor, ranks: int) -> None:
        """Add to a whole parameter's mean over so many ranks what this slice stands for."""
        part = mean[self.start : self.start + self.values.numel()]
        part.add_(self.values.to(mean.device), alpha=self.shards * self.divisor / ranks)

    def stand_for(self, mean: Tensor) -> None:
        """Hold the values that stand for a whole parameter's mean if every rank holds the same."""
        self.values.copy_(mean[self.start : self.start + self.values.numel()])
        if self.divisor != 1:
            self.values.div_(self.divisor)

    def go_on_from(self, other: Slice) -> None:
        """Hold what another slice of the same elements holds, in this one's unit."""
        self.values.copy_(other.values)
        if self.divisor != other.divisor:
            self.values.mul_(other.divisor / self.divisor)


class Arena:
    """An fp32 value, zero at first, for each element that this rank keeps of the buckets in `layout`, by their number.

    Buckets that need nothing are not in the layout and take no memory.
    """

    def __init__(self, layout: Mapping[int, BucketLayout], device: torch.device):
        self.layout = dict(layout)
        self.device = device
        self.slices: dict[str, Slice] = {}
        """Of each parameter, what lies in the arena now."""
        self._buckets: dict[int, Tensor] = {}
        apart = {number for number, bucket in layout.items() if bucket.on_host and device.type != "cpu"}
        self.arena = torch.zeros(sum(b.elements for n, b in layout.items() if n not in apart), device=device)
        offset = 0
        for number, bucket in layout.items():
            if number in apart:
                kept = torch.zeros(bucket.elements, pin_memory=True)
            else:
                kept = self.arena[offset : offset + bucket.elements]
                offset += bucket.elements
            self._buckets[number] = kept
            self.slices |= bucket.slices(kept)

    def of_bucket(self, number: int) -> Tensor:
        """The slice that a bucket reads and replaces."""
        return self._buckets[number]

    def of_parameter(self, name: str) -> Tensor:
        """Return what this rank keeps of a parameter, flat."""
        return self.slices[name].values


class Residuals(Arena):
    """The residuals of this rank: what compression has left out, in the buckets that are fed back."""


class Velocities(Arena):
    """The momentum of one rank's own gradients, or in a sharded bucket of its host's mean, in the buckets' units.

    The mean over all ranks is the momentum of the mean gradient, whatever the buckets.
    """

    def take_over(self, other: Velocities) -> None:
        """Go on from where another plan, with the same shards, has come on this rank."""
        for name, piece in self.slices.items():
            assert piece.place == other.slices[name].place, f"{name!r} would change hands between ranks"
            piece.go_on_from(other.slices[name])

    def forget(self, name: str, value: Tensor) -> None:
        """Take out what every rank has added to its own gradient of a parameter: it was no gradient of this step."""
        piece = self.slices[name]
        part = value[piece.start : piece.start + piece.values.numel()]
        piece.values.sub_(part.to(piece.values.device), alpha=1 / piece.divisor)
