"""Name the prices that lines of a step and tasks of a bucket ask for; a cost table has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """Time of a collective alone, in us, and its effect on compute that it overlaps."""

    us: float
    load: float = 0.0
    """The share of compute's processors that it takes while it runs."""
    overlap_speed: float = 1.0
    """Its relative speed while compute runs and leaves no processor to it."""


class Prices(Protocol):
    """Prices in us; sizes are in bytes, or elements where they are named so."""

    @property
    def launch_us(self) -> float: ...
    @property
    def pool_load(self) -> float: ...

    def pack_us(self, size: float) -> float: ...
    def copy_us(self, size: float) -> float: ...
    def keep_us(self, size: float) -> float: ...
    def encode_us(self, compressor: Compressor, elements: int, device: Device = ...) -> float: ...
    def propose_us(self, compressor: Compressor, elements: int, device: Device = ...) -> float: ...
    def decode_us(self, compressor: Compressor, elements: int, ranks: int, device: Device = ...) -> float: ...
    def collective(self, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> CollectivePrice: ...
