"""The bandwidth at which the verdict flips."""

from __future__ import annotations

import pytest
from helpers.workloads import COSTS, cluster, layers

from fxcomp.plan.modes import Mode
from fxcomp.search.choose import choose, flip_gbit


def test_the_verdict_flips_at_a_bandwidth():
    workload, where = layers(10), cluster(2, 1, "1gbit")
    flip = flip_gbit(workload, COSTS, where, Mode.BALANCED)
    assert flip is not None
    faster, slower = (cluster(2, 1, f"{flip * factor}gbit") for factor in (1.05, 1 / 1.05))
    assert choose(workload, COSTS, faster, Mode.BALANCED).plan.is_dense
    assert not choose(workload, COSTS, slower, Mode.BALANCED).plan.is_dense
    assert flip_gbit(workload, COSTS, where, Mode.LOSSLESS) is None


@pytest.mark.parametrize("hosts", [(2, 1), (8, 4)])
@pytest.mark.parametrize("gbit", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.one_in(2)
def test_where_the_verdict_flips_does_not_contradict_the_verdict(hosts: tuple[int, int], gbit: float):
    where = cluster(*hosts, f"{gbit}gbit")
    choice = choose(layers(12), COSTS, where, Mode.BALANCED)
    flip = flip_gbit(layers(12), COSTS, where, Mode.BALANCED, choice=choice)
    assert flip is not None
    assert (flip <= gbit) == choice.plan.is_dense
    assert flip == pytest.approx(flip_gbit(layers(12), COSTS, where, Mode.BALANCED), rel=0.21)


def test_where_the_verdict_flips_is_known_above_2_gib():
    """A model 200 times as large that computes 200 times as long flips where the small one does."""
    where = cluster(4, 1, "1gbit")
    small, large = (layers(20, elements=size, backward_us=size / 175) for size in (14_000_000, 2_800_000_000))
    flips = [flip_gbit(workload, COSTS, where, Mode.BALANCED) for workload in (small, large)]
    assert flips[0] == pytest.approx(flips[1], rel=0.25)
