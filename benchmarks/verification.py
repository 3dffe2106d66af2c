"""What verifying a step takes, on the example GPT, and with it a job of two thousand steps that verifies its sample.

    python benchmarks/verification.py --ranks 2 --json verification.json

Every other step of one compiled step is verified, so that both kinds are timed in turns, on the same machine in the
same minute. Of each step the slowest rank counts. A job of 2,000 steps verifies nine: 2, 5, 10, 20, 50, 100, 200, 500
and 1000.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fxcomp
from fxcomp.commands.demo.gpt import gpt_job
from fxcomp.plan.verified_steps import VerifiedSteps
from fxcomp.step.verify.verifier import needed_bytes

JOB_STEPS = 2000
WARM = 2


def rank_main(rank: int, arguments: argparse.Namespace, meeting: str, out: str) -> None:
    """Train; rank 0 writes the times of all steps, the slowest rank's of each, in ms."""
    torch.set_num_threads(arguments.threads)
    if arguments.ranks > 1:
        store = dist.FileStore(meeting, arguments.ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=arguments.ranks, timeout=timedelta(minutes=9)
        )
    job = gpt_job()
    assert job.next_batch is not None, "the example draws batches"
    plan = arguments.plan if arguments.ranks > 1 else None
    step = fxcomp.compile_step(
        job.model,
        job.loss_fn,
        job.optimizer,
        job.batch,
        max_grad_norm=job.max_grad_norm,
        compress=plan,
        checks=fxcomp.Checks(verify=2),
    )
    times: list[float] = []
    for number in range(WARM + 2 * arguments.pairs):
        batch = job.next_batch(number, rank)
        start = time.perf_counter()
        step(batch)
        times.append(1e3 * (time.perf_counter() - start))
    assert not step.notes, step.notes
    slowest = torch.tensor(times)
    if arguments.ranks > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        held = needed_bytes(step.training, job.batch)
        parameters = sum(p.numel() for p in job.model.parameters())
        Path(out).write_text(json.dumps({"ms": slowest.tolist()[WARM:], "held": held, "parameters": parameters}))
    if arguments.ranks > 1:
        dist.destroy_process_group()


def record_of(arguments: argparse.Namespace, times: list[float], held: int, parameters: int) -> dict[str, Any]:
    """What was measured, and what follows for a job."""
    verified, plain = times[0::2], times[1::2]
    extra = [with_it - without for with_it, without in zip(verified, plain, strict=True)]
    sample = len([step for step in range(JOB_STEPS) if step in VerifiedSteps.parse("sampled")])
    quartiles = statistics.quantiles(extra, n=4)
    share = sample * statistics.median(extra) / (JOB_STEPS * statistics.median(plain))
    return {
        "machine": platform.processor() or platform.machine(), "processors": os.cpu_count(), "torch": torch.__version__,
        "ranks": arguments.ranks, "threads": arguments.threads, "plan": arguments.plan, "parameters": parameters,
        "pairs": len(extra), "plain_ms": statistics.median(plain), "verified_ms": statistics.median(verified),
        "extra_ms": statistics.median(extra), "extra_ms_quartiles": [quartiles[0], quartiles[2]],
        "extra_steps": statistics.median(extra) / statistics.median(plain), "held_bytes": held,
        "verified_steps_in_job": sample, "job_steps": JOB_STEPS, "share_of_job": share,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--plan", default="dense")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting, out = str(Path(folder) / "meeting"), str(Path(folder) / "times.json")
        mp.spawn(rank_main, (arguments, meeting, out), nprocs=arguments.ranks)
        found = json.loads(Path(out).read_text())
    record = record_of(arguments, found["ms"], found["held"], found["parameters"])
    low, high = record["extra_ms_quartiles"]
    print(
        f"{arguments.ranks} ranks, {arguments.plan}: a step takes {record['plain_ms']:.0f} ms, a verified one"
        f" {record['extra_ms']:.0f} ms more ({low:.0f} to {high:.0f}, {record['pairs']} pairs):"
        f" {record['extra_steps']:.2f} steps. {record['verified_steps_in_job']} of {JOB_STEPS} steps:"
        f" {100 * record['share_of_job']:.2f} % of the job"
    )
    if arguments.json:
        known = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps([*known, record], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
