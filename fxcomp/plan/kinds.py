"""Streams, element types and collectives of plans and prices, in torch's spelling."""

from __future__ import annotations

from enum import Enum, StrEnum

import torch

from fxcomp.cluster.cluster import Level
from fxcomp.errors import Unsupported


class Stream(Enum):
    """Queue whose work runs in order."""

    COMPUTE = "compute"  # device work, with compressors
    INTRA = "intra"  # the links inside a host
    INTER = "inter"  # the links between hosts
    D2H = "d2h"
    H2D = "h2d"
    CPU = "cpu"  # pool thread: compress and launch
    CPU_ARRIVING = "arriving"  # pool thread: wait and decompress
    HOST = "host"  # main thread that launches device work

    # Enum's own hash runs in Python and took a third of the simulator's time.
    __hash__ = object.__hash__


WIRES = (Stream.INTRA, Stream.INTER)
POOL = (Stream.CPU, Stream.CPU_ARRIVING)


def wire_of(level: Level, hosts: int) -> Stream:
    """Return a collective's stream: INTER if ranks of several hosts take part, else INTRA."""
    return Stream.INTRA if level is Level.INTRA or hosts == 1 else Stream.INTER


class ElementType(StrEnum):
    """Element type of gradients. Dense gradients are sent in this type; compressors get fp32."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F64 = "f64"
    F32_OF_BF16 = "f32 of bf16"
    """fp32 gradients that are casts of bf16 values."""
    F32_OF_F16 = "f32 of f16"

    __hash__ = str.__hash__

    @classmethod
    def of(cls, dtype: torch.dtype, mean: torch.dtype | None = None) -> ElementType:
        """Return the type of gradients of `dtype` with a mean of dtype `mean`, by default also `dtype`."""
        return _BY_DTYPE[dtype] if mean in (None, dtype) else _EXACT[dtype]

    @property
    def narrow(self) -> torch.dtype | None:
        """16-bit type of the values that these gradients are casts of; None for other types."""
        return next((dtype for dtype, exact in _EXACT.items() if exact is self), None)

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
    ElementType.F32_OF_BF16: torch.float32,
    ElementType.F32_OF_F16: torch.float32,
}
_EXACT = {torch.bfloat16: ElementType.F32_OF_BF16, torch.float16: ElementType.F32_OF_F16}
_BY_DTYPE = {dtype: each for each, dtype in _DTYPES.items() if each not in _EXACT.values()}


def check_is_trainable(name: str, dtype: torch.dtype) -> None:
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
    """Collective; all but point_to_point may occur in strategies."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    GATHER = "gather"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point_to_point"

    __hash__ = object.__hash__

    @property
    def gathers(self) -> bool:
        """True if the result holds the inputs of all ranks."""
        return self in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)

    @property
    def deals(self) -> bool:
        """True if every rank sends one part of a tensor to each rank."""
        return self in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)

    @property
    def splits(self) -> bool:
        """True if each rank ends with a shard, or the root with all values."""
        return self in _JOINED_BY

    @property
    def is_rooted(self) -> bool:
        """True if only the root holds all values before or after the collective."""
        return self in (CollectiveKind.REDUCE, CollectiveKind.GATHER, CollectiveKind.BROADCAST)

    @property
    def sums(self) -> bool:
        """True if the collective adds its inputs: dense values or linear payloads."""
        return self in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE)

    @property
    def is_in_place(self) -> bool:
        return self is CollectiveKind.ALL_REDUCE

    @property
    def has_parts(self) -> bool:
        """True if ranks may own parts of different sizes; see `runtime/transfers.py`."""
        return self not in (CollectiveKind.ALL_REDUCE, CollectiveKind.POINT_TO_POINT)

    @property
    def joined_by(self) -> CollectiveKind:
        return _JOINED_BY[self]


_JOINED_BY = {
    CollectiveKind.REDUCE_SCATTER: CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL: CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE: CollectiveKind.BROADCAST,
    CollectiveKind.GATHER: CollectiveKind.BROADCAST,
}

IN_STEPS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
"""Collectives of most plans, required of every backend. They are measured while compiling, except all_to_all if its
time follows from all_gather's.
"""


ATTENTION, CUDNN_ATTENTION = "attention", "cudnn attention"
"""Suffixes of element types in the names of peak throughputs, as in `bf16 attention`."""
