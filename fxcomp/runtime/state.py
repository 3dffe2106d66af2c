"""Keep what compression left out, and what else compressors remember; both are saved by parameter name.

Residuals are one flat arena with a slice for each bucket. Compressors' states are a tensor for each bucket, in which
the states of its parameters, or of their parts in this rank's shard, lie in order.
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
    """Where a bucket's residual lies: parameter names and sizes, and this rank's shard of the padded bucket.

    `on_host` for a compressor that runs there: its residual never crosses the bus. `divisor` is what the gradient is
    divided by before it is compressed: the number of ranks where payloads are summed on the wire.
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


class Residuals:
    """The error-feedback state of one rank, fp32, zero at first.

    Parameters lie in plan order. A sharded bucket uses only this rank's part of its slice; the rest stays zero. Saved
    residuals come with their divisors: under the same plan they load bit for bit, and any other finds their unit.
    """

    def __init__(self, layout: Sequence[BucketLayout], device: torch.device):
        self.layout = tuple(layout)
        self.arena = torch.zeros(sum(bucket.padded for bucket in layout), device=device)
        self._slices: list[Tensor] = []
        self._by_name: dict[str, Tensor] = {}
        self._divisors = {name: bucket.divisor for bucket in layout for name in bucket.names}
        offset = 0
        for bucket in layout:
            whole = self.arena[offset : offset + bucket.padded]
            if bucket.on_host and device.type != "cpu":
                whole = torch.zeros(bucket.padded, pin_memory=True)
            part = bucket.padded // bucket.shards
            self._slices.append(whole[bucket.shard * part : (bucket.shard + 1) * part])
            pieces = torch.split(whole[: sum(bucket.sizes)], list(bucket.sizes))
            for name, piece in zip(bucket.names, pieces, strict=True):
                self._by_name[name] = piece
            offset += bucket.padded

    def of_bucket(self, number: int) -> Tensor:
        """The slice that a bucket's compressor reads and replaces."""
        return self._slices[number]

    def of_parameter(self, name: str) -> Tensor:
        """A parameter's part, flat."""
        return self._by_name[name]

    @property
    def layout_hash(self) -> str:
        """A fingerprint of names and sizes, in no particular order of buckets."""
        sizes = sorted((name, piece.numel()) for name, piece in self._by_name.items())
        return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """A copy keyed by parameter name, so that another bucketing can load it."""
        return {
            "layout": self.layout_hash,
            "residuals": {name: piece.detach().clone() for name, piece in self._by_name.items()},
            "divisors": dict(self._divisors),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a saved state in. Raises BadState if it belongs to other parameters."""
        saved: Any = state.get("residuals")
        if not isinstance(state.get("residuals"), Mapping):
            raise BadState("this is not a state of a compiled step: it has no residuals")
        for name, piece in self._by_name.items():
            if name not in saved or saved[name].numel() != piece.numel():
                found = f"{saved[name].numel():,} elements" if name in saved else "nothing"
                raise BadState(
                    f"the saved residuals have {found} for {name!r}, which has {piece.numel():,} elements.\n"
                    "  Load the state of the same model, saved by the same rank."
                )
        extra = [name for name in saved if name not in self._by_name]
        if extra or state.get("layout") != self.layout_hash:
            raise BadState(f"the saved residuals are of another model: they also hold {extra[:1]}")
        divisors: Any = state.get("divisors", {})
        for name, piece in self._by_name.items():
            piece.copy_(saved[name])
            before, now = divisors.get(name, 1), self._divisors[name]
            if before != now:
                piece.mul_(before / now)


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
    value: Tensor

    def start_anew(self) -> None:
        self.value.copy_(self.compressor.fresh_state(self.size, self.key, self.rank))

    @property
    def description(self) -> dict[str, Any]:
        """What a saved state must have been made by and for, to be taken over."""
        dtype = str(self.value.dtype).removeprefix("torch.")
        return {"compressor": str(self.compressor), "size": self.size, "elements": self.value.numel(), "dtype": dtype}


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

    def state_dict(self) -> dict[str, Any]:
        """A copy keyed by parameter name, each with what made it, so that another bucketing can load it."""
        saved = {part.name: {**part.description, "state": part.value.detach().clone()} for part in self._parts}
        return {"compressors": saved, "compressor_layout": _fingerprint(saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a saved state in. A part that another compressor made starts anew, with a warning.

        Raises BadState if the state is not whole.
        """
        saved: Any = state.get("compressors", {})
        if saved and state.get("compressor_layout") != _fingerprint(saved):
            raise BadState(
                "the saved state of compressors does not match its own layout: parts of it are missing or changed.\n"
                "  Load a state as state_dict() returned it."
            )
        changed: list[str] = []
        for part in self._parts:
            known = saved.get(part.name, {})
            if {key: known.get(key) for key in part.description} == part.description:
                part.value.copy_(known["state"])
                continue
            part.start_anew()
            changed.append(f"{part.name!r}, saved by {known.get('compressor', 'nothing')}, now {part.compressor}")
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
            parts.append(_Part(name, compressor, size, key, bucket.rank, value))
    return parts


def _fingerprint(saved: Mapping[str, Any]) -> str:
    """Of names and descriptions, in no particular order of buckets."""
    keys = ("compressor", "size", "elements", "dtype")
    rows = sorted((name, [str(part.get(key)) for key in keys], part["state"].numel()) for name, part in saved.items())
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
