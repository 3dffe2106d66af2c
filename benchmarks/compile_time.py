"""Time the way from the call to full speed on the example GPT: a first job on a machine, a second one, and DDP.

    python benchmarks/compile_time.py --json compile_time.json

Each job is a process a rank. `call` is the whole call of `compile_step`, or of the wrapper; `capture` and `emit` are
parts of it on rank 0, and what is left is agreeing, and in a second job measuring the links. `first` is the first step,
`later` the median of the third and fourth, `processor` the processor time of the call and the first step, `plan` the
number of the step from which a chosen plan is followed, and `wait` the longest pause between two steps until then. The
first job begins with an empty cache, the second with what the first one left. Importing is not counted. A record has
the median of the turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from records import Records, options
from shaped import Teller, ends_well, is_rank, join, run
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp import pipeline
from fxcomp.capture import step_capture
from fxcomp.commands.demo.gpt import gpt_job
from fxcomp.frontends.job import Job
from fxcomp.graph.run_passes import finished, run_in_turns

PARTS = ("capture", "emit")
STEPS = 12
"""So many steps choose a plan."""


def rank_main(name: str) -> None:
    torch.set_num_threads(1)
    join()
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(what: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            begun = time.perf_counter()
            try:
                return do(*arguments, **keywords)
            finally:
                spent[what] += time.perf_counter() - begun

        return call

    step_capture.capture = timed("capture", step_capture.capture)
    pipeline.run_in_turns = timed("emit", lambda *given: iter_of(finished(run_in_turns(*given))))
    gpt = gpt_job()
    worked, begun = time.process_time(), time.perf_counter()
    step = ddp_step(gpt) if name == "ddp" else compiled(gpt)
    found: dict[str, float] = {
        "call_s": time.perf_counter() - begun,
        **{f"{part}_s": seconds for part, seconds in spent.items()},
    }
    took, plan = list[float](), 0
    for number in range(STEPS):
        begun = time.perf_counter()
        step(gpt.batch)
        took.append(time.perf_counter() - begun)
        if number == 0:
            found["processor_s"] = time.process_time() - worked
        if not plan and isinstance(step, fxcomp.CompiledStep) and not step.in_force.decision.is_provisional:
            plan = number + 1
    found |= {"first_s": took[0], "later_s": statistics.median(took[3:5]), "wait_s": max(took[1:]), "plan": float(plan)}
    Teller().send(found)
    torch.distributed.destroy_process_group()


def iter_of(result: Any) -> Generator[None, None, Any]:
    """Turns of which the last returns what is made already: made in one go, it is timed as a whole."""
    yield
    return result


def compiled(gpt: Job) -> fxcomp.CompiledStep:
    return fxcomp.compile_step(gpt.model, gpt.loss_fn, gpt.optimizer, gpt.batch, max_grad_norm=gpt.max_grad_norm)


def ddp_step(gpt: Job) -> Callable[[Any], object]:
    optimizer: Any = gpt.optimizer
    model = DistributedDataParallel(gpt.model) if torch.distributed.get_world_size() > 1 else gpt.model

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss: Any = gpt.loss_fn(model, batch)
        loss.backward()
        if gpt.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.max_grad_norm)
        optimizer.step()

    return step


def main() -> None:
    if is_rank():
        rank_main(sys.argv[1])
        return
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    kept = Records(arguments.json)
    for ranks in arguments.ranks:
        turns: dict[str, list[dict[str, float]]] = {"ddp": [], "first": [], "second": []}
        for _ in range(arguments.turns):
            with tempfile.TemporaryDirectory() as cache:
                os.environ["XDG_CACHE_HOME"] = cache
                for name, found in turns.items():
                    run([__file__, name], found.append, hosts=None, ranks_per_host=ranks, timeout_s=300)
        for name, found in turns.items():
            medians = {key: round(statistics.median(each[key] for each in found), 3) for key in found[0]}
            kept.add({"ranks": ranks, "job": name, **medians})
            print(f"{ranks} ranks, {name}: " + ", ".join(f"{key} {value:.2f}" for key, value in medians.items()))


if __name__ == "__main__":
    sys.exit(ends_well(main))
