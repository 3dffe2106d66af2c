"""Atoms joined to few cells."""

from __future__ import annotations

from helpers.workloads import COSTS, cluster, layers

from fxcomp.plan.modes import Mode
from fxcomp.search.atoms import atoms_of
from fxcomp.search.choose import choose
from fxcomp.search.descent.cells import MOST_CELLS, strand_of


def test_hundreds_of_gradients_are_joined_to_few_cells_and_given_out_whole():
    workload = layers(100)
    atoms = atoms_of(workload, 2)
    strand = strand_of(atoms, range(len(atoms)))
    assert strand.cells == MOST_CELLS
    assert strand.borders[0] == 0
    assert strand.borders[-1] == len(atoms)
    assert list(strand.borders) == sorted(set(strand.borders))
    assert max(strand.sizes()) <= 2.5 * max(4 * atom.elements for atom in atoms) + workload.dense_bytes / MOST_CELLS
    plan = choose(workload, COSTS, cluster(2, 1, "1gbit"), Mode.BALANCED).fastest
    plan.check_covers(workload.sizes)
