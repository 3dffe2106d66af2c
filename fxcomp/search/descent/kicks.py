"""Change a plan as no single change of a descent does, to get out of where that ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxcomp.search.descent.cells import Lane
from fxcomp.search.descent.parts import Part, Parts

_KICKED_SHARES = (1 / 16, 1 / 5, 1 / 2)
"""Of a bucket, at its end or start."""


def kicks(parts: Parts, lanes: Sequence[Lane], tails: Sequence[int]) -> list[Parts]:
    """Change a plan as no single change does: halves, pairs, and other options at the end or the start."""

    def ordered(found: Iterable[Part]) -> Parts:
        return tuple(sorted(found, key=lambda part: lanes[part.lane].last(part.stop - 1)))

    def halves(part: Part) -> tuple[Part, ...]:
        middle = (part.start + part.stop) // 2
        return (part._replace(stop=middle), part._replace(start=middle)) if middle > part.start else (part,)

    by_lane = [[part for part in parts if part.lane == lane] for lane in range(len(lanes))]
    found = [
        ordered(half for part in parts for half in halves(part)),
        ordered(
            pair[-1]._replace(start=pair[0].start)
            for each in by_lane
            for pair in (each[k : k + 2] for k in range(0, len(each), 2))
        ),
    ]
    if not by_lane[0]:
        return found
    last, first = by_lane[0][-1], by_lane[0][0]
    rest_of_last, rest_of_first = ([part for part in parts if part != one] for one in (last, first))
    for share in _KICKED_SHARES:
        cut = last.stop - max(1, int((last.stop - last.start) * share))
        if cut > last.start:
            for option in tails:
                found.append(ordered([*rest_of_last, last._replace(stop=cut), last._replace(start=cut, option=option)]))
        cut = first.start + max(1, int((first.stop - first.start) * share))
        if cut < first.stop:
            found.append(ordered([*rest_of_first, first._replace(stop=cut), first._replace(start=cut)]))
    return [each for each in dict.fromkeys(found) if each != parts]
