"""Keep what compressors remember: a tensor a bucket, with the states of its parameters or of their shards, in order."""

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
class StateLayout:
    """A bucket's compressor on this rank, bound to what it compresses, and the names and sizes of its segments.

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
        """The maker and size that a saved state must have to be taken over."""
        dtype = str(self.value.dtype).removeprefix("torch.")
        return {"compressor": str(self.compressor), "size": self.size, "elements": self.value.numel(), "dtype": dtype}

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Tell whether a saved part can go on here. A part that all ranks share must also be of the same shard."""
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

    @property
    def is_empty(self) -> bool:
        """No compressor of the plan remembers anything."""
        return not self._parts

    def of_bucket(self, number: int) -> Tensor:
        """Return the state that a bucket's compressor reads and replaces."""
        return self._buckets[number]

    def of_parameter(self, name: str) -> Tensor:
        """A parameter's part, or its part in this rank's shard."""
        return next(part.value for part in self._parts if part.name == name)

    def shared(self) -> dict[str, Tensor]:
        """Find the parts that must be the same on all ranks, by a label that is, too."""
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
