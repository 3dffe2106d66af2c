"""What a mode allows: the strategies that a bucket may have."""

from __future__ import annotations

import difflib
from enum import Enum
from functools import cache

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.errors import BadOption
from fxcomp.plan.strategy import DENSE, Device, Strategy


class Mode(Enum):
    """How much may be lost for speed."""

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
    Mode.LOSSLESS: ("",),
    Mode.BALANCED: ("bf16", "int8", "int4"),
    # sidco chooses what topk does: sooner on matrices, in twice the bytes. Neither is faster everywhere.
    Mode.AGGRESSIVE: ("bf16", "int8", "int4", "sign", "topk(0.01)", "sidco(0.01)"),
}
_VECTOR_COMPRESSORS = {
    Mode.LOSSLESS: ("",),
    Mode.BALANCED: ("bf16",),
    Mode.AGGRESSIVE: _COMPRESSORS[Mode.AGGRESSIVE],
}


def strategies(mode: Mode, cluster: Cluster, is_vector: bool, *, offload: bool = True) -> tuple[Strategy, ...]:
    """Every strategy that a bucket may have here, dense first, then by error.

    A bucket of vectors (biases, norms) is small, and what is lost of it shows most. `offload` allows the pool: it is no
    help where the device's own work takes all processors.
    """
    if cluster.world_size == 1:
        return (DENSE,)
    names = (_VECTOR_COMPRESSORS if is_vector else _COMPRESSORS)[mode]
    compressors = [compressor for name in names if (compressor := _compressor(name))]
    dense = [DENSE, Strategy.hierarchical(None)] if cluster.has_levels else [DENSE]
    return (*dense, *(s for compressor in compressors for s in _compressed(compressor, cluster.has_levels, offload)))


def _compressed(compressor: Compressor, has_levels: bool, offload: bool) -> list[Strategy]:
    devices = tuple(Device) if offload else (Device.GPU,)
    flat = [Strategy.flat(compressor, device) for device in devices]
    return [*flat, *(Strategy.hierarchical(compressor, device) for device in devices)] if has_levels else flat


@cache
def _compressor(name: str) -> Compressor | None:
    return parse_compressor(name) if name else None


def compressors_of(mode: Mode) -> tuple[Compressor, ...]:
    """The compressors that a mode may choose."""
    return tuple(compressor for name in _COMPRESSORS[mode] if (compressor := _compressor(name)))
