"""Interface of cost tables, and the sizes that cost tables price."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, Self

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """Time of a collective without compute, in µs, and parameters of overlap."""

    us: float
    load: float = 0.0
    """Mean number of processors taken from compute."""
    overlap_speed: float = 1.0
    """Speed during compute / speed alone, if compute leaves no processor free."""


class Prices(Protocol):
    """Prices in µs; `size` is in bytes."""

    @property
    def launch_us(self) -> float: ...
    @property
    def pool_load(self) -> float: ...

    def pack_us(self, size: float) -> float: ...
    def copy_us(self, size: float) -> float: ...
    def encode_us(self, compressor: Compressor, elements: int, device: Device = ...) -> float: ...
    def propose_us(self, compressor: Compressor, elements: int, device: Device = ...) -> float: ...
    def decode_us(self, compressor: Compressor, elements: int, ranks: int, device: Device = ...) -> float: ...
    def collective(self, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> CollectivePrice: ...


class Measure(Enum):
    VALUES = "values"
    PAYLOAD = "payload"
    PROPOSAL = "proposal"
    STATE = "state"

    __hash__ = object.__hash__  # Enum's own runs in Python


class Size(int):
    """Bytes of a bucket's values or of a compressor's output, for a whole bucket (`is_whole`) or a part."""

    measure: Measure
    compressor: Compressor | None
    is_whole: bool

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
        return Size(size, self.measure, self.compressor, is_whole=self.is_whole)


class PriceQuestion(NamedTuple):
    """Name of a method of `Prices`, and the arguments before and after the size."""

    method: str
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()

    @property
    def is_collective(self) -> bool:
        return self.method == "collective"
