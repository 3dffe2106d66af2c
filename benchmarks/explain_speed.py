"""How long `fxcomp explain` takes for jobs of more than 300 gradients on 1,024 ranks, on one processor.

    python benchmarks/explain_speed.py              a table
    python benchmarks/explain_speed.py --json       records: job, cache, wall_s, cpu_s, phases

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
    parser.add_argument("--ask", metavar="JOB", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        ask(arguments.ask)
        return
    records = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps({"cluster": CLUSTER, "limit_s": LIMIT_S, "records": records}, indent=1))
    else:
        show(records)


if __name__ == "__main__":
    main()
