"""Time `fxcomp explain` for jobs of more than 300 gradients on 1,024 ranks, or only the choice of a plan.

    python benchmarks/explain_speed.py              the command: from the start of Python to the printed report
    python benchmarks/explain_speed.py --decide     a choice: by gradients, cluster, mode and compute's processors

Everything runs on one processor, and each command in its own process. A `warm` run finds machine measurements in the
cache, an `empty` one makes them. Load on the machine affects `wall_s` more than `cpu_s` (processor time).
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from records import Records, options, table

from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cost.table import CostTable
from fxcomp.plan.modes import Mode
from fxcomp.search.choose import choose
from fxcomp.search.workload import Gradient, Workload

DEEP = Path(__file__).parents[1] / "examples" / "deep.py"
JOBS = {"resnet": f"{DEEP}:job", "gpt": f"{DEEP}:gpt"}
CLUSTER = "128x8, intra 100gbit@5us, inter 10gbit"
LIMIT_S = 5.0
"""Limit for the command on an idle machine."""
DECIDED = {314: 0.15, 3000: 1.5}
"""Numbers of gradients, and the limit in seconds for choosing a plan."""
DECIDED_FOR = ("2x1", "8x8")
MODES = (Mode.LOSSLESS, Mode.BALANCED, Mode.LOSSY)


def explained(repeats: int) -> Iterator[dict[str, Any]]:
    for repeat, (name, job) in itertools.product(range(repeats), JOBS.items()):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "warm"):
                environment = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
                before, begun = os.times(), time.perf_counter()
                command = [sys.executable, "-m", "fxcomp", "explain", job, "--cluster", CLUSTER]
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                wall_s, now = time.perf_counter() - begun, os.times()
                cpu_s = now.children_user + now.children_system - before.children_user - before.children_system
                yield {"job": name, "cache": state, "repeat": repeat, "wall_s": wall_s, "cpu_s": cpu_s}


def gradients(count: int) -> tuple[Gradient, ...]:
    """Return a bias and a matrix per layer, 14 million values in all; forward takes a third of 80 ms."""
    chance = random.Random(0)
    shares = [chance.choice((0.3, 0.3, 1, 1, 2, 4)) for _ in range(count // 2)]
    found: list[Gradient] = []
    for k, share in enumerate(shares):
        ready_us = 80_000.0 * (1 + 2 * (k + 1) / len(shares)) / 3.001
        for shape in ((384,), (int(14e6 * share / sum(shares)), 1)):
            found.append(Gradient(f"g{len(found)}", shape, ready_us, 2.0))
    return tuple(found)


def decided(repeats: int) -> Iterator[dict[str, Any]]:
    """Time choices over 1 Gbit/s links in turns; the first of each kind fills caches."""
    tables = {"own": CostTable(), "shared": CostTable(processors=Processors(1.0, 1.0))}
    for repeat, count, shape, mode, processors in itertools.product(
        range(repeats), DECIDED, DECIDED_FOR, MODES, tables
    ):
        workload = Workload(gradients(count), 80_000.0)
        where = Cluster.parse(f"{shape}, inter 1gbit@50us, intra 100gbit@5us")
        wall, cpu = time.perf_counter(), time.process_time()
        choice = choose(workload, tables[processors], where, mode)
        spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        what = {"gradients": count, "cluster": shape, "mode": mode.value, "processors": processors, "repeat": repeat}
        yield {**what, **spent, "step_ms": choice.fastest_us / 1e3, "dense_ms": choice.dense_us / 1e3}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--decide", action="store_true", help="time choices alone")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    keys = ("gradients", "cluster", "mode", "processors") if arguments.decide else ("job", "cache")
    kept = Records(arguments.json, limits_s=DECIDED if arguments.decide else LIMIT_S)
    for record in (decided if arguments.decide else explained)(arguments.repeats):
        kept.add(record)
    rows: list[tuple[object, ...]] = []
    for kind in dict.fromkeys(tuple(record[key] for key in keys) for record in kept.found):
        runs = [record["cpu_s"] for record in kept.found if tuple(record[key] for key in keys) == kind]
        limit = DECIDED[kind[0]] if arguments.decide else LIMIT_S
        rows.append((*kind, f"{min(runs):.3f}", f"{statistics.median(runs):.3f}", f"{runs[0]:.3f}", f"{limit:g}"))
    print(table(f"{' | '.join(keys)} | least s > | median > | the first > | limit >", rows))


if __name__ == "__main__":
    main()
