"""The cluster of live process groups: told by host names, uneven hosts too, and what a group in it reaches."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import table
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks, try_ranks

import fxcomp
from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.commands.demo import launch_ranks, shaped_hosts
from fxcomp.cost.collectives import collective_us
from fxcomp.cost.contention import FittedContention
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadCall
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Strategy
from fxcomp.planning import decide
from fxcomp.planning.timed_steps import StepMeasurement, TimedStep
from fxcomp.ranks import LOCAL_LINK, Ranks, cluster_of_group
from fxcomp.runtime.transport import NullTransport
from fxcomp.site import Site
from fxcomp.step import first_steps

INTRA, INTER = Link(1.0, 100.0), Link(10.0, 1.0)


def on_hosts(names: Sequence[str]) -> None:
    """Let this rank believe that it sits on the host of its number."""
    here = names[dist.get_rank()]
    compat.host_name = lambda: here


def described(names: Sequence[str]) -> tuple[str, tuple[int, ...], str]:
    """Return the cluster's shape and placement, and the shape of a group of this rank alone."""
    on_hosts(names)
    cluster = Ranks.join(None, "the test").cluster_of(None)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return cluster.shape, cluster.placement, cluster_of_group(alone).shape


def test_a_live_cluster_is_told_by_the_names_of_its_hosts_and_a_group_of_one_rank_is_a_cluster_of_one():
    assert run_ranks(3, described, ["b", "a", "b"]) == [("2+1", (0, 1, 0), "1x1")] * 3


ACROSS, INSIDE = (0, 4, 5, 6), (0, 1, 2, 3)


def reaches(names: Sequence[str], groups: Sequence[Sequence[int]]) -> list[tuple[str, str, float]]:
    """For each group that this rank is in: its own cluster's shape, how it sits among all ranks, and 8 MB's price."""
    on_hosts(names)
    world = cluster_of_group(intra=INTRA, inter=INTER)
    found: list[tuple[str, str, float]] = []
    for ranks in groups:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            reach = world.topology_of(dist.get_process_group_ranks(group))
            us = collective_us(CollectiveKind.ALL_REDUCE, 8_000_000, reach)
            found.append((cluster_of_group(group).shape, str(reach), us))
    return found


def test_four_live_ranks_on_four_hosts_and_four_in_a_host_get_prices_of_their_own():
    answers = run_ranks(7, reaches, ["a", "a", "a", "a", "b", "c", "d"], [ACROSS, INSIDE])
    across, inside = ("4x1", "4x1", 6 * 10 + 1.5 * 8e6 / 1e3), ("1x4", "1x4", 6 * 1 + 1.5 * 8e6 / 100e3)
    assert answers == [[across, inside], [inside], [inside], [inside], [across], [across], [across]]
    # The same from text.
    text = Cluster.parse("4+1+1+1", intra=INTRA, inter=INTER)
    assert [collective_us(CollectiveKind.ALL_REDUCE, 8_000_000, text.topology_of(g)) for g in (ACROSS, INSIDE)] == [
        across[2],
        inside[2],
    ]


ON_REAL_HOSTS = """
import torch
import torch.distributed as dist
from fxcomp.commands.demo.launch_ranks import join
from fxcomp.ranks import cluster_of_group
join()
cluster = cluster_of_group()
print(cluster.shape, cluster.placement, cluster.topology_of((0, 1)), cluster.topology_of((0, 2)))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_namespaces_of_one_machine_are_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reason = shaped_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "told.py").write_text(ON_REAL_HOSTS)
    with shaped_hosts.ShapedHosts(2) as two:
        told = launch_ranks.run_ranks([str(tmp_path / "told.py")], hosts=two, ranks_per_host=2)
    assert told == ["2x2 (0, 0, 1, 1) 1x2 2x1\n"] * 4


def test_without_a_process_group_there_is_nothing_to_describe():
    with pytest.raises(BadCall, match=r"(?s)is not initialised in this process, .*Cluster.parse\('8x4'"):
        cluster_of_group()


def steps_on(names: Sequence[str], plan: str | None) -> tuple[str, float]:
    on_hosts(names)
    job = JOBS["mlp"]
    model = job.build()
    optimizer, batch = OPTIMIZERS["plain"](model.parameters()), job.batch(0, dist.get_rank())
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        optimizer,
        batch,
        costs=table(2.0),
        compress=plan or "balanced",
        checks=fxcomp.Checks(verify=1),
    )
    step(batch)
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    return step.explain(), total


@pytest.mark.parametrize("plan", [None, "int8"])
def test_a_step_compiles_and_runs_where_hosts_are_uneven(plan: str | None):
    answers = run_ranks(3, steps_on, ["a", "a", "b"], plan)
    assert all("2 hosts, 3 ranks (2+1)" in report for report, _ in answers)
    assert len({total for _, total in answers}) == 1


def by_level_on(names: Sequence[str]) -> None:
    on_hosts(names)
    job = JOBS["mlp"]
    model = job.build()
    optimizer, batch = OPTIMIZERS["plain"](model.parameters()), job.batch(0, dist.get_rank())
    dense = fxcomp.compile_step(model, cross_entropy, optimizer, batch, compress="dense").plan
    plan = dense.with_strategies([Strategy.hierarchical(None)] * len(dense.buckets))
    fxcomp.compile_step(model, cross_entropy, optimizer, batch, compress=plan)


def test_a_plan_by_level_is_refused_where_hosts_are_uneven():
    outcomes = try_ranks(3, by_level_on, ["a", "a", "b"])
    assert [outcome.error for outcome in outcomes] == ["BadPlan"] * 3
    assert all(
        "needs as many ranks on every host and in every rack; here the hosts have 2+1" in outcome.text
        for outcome in outcomes
    )


def forget_earlier_jobs() -> None:
    """Let this job measure its own step; what compressors cost on this machine stays known."""
    shutil.rmtree(compat.cache_directory() / "jobs", ignore_errors=True)


def priced_by_its_own_step() -> tuple[int, CostTable]:
    """Time first steps with other answers on each rank; return this rank's fits of contention, and the plan's costs."""
    forget_earlier_jobs()
    asked, rank, measure = list[int](), dist.get_rank(), decide.measurement

    def fitted(*_: object) -> FittedContention:
        asked.append(1)
        return FittedContention(1.5 + rank, error=0.1 + 0.1 * rank)

    def measured(steps: Sequence[TimedStep]) -> StepMeasurement:
        return replace(measure(steps), launch_us=700.0 + 200 * rank, between_us=0.0)

    decide.contention_of, decide.measurement = fitted, measured
    first_steps.around_us = lambda *_: 600.0 + 300 * rank
    job = JOBS["mlp"]
    model = job.build()
    optimizer, batch = OPTIMIZERS["plain"](model.parameters()), job.batch(0, rank)
    step = fxcomp.compile_step(model, cross_entropy, optimizer, batch)
    while step.in_force.decision.is_provisional:
        step(batch)
    return len(asked), step.costs


def test_all_ranks_plan_with_one_fit_of_contention_one_cost_of_a_start_and_the_slowest_ranks_feeding():
    answers = run_ranks(2, priced_by_its_own_step)
    assert [fits for fits, _ in answers] == [1, 0]
    for _, costs in answers:
        assert (costs.contention, costs.error, costs.launch_us, costs.feed_us) == (1.5, 0.1, 700.0, 900.0)


SHARED: list[tuple[list[list[int]], str, float, float]] = [
    ([[0, 1], [0, 1]], "aa", math.inf, 1.0),
    ([[0], [1]], "aa", math.inf, 1.0),
    ([[0], [0]], "ab", math.inf, 1.0),
    ([[0, 1, 2, 3], [0, 1]], "aa", math.inf, 1.0),
    ([[0, 1, 2], [2, 3, 4]], "aa", math.inf, 2.5),
    ([[0, 1, 2, 3], [0, 1, 2, 3]], "aa", 3.0, 1.5),
]
"""The processors that each rank may use, their machines, a quota, and how many each rank has."""


def processors_of_each() -> list[float]:
    counts: list[float] = []
    for usable, machines, quota, _ in SHARED:
        mine, machine = usable[dist.get_rank()], machines[dist.get_rank()]
        compat.usable_processors, compat.machine_name = lambda mine=mine: list(mine), lambda machine=machine: machine
        compat.processor_quota = lambda quota=quota: quota
        ranks = Ranks.join(None, "the test")
        cluster = Cluster(2, 1, intra=LOCAL_LINK, inter=LOCAL_LINK)
        counts.append(Site(ranks, cluster, NullTransport(), torch.device("cpu")).processors().count)
    return counts


def test_ranks_share_the_processors_and_the_quota_that_several_may_use():
    assert run_ranks(2, processors_of_each) == [[count for *_, count in SHARED]] * 2
