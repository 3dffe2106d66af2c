"""Keep what a program's lines use from step to step: memory, and numbers that change without another program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxcomp.compressors import Compressor
from fxcomp.runtime.packing import packed_dtype, packed_sizes, slots
from fxcomp.runtime.transfers import Cut


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers that lines take instead of those written in them, by the lines' names; empty for a program as emitted."""

    compressors: Mapping[str, Compressor] = field(default_factory=dict[str, Compressor])
    """Of lines that propose, compress or decompress."""
    cuts: Mapping[str, Cut] = field(default_factory=dict[str, Cut])
    """Of collectives: the elements that each rank owns."""
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Of payloads that are put in another order."""


ROOM = 64
"""The elements that fit after every buffer, for what rides along (`rider.py`)."""

AS_WRITTEN = Numbers()
"""Lines run as they are written."""


class Buffers:
    """Memory that one step hands to the next, keyed by the lines' names.

    `pins`: a device copies from and to what lies on the host, so that is pinned.
    """

    def __init__(self, *, pins: bool = False) -> None:
        self._pins = pins
        self._known: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._rooms: dict[int, int] = {}
        """The bytes of each buffer that has room after it, by its place in memory."""
        self._slots: dict[tuple[str, tuple[tuple[torch.Size, torch.dtype], ...]], list[Tensor]] = {}

    def take(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of a line, zeros at the first call. Another capture may use the name for another size."""
        key = (name, elements, dtype)
        buffer = self._known.get(key)
        if buffer is None:
            pinned = self._pins and device.type == "cpu"
            whole = torch.zeros(elements + ROOM, dtype=dtype, device=device, pin_memory=pinned)
            buffer = self._known[key] = whole[:elements]
            self._rooms[buffer.data_ptr()] = buffer.nbytes
        return buffer

    def like(self, name: str, value: Tensor) -> Tensor:
        """The buffer of a line for as many elements as a value has, of its type, where it is."""
        return self.take(name, value.numel(), value.dtype, value.device)

    def copy(self, name: str, value: Tensor) -> Tensor:
        """Copy a value into the buffer of a line."""
        return self.like(name, value).copy_(value)

    def extended(self, name: str, value: Tensor, more: int) -> Tensor:
        """The value with so many elements after it, at most `ROOM`: where it lies if it is a buffer, else a copy."""
        if value.is_contiguous() and self._rooms.get(value.data_ptr()) == value.nbytes > 0:
            return value.as_strided((value.numel() + more,), (1,))
        copy = self.take(f"{name}_extended", value.numel() + more, value.dtype, value.device)
        copy[: value.numel()].copy_(value.view(-1))
        return copy

    def take_packed(
        self, name: str, gradients: Sequence[Tensor], wanted: torch.dtype | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The buffer that gradients are packed into, of a type if one is wanted, and the slot of each in it."""
        dtype = packed_dtype(gradients, wanted)
        flat = self.take(name, sum(packed_sizes(gradients, wanted)), dtype, gradients[0].device)
        types = tuple((gradient.shape, wanted or gradient.dtype) for gradient in gradients)
        parts = self._slots.get((name, types))
        if parts is None:
            parts = self._slots[name, types] = slots(flat, gradients, wanted)
        return flat, parts

    def lend(self, name: str, memory: Tensor) -> None:
        """Let a line write into somebody else's memory, which lasts until the end of the step."""
        if (known := self._known.get((name, memory.numel(), memory.dtype))) is not None:
            self._rooms.pop(known.data_ptr(), None)
        self._known[name, memory.numel(), memory.dtype] = memory

    def give_away(self, values: Sequence[Tensor]) -> None:
        """Leave the memory that these values lie in to who has them: the next step takes other memory for its lines."""
        gone = {value.untyped_storage().data_ptr() for value in values}
        for key, buffer in list(self._known.items()):
            if buffer.untyped_storage().data_ptr() in gone:
                del self._known[key]
                self._rooms.pop(buffer.data_ptr(), None)
        for key, parts in list(self._slots.items()):
            if parts[0].untyped_storage().data_ptr() in gone:
                del self._slots[key]

    def clear(self) -> None:
        """Give the memory back."""
        self._known.clear()
        self._slots.clear()
        self._rooms.clear()
