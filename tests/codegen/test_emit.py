"""The emitted source says what the graph says, in an order that is the same everywhere."""

from __future__ import annotations

import ast

import pytest
from helpers.graphs import COSTS, TWO, TWO_BY_TWO, linear_step, one_bucket, two_buckets

from fxcomp.cluster.cluster import Cluster
from fxcomp.graph.captured import Captured
from fxcomp.graph.run_passes import finished
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Plan

DENSE = "all_reduce@world"
INT4 = "compress(int4)@gpu > all_gather@world > decompress@gpu"
ON_CPU = "reduce_scatter@intra > compress(topk(0.25))@cpu > all_gather@inter > decompress@cpu > all_gather@intra"


def emitted(plan: Plan, cluster: Cluster, *, buffer: bool = False, clip: bool = False) -> str:
    graph = linear_step(buffer=buffer, clip=clip)
    captured = Captured(graph, None, (), False, ("fc.bias", "fc.weight"), (), lambda _: True)
    return finished(Compiler(cluster).emit(captured, plan, COSTS)).source


def lines_of(source: str, call: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if f"rt.{call}(" in line]


def test_a_step_with_a_dense_and_a_compressed_bucket(golden):
    golden("emit/two_buckets.py.txt", emitted(two_buckets(DENSE, INT4), TWO))


def test_an_offloaded_hierarchical_step(golden):
    golden("emit/hierarchical_cpu.py.txt", emitted(one_bucket(ON_CPU), TWO_BY_TWO))


def test_a_step_with_buffers_and_clipping(golden):
    golden("emit/buffers_and_clipping.py.txt", emitted(one_bucket(DENSE), TWO, buffer=True, clip=True))


@pytest.mark.parametrize("plan", [two_buckets(DENSE, INT4), one_bucket(INT4), two_buckets(INT4, DENSE)])
def test_every_launch_is_awaited_and_no_value_is_used_after_it_is_deleted(plan: Plan):
    source = emitted(plan, TWO)
    assert len(lines_of(source, "launch")) == len(lines_of(source, "wait")) == len(plan.buckets)
    step = next(f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == "step")
    deleted: set[str] = set()
    for statement in step.body:
        names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
        assert not names & deleted
        if isinstance(statement, ast.Delete):
            deleted |= names


def test_updates_begin_behind_the_line_that_announces_them():
    lines = emitted(two_buckets(DENSE, INT4), TWO).splitlines()
    announced = next(i for i, line in enumerate(lines) if "rt.before_update(" in line)
    updates = [i for i, line in enumerate(lines) if line.startswith("    update_") or " = update_" in line]
    assert updates
    assert min(updates) > announced


def test_what_is_emitted_imports_compressors_and_torch_alone():
    tree = ast.parse(emitted(two_buckets(DENSE, INT4), TWO))
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    plain = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert modules == {"fxcomp.compressors"}
    assert plain == {"math", "operator", "torch"}
