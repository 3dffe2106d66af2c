"""Time the way from the call to full speed on the example GPT: a first job on a machine, a second one, and DDP.

    python benchmarks/compile_time.py --json compile_time.json

Each job is a process a rank. `call` is the whole call of `compile_step`, or of the wrapper, `later` the median of the
fourth and fifth step. `processor` is the processor time of the call and the first step, `plan` the number of steps
before a chosen plan is followed, and `wait` the longest pause between two steps. A step that is told to be dense takes
capture, agreement and the emission of one program. The first job has an empty cache. Records have medians of turns.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from records import Records, options
from shaped import Teller, ends_well, is_rank, join, run
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.commands.demo.gpt import gpt_job
from fxcomp.frontends.job import Job, compile_arguments

STEPS = 12  # they choose a plan


def rank_main(name: str) -> None:
    torch.set_num_threads(1)
    join()
    gpt = gpt_job()
    worked, begun = time.process_time(), time.perf_counter()
    compress = "dense" if name == "dense" else "balanced"
    step = ddp_step(gpt) if name == "ddp" else fxcomp.compile_step(**compile_arguments(gpt), compress=compress)
    found, took, plan = {"call_s": time.perf_counter() - begun}, list[float](), 0
    for number in range(STEPS):
        plan += isinstance(step, fxcomp.CompiledStep) and step.in_force.decision.is_provisional
        begun = time.perf_counter()
        step(gpt.batch)
        took.append(time.perf_counter() - begun)
        if number == 0:
            found["processor_s"] = time.process_time() - worked
    found |= {"first_s": took[0], "later_s": statistics.median(took[3:5]), "wait_s": max(took[1:]), "plan": float(plan)}
    Teller().send(found)
    torch.distributed.destroy_process_group()


def ddp_step(gpt: Job) -> Callable[[Any], object]:
    optimizer: Any = gpt.optimizer
    model = DistributedDataParallel(gpt.model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss: Any = gpt.loss_fn(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.max_grad_norm or math.inf)
        optimizer.step()

    return step


def main() -> None:
    if is_rank():
        rank_main(sys.argv[1])
        return
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in ("ddp", "dense", "first", "second")}
    for _ in range(arguments.turns):
        with tempfile.TemporaryDirectory() as os.environ["XDG_CACHE_HOME"]:
            for name, found in turns.items():
                run([__file__, name], found.append, hosts=None, ranks_per_host=arguments.ranks, timeout_s=300)
    kept = Records(arguments.json)
    for name, found in turns.items():
        medians = {key: round(statistics.median(each[key] for each in found), 3) for key in found[0]}
        kept.add({"ranks": arguments.ranks, "job": name, **medians})
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in medians.items()))


if __name__ == "__main__":
    sys.exit(ends_well(main))
