"""Attach a 32-bit digest to collectives of the step, and check that the digest is equal on all ranks.

    all_reduce   [ values | bits, their complements ]    a bit that differs leaves both sums above 0
    all_gather   [ payload | digest ]                    each rank's digest follows its part

Line buffers have spare room, so an all_reduce needs no copy. `codegen/program.py` picks a small gather, because
removing its digests copies the payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import mul
from struct import Struct
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.runtime.buffers import ROOM, Buffers
from fxcomp.runtime.transfers import Pattern, Transfer, pattern_of
from fxcomp.runtime.transport import Flight, Launch, Transport

_torch = cast("Any", torch)  # partly untyped

BITS = 32
assert 2 * BITS <= ROOM, "the bits and their complements fit after every buffer"

_BOTH = Struct("<II")

DIGEST_BYTES = _BOTH.size

LATE = 2
"""Number of steps after which a digest received on a device is checked, so that the host does not wait."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class Rider:
    differs: Callable[[str, int], object]
    """Called with the level at which digests differ, and the check's delay in steps."""
    digest: int = 0
    carriers: frozenset[str] = frozenset()
    """Names of the running program's launches that send the digest."""
    _bits: Bytes = field(default_factory=lambda: np.zeros(ROOM, np.uint8))
    """Bits and complements, one per byte."""
    _bytes: Bytes = field(default_factory=lambda: np.zeros(DIGEST_BYTES, np.uint8))
    _sent: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor])
    """Tensors of `_bits` and `_bytes`, by length, device and stream. CPU tensors share memory."""
    _good: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor])
    """Last received bytes on which all ranks agreed, by line name."""
    _views: dict[str, _Views] = field(default_factory=dict[str, "_Views"])
    _step: int = 0
    _late: list[tuple[int, Launch, Tensor, Any]] = field(default_factory=list[tuple[int, Launch, Tensor, Any]])
    """Digests received on a device: step, launch, host copy, and the event after the copy."""

    def carry(self, digest: int) -> None:
        self.digest = digest
        raw = np.frombuffer(_BOTH.pack(digest, ~digest & 0xFFFFFFFF), np.uint8)
        self._bytes[:], self._bits[:] = raw, np.unpackbits(raw)
        self._good.clear()
        for key in [key for key in self._sent if key[1].type != "cpu"]:
            del self._sent[key]

    def start(self, memory: Buffers, launch: Launch, value: Tensor, transport: Transport) -> Flight:
        if launch.kind == "all_reduce":
            return self._reduced(memory, launch, value, transport)
        return self._gathered(memory, launch, value, transport)

    def begin(self, carriers: frozenset[str]) -> None:
        """Begin a step, in which `carriers` send the digest, and check the digests that are due."""
        self._step += 1
        if carriers is not self.carriers:
            self.carriers = carriers
            self._good.clear()
            self._views.clear()
        while self._late and self._late[0][0] + LATE <= self._step:
            _, launch, tail, event = self._late.pop(0)
            event.synchronize()
            self._judge(launch, tail, LATE)

    def _reduced(self, memory: Buffers, launch: Launch, value: Tensor, transport: Transport) -> Flight:
        whole, elements = memory.extended(launch.name, value, ROOM), value.numel()
        tail = whole[elements:]
        tail.copy_(self._as_sent(self._bits, tail.device))
        work = transport.all_reduce(whole, launch.level, launch.lane, launch.how)
        return Flight(launch, whole[:elements], work, lambda: self._arrived(launch, tail))

    def _gathered(self, memory: Buffers, launch: Launch, value: Tensor, transport: Transport) -> Flight:
        views = self._views.get(launch.name)
        if views is None or not views.are_of(launch, value):
            views = _Views.of(memory, launch, value)
            if views.is_in_place:
                self._views[launch.name] = views
        views.tail.copy_(self._as_sent(self._bytes, value.device))
        work = transport.start(
            Transfer(Pattern.ALL_GATHER, views.whole, views.out, views.cut, launch.level, launch.lane)
        )

        def arrived() -> None:
            torch.cat(views.parts, out=views.together)
            self._arrived(launch, torch.cat(views.digests))

        return Flight(launch, views.together.view(value.dtype), work, arrived)

    def _as_sent(self, what: Bytes, device: torch.device) -> Tensor:
        key = len(what), device, compat.stream_of(device)  # other streams do not wait for the copy
        if key not in self._sent:
            self._sent[key] = compat.to_device(_torch.from_numpy(what), device)
        return self._sent[key]

    def _arrived(self, launch: Launch, tail: Tensor) -> None:
        if not compat.works_later(tail.device):
            self._judge(launch, tail)
            return
        host = torch.empty(tail.shape, dtype=tail.dtype, pin_memory=True).copy_(tail, non_blocking=True)
        self._late.append((self._step, launch, host, compat.recorded(tail.device)))

    def _judge(self, launch: Launch, tail: Tensor, late: int = 0) -> None:
        good = self._good.get(launch.name)
        if good is not None and torch.equal(tail, good):
            return
        if launch.kind == "all_reduce":
            sums = _listed(tail)
            is_same = not any(map(mul, sums[:BITS], sums[BITS:]))
        else:
            digests = bytes(_listed(tail))
            is_same = digests == digests[:DIGEST_BYTES] * (len(digests) // DIGEST_BYTES)
        if is_same:
            self._good[launch.name] = tail.clone()
        else:
            self.differs(launch.level, late)


def _listed(tail: Tensor) -> list[Any]:
    return cast("Any", tail).tolist()


@dataclass(frozen=True, slots=True)
class _Views:
    """Byte buffers of a gather with digests, kept alive so that an equal address means the same memory."""

    launch: Launch
    whole: Tensor
    tail: Tensor
    out: Tensor
    cut: tuple[int, ...]
    parts: tuple[Tensor, ...]
    digests: tuple[Tensor, ...]
    together: Tensor
    is_in_place: bool

    @classmethod
    def of(cls, memory: Buffers, launch: Launch, value: Tensor) -> _Views:
        size, own = value.element_size(), value.nbytes
        whole = memory.extended(launch.name, value, DIGEST_BYTES // size).view(torch.uint8)
        parts = [size * part for part in pattern_of(launch.kind).parts(launch.cut, value.numel())]
        cut = tuple(part + DIGEST_BYTES for part in parts)
        out = memory.take(f"{launch.name}_parts", sum(cut), torch.uint8, value.device)
        together = memory.take(f"{launch.name}_together", sum(parts), torch.uint8, value.device)
        pieces = torch.split_with_sizes(out, [each for part in parts for each in (part, DIGEST_BYTES)])
        is_in_place = whole.data_ptr() == value.data_ptr()
        payloads, digests = tuple(pieces[0::2]), tuple(pieces[1::2])
        return cls(launch, whole, whole[own:], out, cut, payloads, digests, together, is_in_place)

    def are_of(self, launch: Launch, value: Tensor) -> bool:
        is_same_place = value.data_ptr() == self.whole.data_ptr()
        return is_same_place and value.nbytes + DIGEST_BYTES == len(self.whole) and launch.cut == self.launch.cut
