"""Cut large gradients into atoms, the parts that the search assigns to buckets.

    embedding.weight   38 MB of 60     4 atoms, whole rows each
    fc.weight           2 MB           1 atom

A bucket starts when its last gradient is ready. A gradient that is most of a model would be one bucket whose stages do
not overlap. If all stages take time S, the longest stage M and a message's latency o, C atoms take
S/C + (C-1)/C · M + C · o. Four atoms save three quarters of the possible time; more would slow the search down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter

from fxcomp.plan.plan import part_shape
from fxcomp.search.workload import Gradient, Workload

LARGE = 4 << 20
"""Bytes below which a gradient is never cut (assumed)."""

LARGE_SHARE = 0.25
"""Fraction of all bytes below which a gradient is not cut."""

CHUNK = 4 << 20
"""Minimum bytes of an atom of a cut gradient. No gradient has more than MOST atoms."""

MOST = 4

GRAIN = 4096
"""Atoms of tall matrices begin at multiples of this number of elements, so that no compressor's block is cut."""

READ_AT_ONCE = 16
"""Bytes of CUDA's widest load, which must be aligned."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A gradient, or a part of one."""

    number: int
    extent: range
    gradient: Gradient

    @property
    def elements(self) -> int:
        return len(self.extent)

    @property
    def shape(self) -> tuple[int, ...]:
        return part_shape(self.gradient.shape, self.extent)

    @property
    def is_last(self) -> bool:
        """True for a gradient's last atom, which includes the update."""
        return self.extent.stop == self.gradient.elements


def atoms_of(workload: Workload, world_size: int) -> list[Atom]:
    """List the atoms in ready order. A world of one rank cuts nothing."""
    limit = math.inf if world_size == 1 else max(LARGE, LARGE_SHARE * workload.dense_bytes)
    return [
        Atom(number, extent, gradient)
        for number, gradient in enumerate(workload.gradients)
        for extent in (_rows(gradient) if gradient.dense_bytes > limit else [range(gradient.elements)])
    ]


def joined(atoms: Sequence[Atom]) -> list[tuple[Gradient, range]]:
    """Join a bucket's atoms into gradients and parts of gradients, each with its range of elements.

    The last part of a cut gradient includes the update and the copy that joins all parts. Gradients whose bytes are no
    multiple of 16 come last, so that all gradients before them are aligned.
    """
    found: list[tuple[Gradient, range]] = []
    for _, group in groupby(atoms, attrgetter("number")):
        together = list(group)
        gradient, extent = together[0].gradient, range(together[0].extent.start, together[-1].extent.stop)
        if len(extent) < gradient.elements:
            gradient = gradient.part(extent, bears_update=extent.stop == gradient.elements)
        found.append((gradient, extent))
    return sorted(found, key=lambda member: member[0].dense_bytes % READ_AT_ONCE > 0)


def _rows(gradient: Gradient) -> list[range]:
    if gradient.is_vector:
        return [range(gradient.elements)]
    rows, row = gradient.shape[0], math.prod(gradient.shape[1:])
    chunks = min(MOST, gradient.dense_bytes // CHUNK, rows)
    grain = GRAIN // math.gcd(GRAIN, row)
    grain = grain if rows >= 2 * chunks * grain else 1
    places = [*(number * rows // (chunks * grain) * grain for number in range(chunks)), rows]
    return [range(start * row, stop * row) for start, stop in pairwise(places)]
