"""Name the kinds that plans and prices speak of: collectives with their facts, element types, and streams.

Collectives have torch's spelling, and the facts about each that more than one file needs. A stream is a queue in which
a step's work runs. Element types are those that gradients may have.
"""

from __future__ import annotations

from enum import Enum, StrEnum

import torch

from fxcomp.cluster.cluster import Level
from fxcomp.errors import Unsupported


class Stream(Enum):
    """A queue in which work runs in order."""

    COMPUTE = "compute"  # the device; compressors placed on it run here too
    INTRA = "intra"  # the links inside a host
    INTER = "inter"  # the links between hosts
    D2H = "d2h"
    H2D = "h2d"
    CPU = "cpu"  # the pool's thread that compresses and launches
    CPU_ARRIVING = "arriving"  # the pool's thread that waits and decompresses
    HOST = "host"  # the main thread, where it hands a step out to a device that works later

    # Members are single objects; Enum's own hash runs in Python and took a third of the simulator's time.
    __hash__ = object.__hash__


WIRES = (Stream.INTRA, Stream.INTER)
POOL = (Stream.CPU, Stream.CPU_ARRIVING)


def wire_of(level: Level, hosts: int) -> Stream:
    """Return a collective's stream: a flat one is limited by the links between hosts, if there are several."""
    return Stream.INTRA if level is Level.INTRA or hosts == 1 else Stream.INTER


class ElementType(StrEnum):
    """The type of a gradient's elements: its parameter's. Dense gradients travel in it; compressors are given fp32."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F64 = "f64"

    __hash__ = str.__hash__  # Enum's own runs in Python

    @classmethod
    def of(cls, dtype: torch.dtype) -> ElementType:
        """Name a type of torch that a trained parameter may have."""
        return _BY_DTYPE[dtype]

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _DTYPES[self].itemsize


_DTYPES = {
    ElementType.F32: torch.float32,
    ElementType.BF16: torch.bfloat16,
    ElementType.F16: torch.float16,
    ElementType.F64: torch.float64,
}
_BY_DTYPE = {dtype: each for each, dtype in _DTYPES.items()}


def check_is_trainable(name: str, dtype: torch.dtype) -> None:
    """Raise Unsupported for a parameter of a type that no gradient may have."""
    if dtype not in _BY_DTYPE:
        advice = (
            "Keep torch.view_as_real(p) as the parameter and compute with torch.view_as_complex, or train with"
            " fxcomp.ddp_hook, which takes it"
            if dtype.is_complex
            else "Keep it in float32, or set requires_grad=False"
        )
        raise Unsupported(
            f"the parameter {name!r} is {dtype}; only real floating-point numbers of 16 bits or more can be trained.\n"
            f"  {advice}."
        )


class CollectiveKind(Enum):
    """A collective. All but the last have a place in strategies."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    GATHER = "gather"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point_to_point"

    __hash__ = object.__hash__  # Enum's own runs in Python, for every price that the search asks for

    @property
    def gathers(self) -> bool:
        """One rank receives what every other one contributes: as many times its own bytes."""
        return self in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)

    @property
    def deals(self) -> bool:
        """Every rank's tensor is dealt out in equal parts to all."""
        return self in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)

    @property
    def splits(self) -> bool:
        """It ends with a shard on each rank, or with everything on the first one."""
        return self in _JOINED_BY

    @property
    def is_rooted(self) -> bool:
        """The first rank of the group has everything, before it or after it."""
        return self in (CollectiveKind.REDUCE, CollectiveKind.GATHER, CollectiveKind.BROADCAST)

    @property
    def sums(self) -> bool:
        """The network adds what ranks send, which needs dense values or payloads that may be added."""
        return self in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE)

    @property
    def is_in_place(self) -> bool:
        """It overwrites its input; all others leave it."""
        return self is CollectiveKind.ALL_REDUCE

    @property
    def has_parts(self) -> bool:
        """Each rank owns a part, of its own size: `runtime/transfers.py` says which it brings and gets."""
        return self not in (CollectiveKind.ALL_REDUCE, CollectiveKind.POINT_TO_POINT)

    @property
    def joined_by(self) -> CollectiveKind:
        """The collective that undoes this split."""
        return _JOINED_BY[self]


_JOINED_BY = {
    CollectiveKind.REDUCE_SCATTER: CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL: CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE: CollectiveKind.BROADCAST,
    CollectiveKind.GATHER: CollectiveKind.BROADCAST,
}

IN_STEPS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
"""The collectives that most plans are made of: every backend must have them. They are measured while compiling, an
all_to_all only where no gather tells its time."""


ATTENTION, CUDNN_ATTENTION = "attention", "cudnn attention"
"""Kernels with a peak of their own, named after the type of their numbers: `bf16 attention`."""
