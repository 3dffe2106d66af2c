"""Time the solving of error budgets, from nothing and again for a plan in force, with every family of compressors.

    PYTHONPATH=tests python benchmarks/solving.py --json solving.json

Gradients are drawn: matrices and biases whose errors differ as layers' do (`tests/helpers/drawn_errors.py`). Of a
solution again, `same buckets` is what a running step can follow at once, and `longest turn` is what one step waits for.
Processor time of one thread, the median of the runs; each run has tables of its own, so nothing is known beforehand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from helpers.drawn_errors import drawn_table

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.plan.budget import Budget, ErrorBudget
from fxcomp.plan.modes import Mode
from fxcomp.search.choose import choose
from fxcomp.search.descent.problem import TracedPrices
from fxcomp.search.resolve import Resolve
from fxcomp.search.terms import Terms
from fxcomp.search.workload import Gradient, Workload

COUNTS = (12, 60, 314, 1000)
SHAPES = ("8x1", "8x8")
BUDGETS = ("topk(0.01)", "int4 > int4", "powersgd(4)")


def workload_of(count: int) -> Workload:
    """Two matrices and a bias in turn, 40,000 to 2 million values each; backward takes 0.3 ms a gradient."""
    draw, backward_us = random.Random(count), 300.0 * count
    sides = (256, 512, 1024)
    shapes = [(draw.choice(sides),) if k % 3 == 2 else (draw.choice(sides), draw.choice(sides)) for k in range(count)]
    done, total, found = 0, sum(map(math.prod, shapes)), list[Gradient]()
    for k, shape in enumerate(shapes):
        done += math.prod(shape)
        found.append(Gradient(f"p{k}", shape, backward_us * done / total, 5.0))
    return Workload(tuple(found), backward_us)


def measure(repeats: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for repeat, count, shape, asked in itertools.product(range(repeats), COUNTS, SHAPES, BUDGETS):
        workload, costs = workload_of(count), CostTable()
        where = Cluster.parse(f"{shape}, inter 1gbit@50us, intra 100gbit@5us")
        budget = ErrorBudget.parse(asked)
        terms = [
            Terms(Mode.BALANCED, budget=Budget(budget, drawn_table(workload.shapes, seed)))
            for seed in (2 * repeat, 2 * repeat + 1)
        ]
        begun = time.process_time()
        choice = choose(workload, costs, where, terms[0])
        choosing_s = time.process_time() - begun
        again = {
            moves: _again(workload, costs, where, choice.fastest, terms[1], moves=moves) for moves in (False, True)
        }
        records.append(
            {
                "gradients": count,
                "cluster": shape,
                "budget": asked,
                "repeat": repeat,
                "choose_ms": 1e3 * choosing_s,
                "same_buckets_ms": sum(again[False]),
                "other_buckets_ms": sum(again[True]),
                "turns": len(again[True]),
                "longest_turn_ms": max(again[True]),
                "step_ms": choice.fastest_us / 1e3,
                "dense_ms": choice.dense_us / 1e3,
            }
        )
    return records


def _again(
    workload: Workload, costs: CostTable, where: Cluster, plan: Any, terms: Terms, *, moves: bool
) -> list[float]:
    """Milliseconds of each turn. Links' prices are traced once in a job, so not here."""
    traced = TracedPrices(costs, where)
    warm = Resolve(workload, traced, plan, Terms(Mode.BALANCED, budget=terms.budget and Budget(terms.budget.asked)))
    while warm.turn() is None:
        pass
    solving, turns, found = Resolve(workload, traced, plan, terms, moves=moves), list[float](), None
    while found is None:
        begun = time.process_time()
        found = solving.turn()
        turns.append(1e3 * (time.process_time() - begun))
    return turns


def show(records: list[dict[str, Any]]) -> None:
    print("| gradients | cluster | from nothing, ms | same buckets, ms | other buckets too, ms | longest turn, ms |")
    print("|---:|---|---:|---:|---:|---:|")
    for count, shape in itertools.product(COUNTS, SHAPES):
        runs = [each for each in records if (each["gradients"], each["cluster"]) == (count, shape)]
        columns = ("choose_ms", "same_buckets_ms", "other_buckets_ms", "longest_turn_ms")
        cells = (
            f"{statistics.median(run[name] for run in runs):.1f} ({max(run[name] for run in runs):.1f})"
            for name in columns
        )
        print(f"| {count:,} | {shape} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--json", type=Path, help="write the records to this file, too")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    records = measure(arguments.repeats)
    show(records)
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
