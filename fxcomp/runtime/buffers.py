"""Memory that lines (runtime calls) reuse in every step, and overrides of constants in lines."""

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
    """Overrides of the constants in lines, by line name."""

    compressors: Mapping[str, Compressor] = field(default_factory=dict[str, Compressor])
    """Compressors of propose, compress and decompress lines."""
    cuts: Mapping[str, Cut] = field(default_factory=dict[str, Cut])
    """Elements that each rank owns in a collective."""
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Part sizes of `turn` lines, in elements."""


ROOM = 64
"""Spare elements at the end of every buffer, for an attached digest (`rider.py`)."""

AS_WRITTEN = Numbers()


class Buffers:
    """Buffers by line name. `pins` pins host buffers."""

    def __init__(self, *, pins: bool = False) -> None:
        self._pins = pins
        self._known: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._rooms: dict[int, int] = {}
        """Size of each buffer in bytes, without spare room, by data pointer."""
        self._slots: dict[tuple[str, tuple[tuple[torch.Size, torch.dtype], ...]], list[Tensor]] = {}

    def take(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a line's buffer, initially zero. Another capture may use the same name with another size."""
        key = (name, elements, dtype)
        buffer = self._known.get(key)
        if buffer is None:
            pinned = self._pins and device.type == "cpu"
            whole = torch.zeros(elements + ROOM, dtype=dtype, device=device, pin_memory=pinned)
            buffer = self._known[key] = whole[:elements]
            self._rooms[buffer.data_ptr()] = buffer.nbytes
        return buffer

    def like(self, name: str, value: Tensor) -> Tensor:
        return self.take(name, value.numel(), value.dtype, value.device)

    def copy(self, name: str, value: Tensor) -> Tensor:
        return self.like(name, value).copy_(value)

    def extended(self, name: str, value: Tensor, more: int) -> Tensor:
        """Append `more` elements, at most `ROOM`, to a value: in place if the value fills a buffer, else in a copy."""
        if value.is_contiguous() and self._rooms.get(value.data_ptr()) == value.nbytes > 0:
            return value.as_strided((value.numel() + more,), (1,))
        copy = self.take(f"{name}_extended", value.numel() + more, value.dtype, value.device)
        copy[: value.numel()].copy_(value.view(-1))
        return copy

    def take_packed(
        self, name: str, gradients: Sequence[Tensor], wanted: torch.dtype | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the buffer for packed gradients, in dtype `wanted` if given, and a view for each gradient."""
        dtype = packed_dtype(gradients, wanted)
        flat = self.take(name, sum(packed_sizes(gradients, wanted)), dtype, gradients[0].device)
        types = tuple((gradient.shape, wanted or gradient.dtype) for gradient in gradients)
        parts = self._slots.get((name, types))
        if parts is None:
            parts = self._slots[name, types] = slots(flat, gradients, wanted)
        return flat, parts

    def lend(self, name: str, memory: Tensor) -> None:
        """Let the line `name` write into external memory instead of its buffer."""
        if (known := self._known.get((name, memory.numel(), memory.dtype))) is not None:
            self._rooms.pop(known.data_ptr(), None)
        self._known[name, memory.numel(), memory.dtype] = memory

    def give_away(self, values: Sequence[Tensor]) -> None:
        """Drop the buffers that hold these values. The next step allocates others."""
        gone = {value.untyped_storage().data_ptr() for value in values}
        for key, buffer in list(self._known.items()):
            if buffer.untyped_storage().data_ptr() in gone:
                del self._known[key]
                self._rooms.pop(buffer.data_ptr(), None)
        for key, parts in list(self._slots.items()):
            if parts[0].untyped_storage().data_ptr() in gone:
                del self._slots[key]

    def clear(self) -> None:
        self._known.clear()
        self._slots.clear()
        self._rooms.clear()
