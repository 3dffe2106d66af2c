"""Atoms joined to few cells."""

from __future__ import annotations

from helpers.workloads import COSTS, cluster, layers

from fxcomp.plan.modes import Mode
from fxcomp.search.atoms import atoms_of
from fxcomp.search.choose import choose
from fxcomp.search.descent.cells import MOST_CELLS, lane_of


def test_hundreds_of_gradients_are_joined_to_few_cells_and_given_out_whole():
    workload = layers(100)
    atoms = atoms_of(workload, 2)
    lane = lane_of(atoms, range(len(atoms)))
    assert lane.cells == MOST_CELLS
    assert lane.borders[0] == 0
    assert lane.borders[-1] == len(atoms)
    assert list(lane.borders) == sorted(set(lane.borders))
    assert max(lane.sizes()) <= 2.5 * max(4 * atom.elements for atom in atoms) + workload.dense_bytes / MOST_CELLS
    plan = choose(workload, COSTS, cluster(2, 1, "1gbit"), Mode.BALANCED).fastest
    plan.check_covers(workload.sizes)
