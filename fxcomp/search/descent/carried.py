"""Find the buckets that a strategy cannot carry.

    a vector of 3e9 elements, topk(0.01)       its places do not fit into 31 bits: no bucket that holds it
    a matrix of 3e9 elements in four atoms     no bucket that holds three of them

A compressor says so by BadCompressor, for each parameter alone. One that carries a parameter carries smaller ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxcomp.plan.plan import part_shape
from fxcomp.search.atoms import Atom
from fxcomp.search.descent.cells import Lane
from fxcomp.search.descent.templates import Template, size_of
from fxcomp.search.workload import Gradient


def reaches(templates: Sequence[Template], lane: Lane, ranks: int) -> list[list[int] | None]:
    """Return for each template and cell where a bucket that starts there must end; None if any bucket is carried."""
    gradients = {atom.number: atom.gradient for atom in lane.atoms}
    if not gradients:
        return [None] * len(templates)
    largest = max(gradients, key=lambda number: gradients[number].elements)
    return [_reach(template, lane, gradients, largest, ranks) for template in templates]


def _reach(
    template: Template, lane: Lane, gradients: Mapping[int, Gradient], largest: int, ranks: int
) -> list[int] | None:

    def refuses(shape: Sequence[int]) -> bool:
        return any(size_of(feature, shape, ranks) is None for feature in compressed)

    compressed = [feature for feature in template.features if feature.compressor is not None]
    if not compressed or not refuses(gradients[largest].shape):
        return None
    found = [lane.cells] * lane.cells
    for number, gradient in gradients.items():
        if not refuses(gradient.shape):
            continue
        cells = [cell for cell in range(lane.cells) if _parts(lane, number, cell, cell + 1)]
        for start in range(cells[-1] + 1):
            first = max(start, cells[0])
            for stop in range(first + 1, cells[-1] + 2):
                parts = _parts(lane, number, first, stop)
                extent = range(parts[0].extent.start, parts[-1].extent.stop)
                if refuses(part_shape(gradient.shape, extent)):
                    found[start] = min(found[start], stop - 1)
                    break
    return found


def _parts(lane: Lane, number: int, start: int, stop: int) -> list[Atom]:
    """List the atoms of one gradient in cells."""
    return [atom for atom in lane.within(start, stop) if atom.number == number]
