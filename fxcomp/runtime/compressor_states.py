"""State of compressors. One tensor per slot (compression of a bucket) concatenates the states of parameters' parts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors import Compressor
from fxcomp.compressors.randomness import key_of
from fxcomp.runtime.arena import Key, Part


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Compressor of one slot on this rank, and parts of parameters, each with the compressor bound to the part.

    `place` is this rank's index among the ranks that compress different values of the same parts.
    """

    compressor: Compressor
    parts: tuple[tuple[Part, Compressor], ...]
    place: int = 0
    slot: int = 0
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class _PartState:
    part: Part
    compressor: Compressor
    slot: int
    place: int
    key: int
    value: Tensor

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def label(self) -> str:
        """Name that is equal on all ranks with the same state."""
        of_whom = "" if self.is_shared() else f", slot {self.slot} from {self.part.start} on, place {self.place}"
        return f"{self.name}, {self.part.length} values, key {self.key}{of_whom}"

    @property
    def where(self) -> tuple[str, int, int]:
        return self.name, self.slot, self.part.start

    def is_shared(self) -> bool:
        """Return whether payloads are summed and fresh state ignores the rank. Then all ranks need equal state."""
        first, second = (self.compressor.fresh_state(self.part.length, self.key, place) for place in (0, 1))
        return self.compressor.is_linear and torch.equal(first, second)

    def go_on_from(self, other: _PartState) -> bool:
        """Copy another plan's state if compressor type, random stream and place match. Return True if copied."""
        is_same = type(other.compressor) is type(self.compressor) and other.key == self.key
        if not is_same or other.part.length != self.part.length:
            return False
        if other.place != self.place and not self.is_shared():
            return False
        now = self.compressor.state_after(other.compressor, self.part.length, other.value, self.value.clone())
        self.value.copy_(now)
        return True

    def restart(self) -> None:
        self.value.copy_(self.compressor.fresh_state(self.part.length, self.key, self.place))

    @property
    def description(self) -> dict[str, Any]:
        dtype = str(self.value.dtype).removeprefix("torch.")
        size, elements = self.part.length, self.value.numel()
        return {"compressor": str(self.compressor), "size": size, "elements": elements, "dtype": dtype}

    def saved(self) -> dict[str, Any]:
        at = {"slot": self.slot, "start": self.part.start, "place": self.place}
        return {**self.description, **at, "state": self.value.detach().clone()}

    def fits(self, saved: Mapping[str, Any]) -> bool:
        wanted = {**self.description, "slot": self.slot, "start": self.part.start}
        if {key: saved.get(key) for key in wanted} != wanted:
            return False
        return saved.get("place") == self.place or self.is_shared()


class CompressorStates:
    """State of all compressors of a plan on one rank; `layout` lists the slots with state.

    Random streams derive from the parameter's name and `seed`, which all ranks share.
    """

    def __init__(self, layout: Mapping[Key, StateLayout], device: torch.device, seed: int = 0):
        self._slots: dict[Key, Tensor] = {}
        self._parts: list[_PartState] = []
        for key, slot in layout.items():
            parts = _fresh(slot, seed)
            on_host = slot.on_host and device.type != "cpu"
            whole = torch.cat([torch.empty(0, dtype=slot.compressor.facts.state_dtype), *(p.value for p in parts)])
            whole = whole.pin_memory() if on_host else whole.to(device)
            self._slots[key] = whole
            pieces = torch.split(whole, [part.value.numel() for part in parts])
            self._parts += [replace(part, value=piece) for part, piece in zip(parts, pieces, strict=True)]

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def of(self, bucket: int, slot: int = 0) -> Tensor:
        return self._slots[bucket, slot]

    def shared(self) -> dict[str, Tensor]:
        """Return all states by label. States with the same label must be equal on all ranks."""
        return {part.label: part.value for part in self._parts}

    def take_over(self, other: CompressorStates) -> list[str]:
        """Copy another plan's states where compressors match. Return the labels of parts without a match."""
        known = {part.where: part for part in other._parts}
        reset: list[str] = []
        for part in self._parts:
            before = known.get(part.where)
            if before is None or not part.go_on_from(before):
                reset.append(part.label)
        return reset

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states by parameter name, for a plan with any buckets."""
        saved: dict[str, list[dict[str, Any]]] = {}
        for part in self._parts:
            saved.setdefault(part.name, []).append(part.saved())
        return {"compressors": saved}

    def take_back(self, states: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Load each part from the first matching state, and reset the other parts.

        Returns a description of each reset part's unusable saved state, by label, or "" if none was saved.
        """
        reset: dict[str, str] = {}
        for part in self._parts:
            known = [s for state in states for s in state.get(part.name, ()) if s["slot"] == part.slot]
            fitting = next((saved for saved in known if part.fits(saved)), None)
            if fitting is not None:
                part.value.copy_(fitting["state"])
                continue
            part.restart()
            reset[part.label] = (
                f"{part.name!r}, saved by {known[0]['compressor']}, now {part.compressor}" if known else ""
            )
        return reset

    def tell(self, reset: Mapping[str, str]) -> None:
        changed = [found for found in reset.values() if found]
        if changed:
            warnings.warn(
                f"fxcomp: the compressor state of {len(changed)} of {len(self._parts)} parameters starts from"
                f" nothing: {changed[0]}{' and others' if len(changed) > 1 else ''}.",
                stacklevel=2,
            )


def _fresh(layout: StateLayout, seed: int) -> list[_PartState]:
    """Create initial states. Random streams differ between slots and parts of a parameter."""
    kept: list[_PartState] = []
    for part, maker in layout.parts:
        is_plain = layout.slot == 0 and part.is_whole
        key = key_of(seed, part.name) if is_plain else key_of(seed, part.name, layout.slot, part.start)
        if maker.state_elements(part.length):
            value = maker.fresh_state(part.length, key, layout.place)
            kept.append(_PartState(part, maker, layout.slot, layout.place, key, value))
    return kept
