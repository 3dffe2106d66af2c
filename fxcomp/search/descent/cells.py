"""Join atoms into cells, the units that a search moves between buckets."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import part_shape
from fxcomp.search.atoms import Atom
from fxcomp.search.descent.templates import Feature, Template, feature_sizes, size_of
from fxcomp.search.workload import Gradient

SAME = 1e-9
"""Relative difference below which times are equal."""


class Part(NamedTuple):
    """A bucket in the search: cells [start, stop) of a strand, and the index of its option (strategy)."""

    strand: int
    start: int
    stop: int
    option: int


Parts = tuple[Part, ...]
"""A plan in the search: buckets in ready order."""


class Value(NamedTuple):
    """A plan's step time in µs (infinite if the error exceeds the limit), and error in elements (`losses.py`)."""

    us: float
    lost: float

    def beats(self, other: Value) -> bool:
        """Return whether this plan is faster, or equally fast with a smaller error."""
        if self.us > other.us * (1 + SAME):
            return False
        return self.us < other.us * (1 - SAME) or self.lost < other.lost


class Limits(NamedTuple):
    """Effort of a descent, in counts and not in seconds, so that all ranks stop at the same plan."""

    evaluations: int = 4000
    options: int = 6
    """Number of a bucket's best options that are tried together with a second change."""
    apart: int = 3
    """Maximum distance between two buckets that are changed together, in buckets."""
    dense_only: bool = False
    pairs: bool = True
    """Change two buckets together if no single change helps."""
    borders: bool = True
    price: float = 0.0
    """Price of error, in µs per element. The search minimizes step time + price · error."""


MOST_CELLS = 64
"""Maximum number of cells of a strand in the first descent."""


@dataclass(frozen=True, slots=True)
class Strand:
    """Atoms of one element type that may share buckets, in ready order, grouped into cells."""

    atoms: tuple[Atom, ...]
    places: tuple[int, ...]
    """Index of each atom among all atoms of the search."""
    borders: tuple[int, ...]
    """Cell k holds the atoms [borders[k], borders[k + 1])."""

    @property
    def cells(self) -> int:
        return len(self.borders) - 1

    @property
    def element_type(self) -> ElementType:
        return self.atoms[0].gradient.element_type if self.atoms else ElementType.F32

    def sizes(self) -> list[int]:
        size = self.element_type.itemsize
        return [size * sum(atom.elements for atom in self.within(k, k + 1)) for k in range(self.cells)]

    def last(self, cell: int) -> int:
        return self.places[self.borders[cell + 1] - 1]

    def ready_us(self, cell: int) -> float:
        return self.atoms[self.borders[cell + 1] - 1].gradient.ready_us

    def within(self, start: int, stop: int) -> tuple[Atom, ...]:
        return self.atoms[self.borders[start] : self.borders[stop]]

    def whole(self) -> Strand:
        return Strand(self.atoms, self.places, tuple(range(len(self.atoms) + 1)))

    def sums(self, features: Sequence[Feature], ranks: int) -> list[list[float]]:
        """Return each feature's sum over the atoms before each border."""
        shapes = tuple(atom.shape for atom in self.atoms)
        before = ([0.0, *accumulate(feature_sizes(feature, shapes, ranks))] for feature in features)
        return [[sums[border] for border in self.borders] for sums in before]

    def updates_us(self) -> list[float]:
        """Return the sum of update times before each border. A gradient's update counts at its last atom."""
        times = [atom.gradient.update_us if atom.is_last else 0.0 for atom in self.atoms]
        before = [0.0, *accumulate(times)]
        return [before[border] for border in self.borders]

    def continued(self) -> tuple[list[int], list[int]]:
        """Return the last cell and the dense bytes of the gradient that each cell continues; -1 and 0 if none."""
        ends, sizes = [-1] * self.cells, [0] * self.cells
        cell_of = [cell for cell, (start, stop) in enumerate(pairwise(self.borders)) for _ in range(start, stop)]
        last_of = {atom.number: cell for atom, cell in zip(self.atoms, cell_of, strict=True)}
        for cell in range(self.cells):
            atom = self.atoms[self.borders[cell]]
            if atom.extent.start > 0:
                ends[cell] = last_of[atom.number]
                sizes[cell] = atom.gradient.dense_bytes
        return ends, sizes


def strand_of(atoms: Sequence[Atom], places: Sequence[int], most: int = MOST_CELLS) -> Strand:
    """Join the smallest neighbouring atoms into at most `most` cells."""
    count = len(atoms)
    size = [atom.elements for atom in atoms]
    after, before = list(range(1, count + 1)), list(range(-1, count - 1))
    is_there = [True] * count
    pairs = [(size[k] + size[k + 1], k, k + 1) for k in range(count - 1)]
    heapq.heapify(pairs)
    left = count
    while left > most:
        together, one, other = heapq.heappop(pairs)
        if not (is_there[one] and is_there[other]) or after[one] != other or size[one] + size[other] != together:
            continue
        size[one] = together
        is_there[other] = False
        following = after[one] = after[other]
        left -= 1
        if following < count:
            before[following] = one
            heapq.heappush(pairs, (together + size[following], one, following))
        if before[one] >= 0:
            heapq.heappush(pairs, (size[before[one]] + together, before[one], one))
    borders = (*(k for k in range(count) if is_there[k]), count)
    return Strand(tuple(atoms), tuple(places), borders)


def reaches(templates: Sequence[Template], strand: Strand, ranks: int) -> list[list[int] | None]:
    """Return, per template and cell, the largest end cell of a bucket that starts at the cell; None if unlimited.

        a vector of 3e9 elements, topk(0.01)       indices exceed 31 bits: no bucket with the vector
        a matrix of 3e9 elements in four atoms     no bucket with three of the atoms

    A single parameter that is too large for its compressor raises BadOption.
    """
    gradients = {atom.number: atom.gradient for atom in strand.atoms}
    if not gradients:
        return [None] * len(templates)
    largest = max(gradients, key=lambda number: gradients[number].elements)
    return [_reach(template, strand, gradients, largest, ranks) for template in templates]


def _reach(
    template: Template, strand: Strand, gradients: Mapping[int, Gradient], largest: int, ranks: int
) -> list[int] | None:

    def refuses(shape: Sequence[int]) -> bool:
        return any(size_of(feature, shape, ranks) is None for feature in compressed)

    compressed = [feature for feature in template.features if feature.compressor is not None]
    if not compressed or not refuses(gradients[largest].shape):
        return None
    found = [strand.cells] * strand.cells
    for number, gradient in gradients.items():
        if not refuses(gradient.shape):
            continue
        cells = [cell for cell in range(strand.cells) if _parts(strand, number, cell, cell + 1)]
        for start in range(cells[-1] + 1):
            first = max(start, cells[0])
            for stop in range(first + 1, cells[-1] + 2):
                parts = _parts(strand, number, first, stop)
                extent = range(parts[0].extent.start, parts[-1].extent.stop)
                if refuses(part_shape(gradient.shape, extent)):
                    found[start] = min(found[start], stop - 1)
                    break
    return found


def _parts(strand: Strand, number: int, start: int, stop: int) -> list[Atom]:
    return [atom for atom in strand.within(start, stop) if atom.number == number]
