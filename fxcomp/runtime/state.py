"""Keep what compression left out, ranks' own momentum, and what else compressors remember.

Residuals and velocities are one flat arena each, with a part for each bucket that needs one. Compressors' states are a
tensor for each bucket, in which the states of its parameters, or of their parts in this rank's shard, lie in order.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors import Compressor
from fxcomp.compressors.randomness import key_of
from fxcomp.errors import BadState


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What a rank keeps of a bucket: all of its parameters, or this rank's shard of the padded bucket.

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
        """How many values this rank keeps."""
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
    """What one rank keeps for some elements of a parameter, from `start` on, and what that is of the mean gradient.

    The sum of `shards · divisor · values` over all ranks, divided by their number, is in the mean gradient's unit: a
    host's ranks share the work by `shards`, and `divisor` is what the gradient was divided by before.
    """

    values: Tensor
    start: int
    size: int
    """How many elements the whole parameter has."""
    shards: int = 1
    divisor: int = 1

    @property
    def place(self) -> tuple[int, int]:
        """Which elements of the parameter these are."""
        return self.start, self.values.numel()

    def add_to(self, mean: Tensor, ranks: int) -> None:
        """Add to a whole parameter's mean over so many ranks what this slice stands for."""
        part = mean[self.start : self.start + self.values.numel()]
        part.add_(self.values.to(mean.device), alpha=self.shards * self.divisor / ranks)

    def stand_for(self, mean: Tensor) -> None:
        """Hold what stands for a whole parameter's mean if every rank holds the same."""
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
        """What this rank keeps of a parameter, flat."""
        return self.slices[name].values


class Residuals(Arena):
    """What compression has left out on this rank, in the buckets that are fed back."""


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


# What compressors remember


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What a bucket's compressor keeps on this rank: bound to what it compresses, with the names and sizes of that.

    `rank` is this rank's place among those whose payloads are averaged, `shard` its place in the host.
    """

    compressor: Compressor
    segments: tuple[tuple[str, int], ...]
    rank: int
    shard: int = 0
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """One segment's state: whose it is, what makes it, and the tensor that a compressor changes in place."""

    name: str
    compressor: Compressor
    size: int
    key: int
    rank: int
    shard: int
    value: Tensor

    @property
    def label(self) -> str:
        """Equal on all ranks that compress the same thing."""
        return f"{self.name}, {self.size} values, key {self.key}"

    def is_shared(self) -> bool:
        """All ranks must keep the same: their payloads are summed, and nothing tells ranks apart."""
        first, second = (self.compressor.fresh_state(self.size, self.key, rank) for rank in (0, 1))
        return self.compressor.is_linear and torch.equal(first, second)

    def start_anew(self) -> None:
        self.value.copy_(self.compressor.fresh_state(self.size, self.key, self.rank))

    @property
    def description(self) -> dict[str, Any]:
        """What a saved state must have been made by and for, to be taken over."""
        dtype = str(self.value.dtype).removeprefix("torch.")
        return {"compressor": str(self.compressor), "size": self.size, "elements": self.value.numel(), "dtype": dtype}

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved part can go on here. What all ranks share must also be of the same shard."""
        is_alike = {key: saved.get(key) for key in self.description} == self.description
        return is_alike and (saved.get("shard", self.shard) == self.shard or not self.is_shared())


class CompressorStates:
    """The state of all compressors of a plan on one rank; `layout` has a bucket's number for each that has some.

    Streams of random bits come from `seed`, which all ranks share, and the parameter's name.
    """

    def __init__(self, layout: Mapping[int, StateLayout], device: torch.device, seed: int = 0):
        self._buckets: dict[int, Tensor] = {}
        self._parts: list[_Part] = []
        for number, bucket in layout.items():
            parts = _parts_of(bucket, seed)
            on_host = bucket.on_host and device.type != "cpu"
            whole = torch.cat([torch.empty(0, dtype=bucket.compressor.facts.state_dtype), *(p.value for p in parts)])
            whole = whole.pin_memory() if on_host else whole.to(device)
            self._buckets[number] = whole
            pieces = torch.split(whole, [part.value.numel() for part in parts])
            self._parts += [replace(part, value=piece) for part, piece in zip(parts, pieces, strict=True)]

    def of_bucket(self, number: int) -> Tensor:
        """What a bucket's compressor reads and replaces."""
        return self._buckets[number]

    def of_parameter(self, name: str) -> Tensor:
        """A parameter's part, or its part in this rank's shard."""
        return next(part.value for part in self._parts if part.name == name)

    def shared(self) -> dict[str, Tensor]:
        """What must be the same on all ranks, by a label that is, too."""
        return {part.label: part.value for part in self._parts if part.is_shared()}

    def take_over(self, other: CompressorStates) -> None:
        """Go on from another plan's states, where the same compressor keeps the same; the rest starts anew."""
        known = {part.name: part for part in other._parts}
        for part in self._parts:
            before = known.get(part.name)
            if before is not None and before.description == part.description and before.key == part.key:
                part.value.copy_(before.value)

    def state_dict(self) -> dict[str, Any]:
        """A copy keyed by parameter name, each with what made it, so that another bucketing can load it."""
        saved = {
            part.name: {**part.description, "shard": part.shard, "state": part.value.detach().clone()}
            for part in self._parts
        }
        return {"compressors": saved, "compressor_layout": _fingerprint(saved)}

    def take_back(self, states: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Copy in what the first of these states has that fits. What nothing fits starts anew, and is returned: what
        was found instead, by label, empty where nothing is lost. Raises BadState if a state is not whole.
        """
        for state in states:
            saved = state.get("compressors", {})
            if saved and state.get("compressor_layout") != _fingerprint(saved):
                raise BadState(
                    "the saved state of compressors does not match its own layout: parts of it are missing or changed."
                    "\n  Load a state as state_dict() returned it."
                )
        anew: dict[str, str] = {}
        for part in self._parts:
            known = [state["compressors"].get(part.name, {}) for state in states if "compressors" in state]
            fitting = next((saved for saved in known if part.fits(saved)), None)
            if fitting is not None:
                part.value.copy_(fitting["state"])
                continue
            part.start_anew()
            makers = [saved["compressor"] for saved in known if saved] or ["nothing"] * (len(states) - len(known))
            anew[part.label] = f"{part.name!r}, saved by {makers[0]}, now {part.compressor}" if makers else ""
        return anew

    def tell(self, anew: Mapping[str, str]) -> None:
        """Warn of what was remembered and starts anew."""
        changed = [found for found in anew.values() if found]
        if changed:
            warnings.warn(
                f"fxcomp: what compressors remember of {len(changed)} of {len(self._parts)} parameters starts anew:"
                f" {changed[0]}{' and others' if len(changed) > 1 else ''}.",
                stacklevel=2,
            )


def _parts_of(bucket: StateLayout, seed: int) -> list[_Part]:
    """Fresh states, segment by segment. Shards of one parameter draw from streams of their own."""
    parts: list[_Part] = []
    for index, (name, size) in enumerate(bucket.segments):
        key = key_of(seed, name, bucket.shard) if bucket.shard else key_of(seed, name)
        compressor = bucket.compressor.of_segment(index)
        if compressor.state_elements(size):
            value = compressor.fresh_state(size, key, bucket.rank)
            parts.append(_Part(name, compressor, size, key, bucket.rank, bucket.shard, value))
    return parts


def _fingerprint(saved: Mapping[str, Any]) -> str:
    """Of names and descriptions, in no particular order of buckets."""
    keys = ("compressor", "size", "elements", "dtype")
    rows = sorted((name, [str(part.get(key)) for key in keys], part["state"].numel()) for name, part in saved.items())
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
