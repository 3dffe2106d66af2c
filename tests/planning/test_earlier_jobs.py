"""A job's measurements of its step serve the next job that takes the same step."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, captured_step, cross_entropy
from helpers.ranks import run_ranks

import fxcomp
from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.roofline import Measured
from fxcomp.cost.table import CostTable
from fxcomp.pipeline import Compiler
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning import decide
from fxcomp.planning.earlier_jobs import MOST_FILES, EarlierJobs, facts_of_step
from fxcomp.ranks import LOCAL_LINK
from fxcomp.site import Site
from fxcomp.step.compiled_step import CompiledStep

FACTS, BYTES = ["2x1", "aten.mm f32[4,8] f32[8,2]"], 10_000_000
CLUSTER = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(1.0, 25.0))
SITE = Site.imagined(CLUSTER, torch.device("cpu"))
ALL_REDUCE = CollectiveKind.ALL_REDUCE


@pytest.fixture(autouse=True)
def forget() -> None:
    """Let the next job measure its own step; what compressors cost on this machine stays known."""
    shutil.rmtree(compat.cache_directory() / "jobs", ignore_errors=True)


def found(facts: list[str] = FACTS) -> CostTable | None:
    return EarlierJobs().find(facts, SITE.ranks)


def keep(facts: list[str] = FACTS) -> EarlierJobs:
    jobs = EarlierJobs()
    jobs.find(facts, SITE.ranks)
    own: dict[str, Any] = {
        "compute": {"aten.mm": Measured(12.0)},
        "launch_us": 3.0,
        "contention": 1.4,
        "error": 0.2,
        "feed_us": 5.0,
        "host_us": 6.0,
    }
    jobs.keep(replace(CostTable(copy_gb_per_s=7.0), **own).to_json())
    return jobs


def test_what_is_a_steps_own_comes_back():
    assert found() is None
    keep()
    taken = found()
    assert taken is not None
    assert taken.compute["aten.mm"].us == 12.0
    assert "by an earlier job (20" in taken.compute["aten.mm"].source
    assert (taken.launch_us, taken.contention, taken.error) == (3.0, 1.4, 0.2)
    assert (taken.feed_us, taken.host_us) == (5.0, 6.0)
    assert taken.copy_gb_per_s == 7.0


def test_another_step_is_measured():
    keep()
    assert found([*FACTS, "aten.relu f32[4,2]"]) is None


def test_what_has_changed_since_is_measured_again():
    keep().forget()
    assert found() is None


def test_a_file_that_cannot_be_read_is_measured_again():
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


def test_links_that_are_given_are_not_taken_for_measured_ones():
    captured, others = captured_step("mlp"), replace(CLUSTER, inter=Link(1.0, 5.0))
    facts = [
        facts_of_step(captured.graph, Compiler(each), Site.imagined(each, torch.device("cpu")))
        for each in (CLUSTER, CLUSTER, others)
    ]
    assert facts[0] == facts[1] != facts[2]


def second_job() -> list[tuple[bool, bool]]:
    """Compile the same step three times, the last time with its file gone; tell which begin without a plan."""
    job = JOBS["mlp"]

    def compiled() -> CompiledStep:
        model = job.build()
        optimizer, batch = OPTIMIZERS["plain"](model.parameters()), job.batch(0, dist.get_rank())
        return fxcomp.compile_step(model, cross_entropy, optimizer, batch)

    first = compiled()
    found = [(first.in_force.decision.is_provisional, False)]
    while first.in_force.decision.is_provisional:
        first(job.batch(0, dist.get_rank()))
    for number in range(2):
        if number == 1 and dist.get_rank() == 0:
            shutil.rmtree(compat.cache_directory() / "jobs")
        dist.barrier()
        other = compiled()
        known = other.costs.compute
        is_taken_over = bool(known) and all(
            known[key].us == cost.us and "by an earlier job (20" in known[key].source
            for key, cost in first.costs.compute.items()
        )
        found.append((other.in_force.decision.is_provisional, is_taken_over))
    return found


def test_the_second_job_takes_over_what_the_first_one_measured():
    assert run_ranks(2, second_job) == [[(True, False), (False, True), (True, False)]] * 2


def checked(factor: float, links: float) -> tuple[str, list[str], bool, bool, bool]:
    """Let steps and links of a second job take so many times what was predicted; return what it says, and does."""
    job = JOBS["mlp"]
    model = job.build()
    optimizer, batch = OPTIMIZERS["plain"](model.parameters()), job.batch(0, dist.get_rank())
    first = fxcomp.compile_step(model, cross_entropy, optimizer, batch)
    while first.in_force.decision.is_provisional:
        first(batch)
    decide.NOISE_US = 0.0
    step = fxcomp.compile_step(model, cross_entropy, optimizer, batch)
    said, predicted_ms, costs = step.explain(), step.timeline.step_time_us / 1e3, step.costs
    step.times.slowest = lambda numbers, _: [factor * predicted_ms for _ in numbers]
    decide.TimedCollectives.__call__ = lambda _, *what: links * costs.collective(*what, CLUSTER_HERE).us / 1e6
    with pytest.raises(fxcomp.errors.CannotReplan, match=r"are being checked, .*\n.*Plan again after step 4"):
        step.replan()
    for _ in range(4):
        step(batch)
    has_file = any((compat.cache_directory() / "jobs").glob("*.json"))
    return said, list(step.notes), step.is_racing, step.in_force.decision.is_provisional, has_file


CLUSTER_HERE = Cluster(1, 2, intra=LOCAL_LINK, inter=LOCAL_LINK)


@pytest.mark.parametrize(
    ("factor", "links", "note"),
    [
        (1.0, 1.0, ""),
        (1.9, 0.6, ""),
        (2.1, 1.0, "step 4: steps take"),
        (0.4, 1.0, "step 4: steps take"),
        (1.0, 2.1, "step 4: links take another time"),
        (1.0, 0.4, "step 4: links take another time"),
    ],
)
def test_the_first_steps_of_a_second_job_check_what_the_first_one_measured(factor: float, links: float, note: str):
    for said, notes, is_racing, is_provisional, has_file in run_ranks(2, checked, factor, links):
        assert "plans will race after step 4: an earlier job's costs are checked until then" in " ".join(said.split())
        again = [each for each in notes if "the first steps are timed again" in each]
        assert [each.startswith(note) for each in again] == [True] * bool(note)
        assert is_racing
        assert is_provisional is bool(note)
        assert has_file is not is_provisional
