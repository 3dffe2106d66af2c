"""Measure what looks at gradients take of a training step's time, on two ranks on this machine.

    python benchmarks/error_looks.py --models gpt resnet --steps 400 --json error_looks.json

Two compiled steps of the same job take turns, ten steps each, one of them with looks (`CompiledStep.watch_errors`). Of
each step both ranks' wall time and processor time are kept. What looks take is what their steps take beyond the median
of steps without one, by either clock, over the time of all steps. Both jobs must end with the same parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from fxcomp.commands.demo.launch_ranks import join, run_ranks

MARK = "@looks "  # begins a line that rank 0 prints for the parent
BLOCK = 10
RANKS = 2


def rank_main(arguments: argparse.Namespace) -> None:
    """Train each model; rank 0 sends the records."""
    import torch
    import torch.distributed as dist

    join()
    torch.set_num_threads(1)
    for name in arguments.models:
        record = looked(name, arguments)
        if dist.get_rank() == 0:
            print(MARK + json.dumps(record), flush=True)
    dist.destroy_process_group()


def looked(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a model twice, with looks and without, and compare their steps."""
    import torch
    from models import MODELS
    from torch import distributed as dist
    from torch import nn

    import fxcomp
    from fxcomp.plan.error_feedback import ErrorFeedback

    def compiled() -> Any:
        torch.manual_seed(0)
        job = MODELS[name]()
        feedback = ErrorFeedback(allow_diverging=True)
        return job, fxcomp.compile_step(
            job.model,
            job.loss_fn,
            job.optimizer,
            job.batch,
            max_grad_norm=job.max_grad_norm,
            compress=fxcomp.Compress(plan=arguments.plan, feedback=feedback),
            checks=fxcomp.Checks(verify="never"),
        )

    rank = dist.get_rank()
    (job, step), (other_job, other) = compiled(), compiled()
    step.watch_errors()
    watch, looks = step.errors, list[tuple[int, tuple[int, ...]]]()
    mine, without = list[tuple[float, float]](), list[tuple[float, float]]()

    def block(run: Any, of_job: Any, first: int, times: list[tuple[float, float]]) -> None:
        dist.barrier()
        for number in range(first, first + BLOCK):
            batch, before, families = of_job.batch_at(number, rank), watch.looks, watch.schedule.families
            begin, spent = time.perf_counter(), time.process_time()
            run(batch)
            times.append((1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - spent)))
            if run is step and watch.looks > before:
                looks.append((number, families))

    for first in range(0, arguments.steps, BLOCK):
        block(step, job, first, mine)
        block(other, other_job, first, without)
    both = torch.tensor([mine, without], dtype=torch.float64)  # (2, steps, 2 clocks)
    slowest, summed = both[..., 0].contiguous(), both[..., 1].contiguous()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(summed)
    parameters = [nn.utils.parameters_to_vector(each.model.parameters()).detach() for each in (job, other_job)]
    record = {
        "model": name, "plan": arguments.plan, "steps": arguments.steps, "looks": looks,
        "elements": sum(each.numel() for each in job.model.parameters()), "share_said": watch.share,
        "same_parameters": bool(torch.equal(*parameters)), "measured": step.error_table.is_measured,
    }  # fmt: skip
    for clock, times in (("wall", slowest), ("processor", summed)):
        record[clock] = taken(times[0].tolist(), times[1].tolist(), [number for number, _ in looks])
    step.close()
    other.close()
    return record


def taken(times: list[float], without: list[float], looks: list[int]) -> dict[str, float]:
    """What looks take: the share of the time, the longest step in medians, and that of the steps without looks."""
    quiet = [ms for number, ms in enumerate(times) if number not in looks and number >= BLOCK]
    median = statistics.median(quiet)
    extra = [times[number] - median for number in looks]
    return {
        "step_ms": median,
        "step_ms_without": statistics.median(without[BLOCK:]),
        "look_ms": statistics.median(extra) if extra else 0.0,
        "share": sum(extra) / (sum(quiet) + sum(extra) + median * len(looks)),
        "longest_look": max((times[number] / median for number in looks), default=0.0),
        "longest_other": max(quiet) / median,
    }


def main() -> int:
    arguments = parse()
    if arguments.rank:
        rank_main(arguments)
        return 0
    given = ["--models", *arguments.models, "--steps", str(arguments.steps), "--plan", arguments.plan, "--rank"]
    output = run_ranks([__file__, *given], ranks_per_host=RANKS, timeout_s=arguments.timeout)[0]
    records = [json.loads(line[len(MARK) :]) for line in output.splitlines() if line.startswith(MARK)]
    for record in records:
        steps = [number for number, _ in record["looks"]]
        print(f"{record['model']}: {len(steps)} looks at steps {steps}, same parameters: {record['same_parameters']}")
        for clock in ("wall", "processor"):
            print(f"  {clock:<10}", *(f"{what} {number:.4g}" for what, number in record[clock].items()), sep="  ")
        print(f"  the schedule's own share: {record['share_said']:.2%}")
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), "records": records}, indent=1) + "\n"
        )
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet"])
    parser.add_argument("--plan", default="topk(0.01)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--json", help="write the records here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
