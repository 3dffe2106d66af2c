"""How long `fxcomp explain` takes for jobs of more than 300 gradients on 1,024 ranks, on one processor.

    python benchmarks/explain_speed.py              a table
    python benchmarks/explain_speed.py --json       records: job, cache, wall_s, cpu_s, phases
    python benchmarks/explain_speed.py --decide     how long a choice takes; records have gradients, cluster, mode

Every run is a process of its own, from the start of Python to the printed report, pinned to one processor. `warm` finds
what earlier runs measured of the machine in the cache, `empty` measures it. What else runs on the machine shows in
`wall_s`, less in `cpu_s` and the phases, which are seconds of the processor.
"""

import argparse
import gc
import io
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEEP = HERE.parent / "examples" / "deep.py"
JOBS = {"resnet": f"{DEEP}:job", "gpt": f"{DEEP}:gpt"}
CLUSTER = "128x8"
LIMIT_S = 5.0
"""What the report promises, on an otherwise idle machine."""
DECIDED = {314: 0.15, 3000: 1.5}
"""Numbers of gradients, and how many seconds a choice among their plans may take."""
DECIDED_FOR = ("2x1", "8x8")


def ask(job: str) -> None:
    """Answer as the command does, and print how long each phase took."""
    marks: list[tuple[str, float]] = [("start and import", 0.0)]

    def next_phase(name: str) -> None:
        marks.append((name, time.process_time()))

    from fxcomp.cluster.cluster import Cluster
    from fxcomp.cluster.link import Link
    from fxcomp.frontends.job import load_job
    from fxcomp.frontends.what_if import what_if
    from fxcomp.gc_paused import gc_paused
    from fxcomp.report.terminal import print_report

    next_phase("load the job")
    cluster = Cluster.parse(CLUSTER, intra=Link.parse("100gbit", alpha_us=5.0), inter=Link.parse("10gbit"))
    with gc_paused():
        answer = what_if(load_job(job), cluster, tell=next_phase)
        next_phase("report")
        print_report(answer.explanation(), io.StringIO())
        next_phase("end")
        gc.freeze()  # as the command does
    phases = {name: after - before for (name, before), (_, after) in itertools.pairwise(marks)}
    print(json.dumps({"phases": phases, "gradients": len(answer.workload.gradients)}))


def timed(job: str, cache: str, processor: int) -> dict[str, Any]:
    """One run in a process of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    before, begun = os.times(), time.time()
    done = subprocess.run(
        [sys.executable, __file__, "--ask", job],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {processor}),
    )
    wall_s, after = time.time() - begun, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall_s": wall_s, "cpu_s": cpu_s, **json.loads(done.stdout.splitlines()[-1])}


def measure(repeats: int) -> list[dict[str, Any]]:
    """Each job with an empty cache and then a warm one, in turns."""
    processor = min(os.sched_getaffinity(0))
    records: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for name, job in JOBS.items():
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "warm"):
                    found = timed(job, cache, processor)
                    records.append({"job": name, "cache": state, "repeat": repeat, **found})
    return records


def gradients(count: int) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Shapes and ready times: a bias and a matrix a layer, 14 million values; forward takes a third of 80 ms."""
    chance = random.Random(0)
    shares = [chance.choice((0.3, 0.3, 1, 1, 2, 4)) for _ in range(count // 2)]
    found: list[tuple[tuple[int, ...], float]] = []
    for k, share in enumerate(shares):
        ready_us = 80_000.0 * (1 + 2 * (k + 1) / len(shares)) / 3.001
        found += [((384,), ready_us), ((int(14e6 * share / sum(shares)), 1), ready_us)]
    return tuple(found)


def decide(repeats: int) -> list[dict[str, Any]]:
    """Time choices between 1 Gbit/s links, in turns; the first of each kind includes what is kept for later ones."""
    from fxcomp.cluster.cluster import Cluster
    from fxcomp.cluster.processors import Processors
    from fxcomp.cost.table import CostTable
    from fxcomp.plan.modes import Mode
    from fxcomp.search.choose import choose
    from fxcomp.search.workload import Gradient, Workload

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tables = {"own": CostTable(), "shared": CostTable(processors=Processors(1.0, 1.0))}
    records: list[dict[str, Any]] = []
    for repeat, count, shape, mode, processors in itertools.product(range(repeats), DECIDED, DECIDED_FOR, Mode, tables):
        drawn = [Gradient(f"g{k}", *each, 2.0) for k, each in enumerate(gradients(count))]
        where = Cluster.parse(f"{shape}, inter 1gbit@50us, intra 100gbit@5us")
        wall, cpu = time.perf_counter(), time.process_time()
        choice = choose(Workload(tuple(drawn), 80_000.0), tables[processors], where, mode)
        spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        what = {"gradients": count, "cluster": shape, "mode": mode.value, "processors": processors, "repeat": repeat}
        records.append({**what, **spent, "step_ms": choice.fastest_us / 1e3, "dense_ms": choice.dense_us / 1e3})
    return records


def show_decisions(records: list[dict[str, Any]]) -> None:
    print("| gradients | cluster | mode | compute's processors | least s | median | the first | limit |")
    print("|---:|---|---|---|---:|---:|---:|---:|")
    keys = ("gradients", "cluster", "mode", "processors")
    for kind in dict.fromkeys(tuple(record[key] for key in keys) for record in records):
        runs = [record for record in records if tuple(record[key] for key in keys) == kind]
        cpu_s = [run["cpu_s"] for run in runs]  # what else runs shows in it less than in wall_s
        times = f"{min(cpu_s):.3f} | {statistics.median(cpu_s):.3f} | {cpu_s[0]:.3f} | {DECIDED[kind[0]]:g}"
        print(f"| {' | '.join(map(str, kind))} | {times} |")


def show(records: list[dict[str, Any]]) -> None:
    print(f"explain --cluster {CLUSTER}, seconds: the median of the runs (the fastest), limit {LIMIT_S:g} s\n")
    for name in JOBS:
        for state in ("empty", "warm"):
            runs = [record for record in records if (record["job"], record["cache"]) == (name, state)]
            wall, cpu = ([run[key] for run in runs] for key in ("wall_s", "cpu_s"))
            print(f"{name}, {runs[0]['gradients']} gradients, {state} cache")
            print(f"  {'by the clock':<52}{statistics.median(wall):6.2f} ({min(wall):.2f})")
            print(f"  {'of the processor':<52}{statistics.median(cpu):6.2f} ({min(cpu):.2f}), of which")
            for phase in runs[0]["phases"]:
                print(f"    {phase:<50}{statistics.median(run['phases'][phase] for run in runs):6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    parser.add_argument("--decide", action="store_true", help="time choices alone")
    parser.add_argument("--ask", metavar="JOB", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        ask(arguments.ask)
        return
    if arguments.decide:
        decided = decide(arguments.repeats)
        if arguments.json:
            print(json.dumps({"limits_s": DECIDED, "records": decided}, indent=1))
        else:
            show_decisions(decided)
        return
    records = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps({"cluster": CLUSTER, "limit_s": LIMIT_S, "records": records}, indent=1))
    else:
        show(records)


if __name__ == "__main__":
    main()
