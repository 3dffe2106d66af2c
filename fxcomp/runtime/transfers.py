"""Patterns of collectives, and the number of elements that each rank owns.

    pattern          input of a rank                      output
    all_gather       its own part                         all parts, in rank order
    all_to_all       a part for each rank, in rank order  its own part from each rank, in rank order
    reduce_scatter   a part for each rank, in rank order  its own part, summed over the ranks

A *cut* is either each rank's number of elements in rank order, (5, 3, 0), or a number of equal parts. In (8, 0, 0) the
first rank is the root, and the patterns are a broadcast, a gather and a reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from fxcomp.errors import BadTensor

Cut = tuple[int, ...] | int


class Pattern(Enum):
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"

    def parts(self, cut: Cut, brought: int) -> tuple[int, ...]:
        """Return each rank's number of elements, given an input of `brought` elements."""
        if isinstance(cut, tuple):
            return cut
        if self is Pattern.ALL_GATHER:
            return (brought,) * cut
        if brought % cut:
            raise BadTensor(
                f"{brought} elements do not make {cut} equal parts of {self.value}.\n"
                "  Pad them, or pass the number that each rank owns."
            )
        return (brought // cut,) * cut

    def elements(self, parts: tuple[int, ...], place: int) -> tuple[int, int]:
        """Return the numbers of input and output elements of the rank with index `place`."""
        own, whole = parts[place], sum(parts)
        match self:
            case Pattern.ALL_GATHER:
                return own, whole
            case Pattern.ALL_TO_ALL:
                return whole, own * len(parts)
            case Pattern.REDUCE_SCATTER:
                return whole, own


_PATTERNS = {
    "all_gather": Pattern.ALL_GATHER,
    "broadcast": Pattern.ALL_GATHER,
    "all_to_all": Pattern.ALL_TO_ALL,
    "gather": Pattern.ALL_TO_ALL,
    "reduce_scatter": Pattern.REDUCE_SCATTER,
    "reduce": Pattern.REDUCE_SCATTER,
}


def pattern_of(kind: str) -> Pattern:
    """Return the pattern of a collective other than all_reduce, which overwrites its input and has none."""
    assert kind in _PATTERNS, f"unknown collective {kind!r}: there are all_reduce, {', '.join(_PATTERNS)}"
    return _PATTERNS[kind]


def from_first(elements: int, ranks: int) -> tuple[int, ...]:
    """Return the cut that makes a group's first rank the root."""
    return elements, *(0,) * (ranks - 1)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective of parts, with flat input and output. The input must live until the collective ends."""

    pattern: Pattern
    value: Tensor
    out: Tensor
    cut: Cut
    level: str
    lane: str = "main"
    memory: Callable[[int], Tensor] | None = None
    """Allocates scratch memory for a reduce_scatter, to be kept until the collective ends. None: a new tensor."""

    def parts(self, place: int, ranks: int | None = None) -> tuple[int, ...]:
        """Return each rank's number of elements. Raises BadTensor if input or output does not fit the cut."""
        name = f"{self.pattern.value}@{self.level}"
        parts = self.pattern.parts(self.cut, self.value.numel())
        if ranks is not None and len(parts) != ranks:
            raise BadTensor(f"{name} is cut into {len(parts)} parts, for {ranks} ranks.")
        found, expected = (self.value.numel(), self.out.numel()), self.pattern.elements(parts, place)
        if found != expected:
            raise BadTensor(
                f"{name} cut into {parts} has {found[0]} elements going in and {found[1]} coming out"
                f" at place {place} of its group, not {expected[0]} and {expected[1]}."
            )
        if self.value.dtype != self.out.dtype:
            raise BadTensor(f"{name} has {self.value.dtype} going in and {self.out.dtype} coming out.")
        if self._shares_storage:
            # gloo would send from and receive into the same memory without an error.
            raise BadTensor(f"input and output of {name} share their storage.\n  Give the output memory of its own.")
        return parts

    @property
    def _shares_storage(self) -> bool:
        if not self.value.numel() or not self.out.numel():
            return False
        return self.value.untyped_storage().data_ptr() == self.out.untyped_storage().data_ptr()
