"""All ranks decide alike: nothing depends on the order of a set, which differs from process to process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import workloads
from helpers.graphs import COSTS, TWO_BY_TWO
from helpers.jobs import captured_step
from helpers.random_clusters import random_cluster, random_groups

from fxcomp.cluster.cluster import Level
from fxcomp.cost.collectives import FORMULAS, collective_us
from fxcomp.graph.run_passes import finished
from fxcomp.pipeline import Compiler
from fxcomp.plan.modes import Mode
from fxcomp.search.choose import choose


def prices() -> str:
    """Print prices, texts and orders of many clusters."""
    lines: list[str] = []
    for seed in range(40):
        chance = random.Random(seed)
        cluster = random_cluster(chance)
        group, beside = random_groups(chance, cluster)
        reach = cluster.topology_of(group, beside)
        found = [
            collective_us(kind, 1e6, reach, algorithm) for kind in FORMULAS for algorithm in (*FORMULAS[kind], None)
        ]
        levels = [str(cluster.topology_at(level)) for level in Level]
        groups = [cluster.groups(level) for level in Level]
        lines.append(f"{cluster} {cluster.to_json()} {reach} {levels} {groups} {found!r}")
    return "\n".join(lines)


def plans() -> list[str]:
    layers, where = workloads.layers(12), workloads.cluster(2, 2, "1gbit")
    return [choose(layers, workloads.COSTS, where, mode).plan.digest for mode in Mode]


def step() -> str:
    """Print everything that is decided and emitted for a real model."""
    captured = captured_step("transformer", 1.0)
    choice = choose(Compiler(TWO_BY_TWO).analyze(captured.graph, COSTS), COSTS, TWO_BY_TWO, Mode.LOSSY)
    program = finished(Compiler(TWO_BY_TWO, 1).emit(captured, choice.plan, COSTS))
    return f"{choice.plan}\n{program.source}\n{program.timeline}"


def everything() -> dict[str, str | list[str]]:
    return {"prices": prices(), "plans": plans(), "step": step()}


PRINT = """
import json, sys
sys.path[:0] = sys.argv[1:]
from test_hash_seeds import everything
print(json.dumps(everything()))
"""


@pytest.mark.slow
def test_prices_plans_and_emitted_steps_are_the_same_whatever_the_hash_seed():
    here = Path(__file__).parent
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT, str(here), str(here.parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "4294967295")
    ]
    one, other = (json.loads(process.communicate()[0]) for process in processes)
    assert one.keys() == {"prices", "plans", "step"}
    for what, text in one.items():
        assert text, what
        assert text == other[what], what
