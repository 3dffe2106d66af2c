"""Time a training step of `fxcomp.compile_model(model)` with Inductor, beside `backend="inductor"`'s.

    python benchmarks/torch_compile_step.py --model gpt --rounds 20 --json torch_compile_step.json

There is no network: fxcomp's collectives end at once, with this rank's own values, so that what is left is how forward
and backward run, and what packing and handing out gradients takes. Three contestants take turns on this rank, step by
step:

    inductor         backend="inductor"
    fxcomp           compile_model(inductor=True)
    fxcomp_eager     compile_model(inductor=False)

A round's ratio is a contestant's step over the step of `inductor` beside it; its median is to be at most 1.05.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from records import Records, options, show_progress, spread, table
from torch.multiprocessing.spawn import spawn

import fxcomp
from fxcomp.frontends.torch_compile import compiled_model
from fxcomp.runtime.transport import NullTransport

RANKS = 2
OTHER = {"fxcomp": True, "fxcomp_eager": False}
"""Contestants by what their option `inductor` is."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each contestant that count")
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(run, (parser.parse_args(), port), nprocs=RANKS)


def run(rank: int, arguments: Any, port: int) -> None:
    """Compile on both ranks; rank 0 times alone, since without a network nobody is waited for."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo")
    torch.set_num_threads(arguments.threads)
    steps = {"inductor": step_of(arguments.model, "inductor")}
    for name, inductor in OTHER.items():
        steps[name] = step_of(arguments.model, "fxcomp", inductor=inductor)
    dist.barrier()
    if rank == 0:
        tell(arguments, times_of(steps, arguments.rounds))
    dist.barrier()
    dist.destroy_process_group()


def step_of(model: str, backend: str, **choices: bool) -> Callable[[], float]:
    """Make a training step that returns the seconds it took. It has run twice, with a network the first time."""
    job = MODELS[model]()
    if backend == "fxcomp":
        call: Any = fxcomp.compile_model(job.model, "dense", **choices)
    else:
        call = torch.compile(job.model, backend=backend)

    def step() -> float:
        start = time.perf_counter()
        job.optimizer.zero_grad(set_to_none=True)
        job.loss_fn(call, job.batch).backward()
        job.optimizer.step()
        return time.perf_counter() - start

    step()
    if backend == "fxcomp":
        runtime = compiled_model(job.model).runtime
        runtime.transport = NullTransport(runtime.transport)
    step()
    return step


def times_of(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Let the contestants take turns; another one begins each round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        show_progress(f"round {number + 1} of {rounds}")
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            times[name].append(steps[name]())
    show_progress("")
    return times


def tell(arguments: Any, times: dict[str, list[float]]) -> None:
    """Write the records and print a table."""
    records = Records(arguments.json, model=arguments.model, threads=arguments.threads, rounds=arguments.rounds)
    for name, seconds in times.items():
        ratios = spread([mine / beside for mine, beside in zip(seconds, times["inductor"], strict=True)])
        records.add({"contestant": name, "ratio": ratios["median"], **spread([1e3 * each for each in seconds])})
    rows = [(r["contestant"], f"{r['median']:.1f}", f"{r['ratio']:.3f}") for r in records.found]
    print(table("step | ms > | of inductor >", rows))


if __name__ == "__main__":
    main()
