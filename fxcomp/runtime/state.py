"""Keep what compression left out, ranks' own momentum, and what else compressors remember; all saved by parameter name.

Residuals and velocities are one flat arena each, with a slice for each bucket. Compressors' states are a tensor for
each bucket, in which the states of its parameters, or of their parts in this rank's shard, lie in order.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
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


class Arena:
    """An fp32 value for each element of all buckets, zero at first.

    Parameters lie in plan order. A sharded bucket uses only this rank's part of its slice; the rest stays zero.
    """

    def __init__(self, layout: Sequence[BucketLayout], device: torch.device):
        self.layout = tuple(layout)
        self.arena = torch.zeros(sum(bucket.padded for bucket in layout), device=device)
        self._wholes: list[Tensor] = []
        self._slices: list[Tensor] = []
        self._by_name: dict[str, Tensor] = {}
        self._bucket_of: dict[str, BucketLayout] = {}
        offset = 0
        for bucket in layout:
            whole = self.arena[offset : offset + bucket.padded]
            if bucket.on_host and device.type != "cpu":
                whole = torch.zeros(bucket.padded, pin_memory=True)
            self._wholes.append(whole)
            part = bucket.padded // bucket.shards
            self._slices.append(whole[bucket.shard * part : (bucket.shard + 1) * part])
            pieces = torch.split(whole[: sum(bucket.sizes)], list(bucket.sizes))
            for name, piece in zip(bucket.names, pieces, strict=True):
                self._by_name[name] = piece
                self._bucket_of[name] = bucket
            offset += bucket.padded

    def of_bucket(self, number: int) -> Tensor:
        """The slice that a bucket reads and replaces."""
        return self._slices[number]

    def of_parameter(self, name: str) -> Tensor:
        """A parameter's part, flat."""
        return self._by_name[name]

    @property
    def layout_hash(self) -> str:
        """A fingerprint of names and sizes, in no particular order of buckets."""
        sizes = sorted((name, piece.numel()) for name, piece in self._by_name.items())
        return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]

    def mean_of(self, names: Sequence[str], all_reduce: Callable[[Tensor], None], ranks: int) -> dict[str, Tensor]:
        """What parameters' parts stand for together: the mean over all ranks, in the gradient's unit; all call it."""
        if not names:
            return {}
        parts: list[Tensor] = []
        for name in names:
            bucket = self._bucket_of[name]
            parts.append(self.of_parameter(name).to(self.arena.device) * (bucket.shards * bucket.divisor / ranks))
        mean = torch.cat(parts)
        all_reduce(mean)
        return dict(zip(names, torch.split(mean, [part.numel() for part in parts]), strict=True))

    def _place(self, name: str) -> list[int]:
        """Which part of a parameter this rank has."""
        bucket = self._bucket_of[name]
        offset = sum(bucket.sizes[: bucket.names.index(name)])
        return [bucket.shards, bucket.shard, offset, bucket.padded] if bucket.shards > 1 else [1, 0, 0, 0]

    def _set_mean(self, means: Mapping[str, Tensor]) -> None:
        """Make parameters' parts what stands for a mean over all ranks on each of them."""
        for name, part in means.items():
            self.of_parameter(name).copy_(part).div_(self._bucket_of[name].divisor)

    def _clear_other_shards(self) -> None:
        for bucket, whole, own in zip(self.layout, self._wholes, self._slices, strict=True):
            part = len(own)
            whole[: bucket.shard * part].zero_()
            whole[(bucket.shard + 1) * part :].zero_()


class Residuals(Arena):
    """The error-feedback state of one rank.

    Saved residuals come with their divisors: under the same plan they load bit for bit, and any other finds their unit.
    """

    def take_out(self, names: Sequence[str], all_reduce: Callable[[Tensor], None], ranks: int) -> dict[str, Tensor]:
        """What was left out of parameters, flat and in the gradient's unit; nothing is left here. All ranks call it.

        Added to the ranks' next gradients, it arrives: a whole bucket's as it is, a shard's as the mean over the ranks.
        """
        whole = [name for name in names if self._bucket_of[name].shards == 1]
        cut = [name for name in names if self._bucket_of[name].shards > 1]
        taken = {name: self.of_parameter(name) * self._bucket_of[name].divisor for name in whole}
        taken |= self.mean_of(cut, all_reduce, ranks)
        for name in names:
            self.of_parameter(name).zero_()
        return {name: taken[name].to(self.arena.device) for name in names}

    def take_over(self, other: Residuals, all_reduce: Callable[[Tensor], None], ranks: int) -> None:
        """Go on from what another plan has left out; all ranks call it.

        A parameter that lies as it did keeps this rank's own. Of one that is shared otherwise among the host's ranks,
        every rank gets the mean over all, so that the sum over the ranks stays what it was.
        """
        moved: list[str] = []
        for name, piece in self._by_name.items():
            if other._place(name) != self._place(name):
                moved.append(name)
                continue
            before, now = other._bucket_of[name].divisor, self._bucket_of[name].divisor
            piece.copy_(other.of_parameter(name))
            if before != now:
                piece.mul_(before / now)
        self._set_mean(other.mean_of(moved, all_reduce, ranks))
        self._clear_other_shards()

    def state_dict(self) -> dict[str, Any]:
        """A copy keyed by parameter name, so that another bucketing can load it."""
        return {
            "layout": self.layout_hash,
            "residuals": {name: piece.detach().clone() for name, piece in self._by_name.items()},
            "divisors": {name: bucket.divisor for name, bucket in self._bucket_of.items()},
            "shards": {name: bucket.shards for name, bucket in self._bucket_of.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a saved state in. Raises BadState if it belongs to other parameters.

        Where a plan shares a parameter otherwise among the host's ranks, a part is lost, with a warning.
        """
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
            before, now = divisors.get(name, 1), self._bucket_of[name].divisor
            if before != now:
                piece.mul_(before / now)
        shards: Any = state.get("shards", {})
        cut = [n for n, b in self._bucket_of.items() if shards.get(n, b.shards) != b.shards and saved[n].any()]
        if cut:
            warnings.warn(
                f"fxcomp: what compression left out of {len(cut)} of {len(self._by_name)} parameters, {cut[0]!r} first,"
                " was saved by a plan that shares them otherwise among the host's ranks: a part of it is dropped.",
                stacklevel=2,
            )


class Velocities(Arena):
    """The momentum of one rank's own gradients, or in a sharded bucket of its host's mean, in the buckets' units.

    The mean over all ranks is the momentum of the mean gradient, whatever the buckets.
    """

    def take_over(self, other: Velocities) -> None:
        """Go on from where another plan, with the same shards, has come on this rank."""
        for name, piece in self._by_name.items():
            old, new = other._bucket_of[name], self._bucket_of[name]
            assert (old.shards, old.shard) == (new.shards, new.shard), f"{name!r} would change hands between ranks"
            piece.copy_(other.of_parameter(name)).mul_(old.divisor / new.divisor)

    def take_over_mean(self, other: Velocities, all_reduce: Callable[[Tensor], None], ranks: int) -> None:
        """Go on from the mean over all ranks of another plan's velocities; all ranks call it."""
        self._set_mean(other.mean_of(list(self._by_name), all_reduce, ranks))
        self._clear_other_shards()

    def state_dict(self) -> dict[str, Any]:
        """A copy keyed by parameter name, with its divisor and the shard that it is of."""
        return {"velocities": {name: self._described(name) for name in self._by_name}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a saved state in. Raises BadState if it belongs to other parameters.

        Whole velocities go on in other buckets as they were. A shard's stand for nothing outside of it, and where whole
        ones become a shard's, this rank's own stand for its host's mean; both with a warning.
        """
        saved: Any = state.get("velocities")
        if not saved:
            for whole in self._wholes:
                whole.zero_()
            warnings.warn(
                "fxcomp: the state was saved without momentum correction: velocities start at zero.", stacklevel=2
            )
            return
        sizes = {name: part["value"].numel() for name, part in saved.items()}
        if sizes != {name: piece.numel() for name, piece in self._by_name.items()}:
            differ = sorted(set(sizes) ^ set(self._by_name)) or [
                n for n in sizes if sizes[n] != self._by_name[n].numel()
            ]
            raise BadState(
                f"the saved velocities are of another model: they differ in {differ[0]!r}.\n"
                "  Load the state of the same model, saved by the same rank."
            )
        changed: list[str] = []
        for name, piece in self._by_name.items():
            part, new = saved[name], self._bucket_of[name]
            shards = int(part["shards"]) if new.shards == 1 else 1
            factor = shards * int(part["divisor"]) / new.divisor
            piece.copy_(part["value"])
            if factor != 1:
                piece.mul_(factor)
            if new.shards > 1 and part["place"] != self._place(name):
                changed.append(name)
        self._clear_other_shards()
        if changed:
            warnings.warn(
                f"fxcomp: velocities of {len(changed)} of {len(self._by_name)} parameters, {changed[0]!r} first, were"
                " saved by a plan that shares them otherwise among the host's ranks: they go on approximately.",
                stacklevel=2,
            )

    def _described(self, name: str) -> dict[str, Any]:
        bucket = self._bucket_of[name]
        value = self.of_parameter(name).detach().clone()
        return {"value": value, "divisor": bucket.divisor, "shards": bucket.shards, "place": self._place(name)}


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
