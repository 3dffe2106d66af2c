"""Groups beside each other, as the ranks of different shards are: what they measure, count and decide together."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxcomp
from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cost.table import CostTable
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning.decide import Planner
from fxcomp.planning.measure_links import TimedCollectives
from fxcomp.ranks import Ranks
from fxcomp.runtime.group import Work
from fxcomp.runtime.transport import Groups
from fxcomp.site import NOBODY, Beside, Site

CPU = torch.device("cpu")


def mesh_of_2_by_2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@contextmanager
def site_of(mesh: DeviceMesh) -> Generator[Site]:
    with Ranks.meeting(None, "the test", mesh["replicate"]) as ranks:
        yield Site.of(ranks, None, CPU, Beside.of(mesh["shard"].get_group(), "the test"))
    ranks.release()


def timed_together() -> dict[str, Any]:
    """Time one collective in each group; that of ranks 1 and 3 takes 0.2 s more."""
    mesh, me = mesh_of_2_by_2(), dist.get_rank()
    compat.machine_name = lambda: "a" if me < 2 else "b"
    compat.usable_processors = lambda: [0, 1]
    compat.processor_quota = lambda: 8.0
    found: dict[str, Any] = {}
    with site_of(mesh) as site:
        assert isinstance(site.transport, Groups)
        all_reduce, is_slow = site.transport.all_reduce, me % 2 == 1

        def delayed(value: torch.Tensor, level: str, lane: str, how: str = "sum") -> Work:
            if is_slow and how == "sum" and value.numel() > 1:
                time.sleep(0.2)
            return all_reduce(value, level, lane, how)

        site.transport.all_reduce = delayed
        timed = TimedCollectives(site.transport, CPU, site.beside)
        found["us"] = [1e6 * timed(CollectiveKind.ALL_REDUCE, Level.WORLD, 4096) for _ in range(2)]
        planner = cast(Any, SimpleNamespace(site=site))
        found["us"] += [Planner.sum_us(planner, 4096), Planner.sum_us(planner, 0)]
        found["alone"] = Site(site.ranks, site.cluster, site.transport, CPU).processors().count
        found["together"] = site.processors().count
        found["same"] = site.beside.do_the_same("facts", {"a": 1}), site.beside.do_the_same("facts", {"a": me % 2})
    return found


def test_groups_beside_each_other_time_collectives_together_and_count_each_others_ranks():
    everywhere = run_ranks(4, timed_together)
    for found in everywhere:
        assert found["us"] == everywhere[0]["us"], "one rank's time is that of all"
        *delayed, one_element = found["us"]
        assert min(delayed) >= 0.2e6
        assert one_element > 0
        assert (found["alone"], found["together"]) == (2.0, 1.0)
        assert found["same"] == (True, False)


def test_a_group_that_nobody_is_beside_asks_nobody():
    value = torch.tensor([3.0])
    NOBODY.largest(value)
    with NOBODY.together("the test"):
        assert NOBODY.gather("a topic", 3) == [3]
        assert NOBODY.from_first("a topic", lambda: 4) == 4
        assert NOBODY.do_the_same("a topic", {})
    assert value.item() == 3.0


def plans(modes: Sequence[str], megabits: Sequence[float]) -> list[str]:
    """Let each shard's ranks have a mode, and a table that prices packing by a speed of its own."""
    torch.manual_seed(3)
    mesh, shard = mesh_of_2_by_2(), dist.get_rank() % 2
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    cluster = Cluster.parse("2x1, inter 10mbit@30us, intra 40gbit@30us")
    table = CostTable(pack_gb_per_s=megabits[shard], launch_us=1e-3 / megabits[shard])
    outer = fxcomp.average_replicas(model, mesh["replicate"], cluster=cluster, costs=table, compress=modes[shard])
    for _ in range(7):
        model(torch.ones(4, 64)).sum().backward()
    assert outer.plan is not None
    found = [str(bucket.strategy) for bucket in outer.plan.buckets]
    outer.close()
    return found


def plans_of_both() -> tuple[list[str], list[str]]:
    return plans(["balanced", "balanced"], [5.0, 1e-5]), plans(["balanced", "lossless"], [5.0, 5.0])


def test_shards_follow_one_plan_though_their_tables_differ_unless_their_ranks_ask_for_different_things():
    together, apart = zip(*run_ranks(4, plans_of_both), strict=True)
    assert list(together) == [together[0]] * 4
    assert any("compress" in strategy for strategy in together[0])
    assert apart[0] == apart[2] != apart[1] == apart[3]
