"""Time the start of training the example GPT: a first job on a machine, a second one, and DDP.

    python benchmarks/compile_time.py --json compile_time.json
    python benchmarks/compile_time.py --hosts 2 --inter 100mbit,1gbit --steps 200 --against ../before --turns 1

A job has one process per rank. The first job has an empty cache. Records are medians over turns:

    call         seconds of `compile_step`, or of wrapping the model
    later        median of the fourth and fifth step
    processor    processor time of the call and the first step
    plan         steps before a chosen plan is followed
    wait         longest step after the first
    until_N      seconds from the call to the end of step N

A `dense` job includes capture, agreement and the emission of one program. `--hosts` runs on shaped hosts of one rank.
`before` is a first job of another checkout with built kernels (`git worktree add ../before COMMIT`).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import Records, options
from shaped import UNSHAPED, Teller, ends_well, is_rank, join, run, set_rate
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.frontends.job import Job, load_job

EXAMPLE = f"{Path(__file__).parents[1]}/examples/gpt.py:job"
UNTIL = (30, 60, 100, 200, 400)


def rank_main(name: str, inter: str, model: str, steps: int) -> None:
    torch.set_num_threads(1)
    join()
    set_rate(inter)
    gpt = load_job(model)
    worked, begun = time.process_time(), time.perf_counter()
    compress = "dense" if name == "dense" else "balanced"
    step: Any
    if name == "ddp":
        step = ddp_step(gpt)
    else:
        given: Any = (gpt.model, gpt.loss_fn, gpt.optimizer, gpt.batch)
        step = fxcomp.compile_step(*given, compress=compress, max_grad_norm=gpt.max_grad_norm)
    found, took, plan = {"call_s": time.perf_counter() - begun}, list[float](), 0
    for number in range(steps):
        plan += name in ("first", "second") and step.in_force.decision.is_provisional
        begun = time.perf_counter()
        step(gpt.batch)
        took.append(time.perf_counter() - begun)
        if number == 0:
            found["processor_s"] = time.process_time() - worked
    found |= {"first_s": took[0], "later_s": statistics.median(took[3:5]), "wait_s": max(took[1:]), "plan": float(plan)}
    found |= {f"until_{n}_s": found["call_s"] + sum(took[:n]) for n in UNTIL if n <= steps}
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
        rank_main(**json.loads(sys.argv[1]))
        return
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, help="of one rank each, instead of ranks on this machine")
    parser.add_argument("--inter", default=UNSHAPED, help="bandwidths between hosts")
    parser.add_argument("--model", default=EXAMPLE, metavar="FILE:FUNCTION")
    parser.add_argument("--steps", type=int, default=12, help="default 12, which choose a plan")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--jobs", default="ddp,dense,first,second", help="which, besides the other checkout's")
    arguments = parser.parse_args()
    kept, names, path = Records(arguments.json), arguments.jobs.split(","), os.environ.get("PYTHONPATH", "")
    for inter in arguments.inter.split(","):
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in names + ["before"] * bool(arguments.against)}
        for _ in range(arguments.turns):
            with tempfile.TemporaryDirectory() as caches:
                for name, found in turns.items():
                    told = {"name": name, "inter": inter, "model": arguments.model, "steps": arguments.steps}
                    os.environ["PYTHONPATH"] = str(arguments.against.resolve()) if name == "before" else path
                    os.environ["XDG_CACHE_HOME"] = f"{caches}/{'before' if name == 'before' else 'now'}"
                    each = 1 if arguments.hosts else arguments.ranks
                    run([__file__, json.dumps(told)], found.append, hosts=arguments.hosts, ranks_per_host=each)
                    print(inter, name, found[-1], flush=True)
        ranks = arguments.hosts or arguments.ranks
        for name, found in turns.items():
            medians = {key: round(statistics.median(each[key] for each in found), 3) for key in found[0]}
            kept.add({"ranks": ranks, "inter": inter, "model": Path(arguments.model).name, "job": name, **medians})


if __name__ == "__main__":
    sys.exit(ends_well(main))
