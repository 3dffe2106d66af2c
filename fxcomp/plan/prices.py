"""Name the prices that lines of a step and tasks of a bucket ask for, and of which sizes; a cost table has them."""

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
    def encode_us(self, compressor: Compressor, elements: int, device: Device = ...) -> float: ...
    def propose_us(self, compressor: Compressor, elements: int, device: Device = ...) -> float: ...
    def decode_us(self, compressor: Compressor, elements: int, ranks: int, device: Device = ...) -> float: ...
    def collective(self, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> CollectivePrice: ...


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
        """Return a size of the same measure and compressor."""
        return Size(size, self.measure, self.compressor, is_whole=self.is_whole)


class PriceQuestion(NamedTuple):
    """A method of `Prices`, and its arguments before and after the size."""

    method: str
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()

    @property
    def is_collective(self) -> bool:
        return self.method == "collective"
