"""Name the questions that a bucket's tasks ask of a cost table, and the sizes that they are asked about."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, Self

from fxcomp.compressors import Compressor


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


class PriceQuestion(NamedTuple):
    """A method of `Prices`, and its arguments before and after the size."""

    method: str
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()

    @property
    def is_collective(self) -> bool:
        return self.method == "collective"
