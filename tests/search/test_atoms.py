"""Large gradients are cut by the search, where that shortens the step, and written joined where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.workloads import COSTS, cluster

from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Mode
from fxcomp.search.atoms import LARGE, MOST, atoms_of, joined
from fxcomp.search.choose import choose, predict_us
from fxcomp.search.descent import plan_search
from fxcomp.search.workload import Gradient, Workload

WHERE = cluster(4, 1, "1gbit@50us")


def skewed(rows: int = 8192, columns: int = 1024) -> Workload:
    """One gradient is 80 % of the model, and the last to be ready."""
    large = Gradient("embedding", (rows, columns), 60_000.0, 500.0)
    small = [Gradient(f"w{k}", (rows // 16, columns), 10_000.0 * (k + 1), 50.0) for k in range(4)]
    return Workload((*small, large), 60_000.0)


def test_only_what_is_large_in_bytes_and_share_is_cut_at_whole_rows():
    workload = skewed(8192, 1000)
    atoms = atoms_of(workload, 4)
    parts = [atom for atom in atoms if atom.number == 4]
    assert len(parts) == MOST
    assert len(atoms) == MOST + 4
    assert all(atom.extent.start % 1000 == 0 for atom in parts)
    assert sum(atom.elements for atom in parts) == workload.gradients[4].elements
    assert len(atoms_of(workload, 1)) == 5
    even = replace(workload, gradients=tuple(replace(g, shape=(LARGE, 1)) for g in workload.gradients))
    assert len(atoms_of(even, 4)) == 5


def test_joined_atoms_are_the_gradient_again():
    workload = skewed()
    atoms = atoms_of(workload, 4)
    assert [g for g, _ in joined(atoms)] == list(workload.gradients)
    (first, _), (rest, extent) = joined(atoms[4:6])[0], joined(atoms[6:])[0]
    assert (first.update_us, first.joined_bytes) == (0.0, 0)
    assert (rest.update_us, rest.joined_bytes) == (500.0, 4 * workload.gradients[4].elements)
    assert first.elements + rest.elements == 8192 * 1024
    assert extent.stop == 8192 * 1024


def test_what_a_gpu_reads_value_by_value_comes_last_in_its_bucket():
    sizes = (10, 4096, 1, 8, 0, 65, 4)
    gradients = [Gradient(f"w{size}", (size,), 10.0 * (k + 1), 1.0) for k, size in enumerate(sizes)]
    fp32 = joined(atoms_of(Workload(tuple(gradients), 100.0), 4))
    assert [gradient.elements for gradient, _ in fp32] == [4096, 8, 0, 4, 10, 1, 65]
    halves = tuple(replace(gradient, element_type=ElementType.BF16) for gradient in gradients)
    bf16 = joined(atoms_of(Workload(halves, 100.0), 4))
    assert [gradient.elements for gradient, _ in bf16] == [4096, 8, 0, 10, 1, 65, 4]


def test_chosen_buckets_end_with_what_a_gpu_reads_value_by_value():
    odd = [Gradient(f"odd{k}", (1, 2 * k + 1), 100.0 * k, 1.0) for k in range(4)]
    even = [Gradient(f"even{k}", (64, 1024), 100.0 * k + 50.0, 1.0) for k in range(4)]
    workload = Workload(tuple(sorted((*odd, *even), key=lambda gradient: gradient.ready_us)), 400.0)
    plan = choose(workload, COSTS, cluster(4, 1, "10gbit@500us"), Mode.LOSSY).plan
    ends = [[name.startswith("odd") for name in bucket.names] for bucket in plan.buckets]
    assert ends == [sorted(each) for each in ends]
    assert any(len(set(each)) == 2 for each in ends)


def test_one_gradient_that_is_most_of_a_model_travels_faster_in_parts(monkeypatch: pytest.MonkeyPatch):
    workload = skewed()
    cut = choose(workload, COSTS, WHERE, Mode.BALANCED)
    monkeypatch.setattr(plan_search, "atoms_of", lambda workload, _: atoms_of(workload, 1))
    whole = choose(workload, COSTS, WHERE, Mode.BALANCED)
    assert len(cut.plan.parts["embedding"]) > 1
    assert len(whole.plan.parts["embedding"]) == 1
    assert cut.step_us < 0.97 * whole.step_us
    assert predict_us(workload, cut.plan, COSTS, WHERE) == pytest.approx(cut.step_us, rel=1e-6)
    cut.plan.check_covers(workload.sizes)
