"""Send 32 bits along with collectives that are sent anyway, and find out whether they are the same on all ranks.

    all_reduce   [ values | bits, their complements ]    a bit that is not the same everywhere leaves both above 0
    all_gather   [ payload | digest ]                    each rank's own, after its own part

Buffers of lines have room after them, so an all_reduce takes its bits along without a copy. A gather's parts arrive
one after the other and are put together again without the digests, which copies them: a small one is chosen to carry,
by `codegen/program.py`.
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
"""32 bits and their complements."""

DIGEST_BYTES = _BOTH.size

LATE = 2
"""So many steps after it was sent a digest from a device is judged, on all ranks: the host waits for nothing new."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class Rider:
    """A digest of what must be the same on all ranks."""

    differs: Callable[[str, int], object]
    """Called with the level at which it was found not to be the same, and how many steps later."""
    digest: int = 0
    carriers: frozenset[str] = frozenset()
    """The running program's lines that carry it."""
    _bits: Bytes = field(default_factory=lambda: np.zeros(ROOM, np.uint8))
    """The bits and their complements; `_sent` has them as a tensor of the same memory, and copies on devices."""
    _bytes: Bytes = field(default_factory=lambda: np.zeros(DIGEST_BYTES, np.uint8))
    _sent: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor])
    _good: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor])
    """The digest that arrives where all are the same, by line."""
    _views: dict[str, _Views] = field(default_factory=dict[str, "_Views"])
    _step: int = 0
    _late: list[tuple[int, Launch, Tensor, Any]] = field(default_factory=list[tuple[int, Launch, Tensor, Any]])
    """Digests that arrived on a device: the step, its copy on the host, and the event after it."""

    def carry(self, digest: int) -> None:
        """Take another digest along from now on."""
        self.digest = digest
        raw = np.frombuffer(_BOTH.pack(digest, ~digest & 0xFFFFFFFF), np.uint8)
        self._bytes[:], self._bits[:] = raw, np.unpackbits(raw)
        self._good.clear()
        for key in [key for key in self._sent if key[1].type != "cpu"]:
            del self._sent[key]

    def start(self, memory: Buffers, launch: Launch, value: Tensor, transport: Transport) -> Flight:
        """Start a collective that takes the digest along."""
        if launch.kind == "all_reduce":
            return self._reduced(memory, launch, value, transport)
        return self._gathered(memory, launch, value, transport)

    def begin(self, carriers: frozenset[str]) -> None:
        """Begin a step in which these lines carry; judge what has come from a device since."""
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
        """Send bytes, of whatever type: what is in them is not looked at."""
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
        key = len(what), device, compat.stream_of(device)  # no other stream waits for the copy
        if key not in self._sent:
            self._sent[key] = compat.to_device(_torch.from_numpy(what), device)  # on the host it is the same memory
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
    """The memory of a gather that carries, in bytes. It stays as long as this does: an equal place is equal memory."""

    launch: Launch
    whole: Tensor
    """The payload and the digest after it."""
    tail: Tensor
    out: Tensor
    cut: tuple[int, ...]
    parts: tuple[Tensor, ...]
    """The payloads in what arrives."""
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
        """Return whether they serve a value: where it lies, as large, and cut in the same way."""
        is_same_place = value.data_ptr() == self.whole.data_ptr()
        return is_same_place and value.nbytes + DIGEST_BYTES == len(self.whole) and launch.cut == self.launch.cut
