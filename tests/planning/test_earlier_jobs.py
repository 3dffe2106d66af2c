"""A job's measurements of its step serve the next job that takes the same step."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks

import fxcomp
from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import Link
from fxcomp.cost.measured import MeasuredCollective
from fxcomp.cost.roofline import Measured
from fxcomp.cost.table import CostTable
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning import decide, earlier_jobs
from fxcomp.planning.earlier_jobs import MOST_FILES, EarlierJobs, step_costs
from fxcomp.step.compiled_step import CompiledStep

FACTS, BYTES = ["4x1", "aten.mm f32[4,8] f32[8,2]"], 10_000_000
CLUSTER = Cluster(4, 1, intra=Link(5.0, 5.0), inter=Link(1.0, 25.0))
ALL_REDUCE = CollectiveKind.ALL_REDUCE


@pytest.fixture(autouse=True)
def forget() -> None:
    """Let the next job measure its own step; what compressors cost on this machine stays known."""
    shutil.rmtree(compat.cache_directory() / "jobs", ignore_errors=True)


def with_links(gb_per_s: float) -> CostTable:
    return CostTable(collectives={(ALL_REDUCE, "4x1"): MeasuredCollective.line(ALL_REDUCE, 4, 30.0, gb_per_s)})


def summing_us(gb_per_s: float) -> float:
    return with_links(gb_per_s).collective(ALL_REDUCE, Level.WORLD, BYTES, CLUSTER).us


def found(facts: list[str] = FACTS, gb_per_s: float = 1.0) -> dict[str, Any] | None:
    return EarlierJobs().find(facts, CLUSTER, BYTES, summing_us(gb_per_s))


def keep(facts: list[str] = FACTS) -> EarlierJobs:
    jobs = EarlierJobs()
    jobs.find(facts, CLUSTER, BYTES, summing_us(1.0))
    own: dict[str, Any] = {
        "compute": {"aten.mm": Measured(12.0)},
        "launch_us": 3.0,
        "contention": 1.4,
        "error": 0.2,
        "feed_us": 5.0,
        "host_us": 6.0,
    }
    jobs.keep(replace(with_links(1.0), **own).to_json())
    return jobs


def test_what_is_a_steps_own_comes_back():
    assert found() is None
    keep()
    known = found()
    assert known is not None
    taken = replace(CostTable(copy_gb_per_s=7.0), **step_costs(known, {}))
    assert taken.compute["aten.mm"].us == 12.0
    assert "by an earlier job (20" in taken.compute["aten.mm"].source
    assert (taken.launch_us, taken.contention, taken.error) == (3.0, 1.4, 0.2)
    assert (taken.feed_us, taken.host_us) == (5.0, 6.0)
    assert taken.copy_gb_per_s == 7.0, "what is not the step's own stays"


def test_another_step_is_measured():
    keep()
    assert found([*FACTS, "aten.relu f32[4,2]"]) is None


def test_what_has_changed_since_is_measured_again():
    keep().forget()
    assert found() is None


def test_a_file_that_cannot_be_read_is_set_aside():
    jobs = keep()
    assert jobs.path is not None
    jobs.path.write_text("{")
    with pytest.warns(UserWarning, match="measuring again"):
        assert found() is None


def test_the_oldest_steps_are_forgotten():
    for number in range(MOST_FILES + 3):
        path = keep([*FACTS, str(number)]).path
        assert path is not None
        os.utime(path, (number, number))
    keep()
    kept = [number for number in range(MOST_FILES + 3) if found([*FACTS, str(number)]) is not None]
    assert kept == list(range(4, MOST_FILES + 3))


def test_a_step_beside_a_much_slower_network_is_measured():
    keep()
    assert found(gb_per_s=0.8) is not None, "links are noisy"
    assert found(gb_per_s=0.3) is None
    assert found(gb_per_s=3.0) is None


def second_job(_: object = None) -> tuple[int, bool, bool, int]:
    """Compile the same step three times, at last with its file gone; return how often it was measured, and what of."""
    earlier_jobs.NOISE_US = math.inf  # of a small message on a busy machine
    asked: list[int] = []
    measure = decide.measure_step

    def measured(*arguments: Any) -> list[Any]:
        asked.append(1)
        return measure(*arguments)

    decide.measure_step = measured
    job = JOBS["mlp"]

    def compiled() -> CompiledStep:
        model = job.build()
        optimizer, batch = OPTIMIZERS["plain"](model.parameters()), job.batch(0, dist.get_rank())
        return fxcomp.compile_step(model, cross_entropy, optimizer, batch)

    first, second = compiled(), compiled()
    after_two = len(asked)
    is_same = all(second.costs.compute[key].us == cost.us for key, cost in first.costs.compute.items())
    says_so = all("by an earlier job (20" in cost.source for cost in second.costs.compute.values())
    if dist.get_rank() == 0:
        shutil.rmtree(compat.cache_directory() / "jobs")
    compiled()
    return after_two, is_same, says_so, len(asked)


def test_the_second_job_takes_over_what_the_first_one_measured():
    assert run_ranks(2, second_job) == [(1, True, True, 2)] * 2
