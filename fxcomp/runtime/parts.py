"""Say which elements of which parameters a range of a bucket holds.

bucket   a[0:6] b[0:3] c[0:7]
[4, 11)  a[4:6] b[0:3] c[0:2]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a parameter, one behind the other."""

    name: str
    start: int
    """The first one's place in the parameter."""
    length: int
    size: int
    """The number of elements of the whole parameter."""
    index: int = 0
    """The number of the parameter in its bucket."""

    @property
    def is_whole(self) -> bool:
        return self.length == self.size


def parts_in(bucket: Sequence[Part], pieces: Sequence[range]) -> tuple[Part, ...]:
    """Cut ranges of a bucket's values into parts of parameters, in order; empty ones are left out."""
    return tuple(part for piece in pieces for part in _parts_in(bucket, piece))


def _parts_in(bucket: Sequence[Part], piece: range) -> list[Part]:
    found: list[Part] = []
    offset = 0
    for part in bucket:
        first, last = max(piece.start, offset), min(piece.stop, offset + part.length)
        if first < last:
            found.append(replace(part, start=part.start + first - offset, length=last - first))
        offset += part.length
    return found
