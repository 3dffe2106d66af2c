"""Say what a mode allows: the strategies that a bucket may have, and the error of the whole plan."""

from __future__ import annotations

import difflib
from enum import Enum
from functools import cache

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.errors import BadOption
from fxcomp.plan.strategy import DENSE, Device, Strategy


class Mode(Enum):
    """The precision that may be traded for speed."""

    LOSSLESS = "lossless"  # dense: buckets and their order alone
    BALANCED = "balanced"  # follows the dense loss
    AGGRESSIVE = "aggressive"  # as fast as possible

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Read a mode. Raises BadOption."""
        names = [mode.value for mode in cls]
        if text in names:
            return cls(text)
        close = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.0)
        raise BadOption(f"there is no mode {text!r}; did you mean {close[0]!r}? The modes are {', '.join(names)}.")


# The small error first: it wins a tie.
_COMPRESSORS = {
    Mode.LOSSLESS: (),
    Mode.BALANCED: ("bf16", "int8", "int4"),
    # sidco chooses what topk does: sooner on matrices, in twice the bytes. Neither is faster everywhere.
    Mode.AGGRESSIVE: ("bf16", "int8", "int4", "sign", "topk(0.01)", "sidco(0.01)"),
}
_VECTOR_COMPRESSORS = {**_COMPRESSORS, Mode.BALANCED: ("bf16",)}
_ERROR_LIMITS = {
    Mode.LOSSLESS: 0.0,
    Mode.BALANCED: 0.014,  # 4 bits a number in blocks of 128, everywhere: follows the dense loss
    Mode.AGGRESSIVE: 0.92,  # the largest 1 % with error feedback, everywhere
}


def error_limit(mode: Mode) -> float:
    """Return the relative squared error that a whole plan may have in a mode."""
    return _ERROR_LIMITS[mode]


@cache
def compressors_of(mode: Mode, *, for_vectors: bool = False) -> tuple[Compressor, ...]:
    """Return the compressors that a mode may choose; for vectors (biases, norms) those that it allows them."""
    return tuple(map(parse_compressor, (_VECTOR_COMPRESSORS if for_vectors else _COMPRESSORS)[mode]))


def strategies(mode: Mode, cluster: Cluster, is_vector: bool, *, offload: bool = True) -> tuple[Strategy, ...]:
    """Return every strategy that a bucket may have here, dense first, then by error.

    A bucket of vectors (biases, norms) is small, and what is lost of it shows most. `offload` allows the pool: it is no
    help where the device's own work takes all processors.
    """
    if cluster.world_size == 1:
        return (DENSE,)
    dense = [DENSE, Strategy.hierarchical(None)] if cluster.has_levels else [DENSE]
    compressors = compressors_of(mode, for_vectors=is_vector)
    return (*dense, *(s for compressor in compressors for s in _compressed(compressor, cluster.has_levels, offload)))


def _compressed(compressor: Compressor, has_levels: bool, offload: bool) -> list[Strategy]:
    devices = tuple(Device) if offload else (Device.GPU,)
    flat = [Strategy.flat(compressor, device) for device in devices]
    return [*flat, *(Strategy.hierarchical(compressor, device) for device in devices)] if has_levels else flat
