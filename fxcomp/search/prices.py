"""Say what a bucket's tasks ask of a cost table, and of how much."""

from __future__ import annotations

from enum import Enum
from typing import Protocol, Self

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device


class Measure(Enum):
    """The property of a bucket that a size counts."""

    VALUES = "values"
    PAYLOAD = "payload"
    PROPOSAL = "proposal"
    STATE = "state"

    __hash__ = object.__hash__  # Enum's own runs in Python


class Size(int):
    """Bytes that a rank holds of a bucket: of its values, or of what a compressor makes of them."""

    measure: Measure
    compressor: Compressor | None
    is_whole: bool
    """The compressor was given whole parameters, and not a shard of them."""

    def __new__(
        cls,
        size: int,
        measure: Measure = Measure.VALUES,
        compressor: Compressor | None = None,
        *,
        is_whole: bool = True,
    ) -> Self:
        made = super().__new__(cls, size)
        made.measure, made.compressor, made.is_whole = measure, compressor, is_whole
        return made

    def now(self, size: int) -> Size:
        """So many bytes of the same."""
        return Size(size, self.measure, self.compressor, is_whole=self.is_whole)


class TaskPrices(Protocol):
    """The part of a `CostTable` that prices a bucket; sizes are in bytes, or elements where they are named so."""

    @property
    def launch_us(self) -> float: ...
    @property
    def pool_load(self) -> float: ...

    def pack_us(self, size: float) -> float: ...
    def copy_us(self, size: float) -> float: ...
    def keep_us(self, size: float) -> float: ...
    def accumulate_us(self, size: float) -> float: ...
    def mask_us(self, size: float) -> float: ...
    def encode_us(self, compressor: Compressor, elements: int, device: Device = ...) -> float: ...
    def propose_us(self, compressor: Compressor, elements: int, device: Device = ...) -> float: ...
    def decode_us(self, compressor: Compressor, elements: int, ranks: int, device: Device = ...) -> float: ...
    def collective_us(self, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> float: ...
    def load_of(self, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> float: ...
    def overlap_speed(self, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> float: ...
