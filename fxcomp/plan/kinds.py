"""Kinds used by plans and prices: streams, element types, and collectives with their properties, in torch's spelling."""

from __future__ import annotations

from enum import Enum, StrEnum

import torch

from fxcomp.cluster.cluster import Level
from fxcomp.errors import Unsupported


class Stream(Enum):
    """Queue whose work runs in order."""

    COMPUTE = "compute"  # the device, including its compressors
    INTRA = "intra"  # the links inside a host
    INTER = "inter"  # the links between hosts
    D2H = "d2h"
    H2D = "h2d"
    CPU = "cpu"  # pool thread that compresses and launches
    CPU_ARRIVING = "arriving"  # pool thread that waits and decompresses
    HOST = "host"  # main thread, where it launches work for an asynchronous device

    # Members are singletons; Enum's own hash runs in Python and took a third of the simulator's time.
    __hash__ = object.__hash__


WIRES = (Stream.INTRA, Stream.INTER)
POOL = (Stream.CPU, Stream.CPU_ARRIVING)


def wire_of(level: Level, hosts: int) -> Stream:
    """Return a collective's stream: links between hosts limit a flat collective over several hosts."""
    return Stream.INTRA if level is Level.INTRA or hosts == 1 else Stream.INTER


class ElementType(StrEnum):
    """Element type of a gradient and its parameter. Dense gradients are sent in it; compressors get fp32."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F64 = "f64"

    __hash__ = str.__hash__  # Enum's own runs in Python

    @classmethod
    def of(cls, dtype: torch.dtype) -> ElementType:
        """Return the element type of a torch dtype."""
        return _BY_DTYPE[dtype]

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def itemsize(self) -> int:
        return _DTYPES[self].itemsize


_DTYPES = {
    ElementType.F32: torch.float32,
    ElementType.BF16: torch.bfloat16,
    ElementType.F16: torch.float16,
    ElementType.F64: torch.float64,
}
_BY_DTYPE = {dtype: each for each, dtype in _DTYPES.items()}


def check_is_trainable(name: str, dtype: torch.dtype) -> None:
    """Raise Unsupported for a parameter whose type cannot be trained."""
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
    """Kind of collective. All but point_to_point may occur in strategies."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    GATHER = "gather"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point_to_point"

    __hash__ = object.__hash__  # Enum's own runs in Python, and a search looks up many prices

    @property
    def gathers(self) -> bool:
        """True if the result on one rank is the number of ranks times one rank's input."""
        return self in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)

    @property
    def deals(self) -> bool:
        """True if every rank's tensor is distributed to all ranks in equal parts."""
        return self in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)

    @property
    def splits(self) -> bool:
        """True if each rank ends with a shard, or the root with everything."""
        return self in _JOINED_BY

    @property
    def is_rooted(self) -> bool:
        """True if the group's first rank is a root that holds everything before or after."""
        return self in (CollectiveKind.REDUCE, CollectiveKind.GATHER, CollectiveKind.BROADCAST)

    @property
    def sums(self) -> bool:
        """True if the network sums, which needs dense values or linear payloads."""
        return self in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE)

    @property
    def is_in_place(self) -> bool:
        """True if the collective overwrites its input."""
        return self is CollectiveKind.ALL_REDUCE

    @property
    def has_parts(self) -> bool:
        """True if each rank owns a part of its own size; see `runtime/transfers.py`."""
        return self not in (CollectiveKind.ALL_REDUCE, CollectiveKind.POINT_TO_POINT)

    @property
    def joined_by(self) -> CollectiveKind:
        """Collective that undoes this split."""
        return _JOINED_BY[self]


_JOINED_BY = {
    CollectiveKind.REDUCE_SCATTER: CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL: CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE: CollectiveKind.BROADCAST,
    CollectiveKind.GATHER: CollectiveKind.BROADCAST,
}

IN_STEPS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
"""Collectives of most plans: every backend must have them. They are measured while compiling, an all_to_all only if the
all_gather's time does not determine its time.
"""


ATTENTION, CUDNN_ATTENTION = "attention", "cudnn attention"
"""Kernels with a peak of their own, prefixed by the element type: `bf16 attention`."""
