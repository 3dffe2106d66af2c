"""Loss over wall time: DDP and its hooks, 1-bit Adam, DiLoCo, and fxcomp, over shaped links.

    python benchmarks/step_time.py --hosts 4 --inter 100mbit,1gbit --model benchmarks/time_to_loss.py:small \\
        --names ddp_fp32,ddp_bf16,ddp_powersgd,fxcomp,fxcomp_lossy,dense,int4,momentum_sign,momentum_cmax8,free \\
        --json times.json
    python benchmarks/time_to_loss.py --model small --times times.json --json losses.json
    python benchmarks/time_to_loss.py --times times.json --losses losses.json --report table.md

The first command times steps, the second trains every contestant without shaping and records its loss curve, the third
joins both. Warm-up steps are timed separately. All use dense training's best learning rate with cosine decay, and the
same batches. Losses are on fixed sequences, the same for all.

Plans that fxcomp's modes chose for a link are trained as measured there. 1-bit Adam runs on fxcomp's runtime: signs of
the momentum after a dense warm-up. DiLoCo averages parameters every 25 steps and is simulated: its time is the step
without a network, plus DDP's network time for each average.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from baselines import FXCOMP, make_contestant
from fixed_plans import at_momentum
from records import Record, Records, options, read
from shaped import Teller, ends_well, is_rank, join, run
from time_to_loss_page import CONTENDERS, DILOCO_STEPS, ONE_BIT_WARMUP, WARMUP, joined, page

import fxcomp
from fxcomp.commands.demo.gpt import GPT, GPTConfig, draw_batch, loss_fn, training_text
from fxcomp.frontends.job import Job
from fxcomp.plan.compress import GivenCompress
from fxcomp.plan.plan import Plan

MODELS = {
    "small": (GPTConfig(layers=2, heads=4, width=64, context=32), 4, 2e-3),
    "large": (GPTConfig(layers=4, heads=5, width=320, context=64), 4, 5e-4),
}
"""Configuration, sequences per rank and batch, and learning rate; 0.1 and 5.1 M parameters."""
JUDGED = 64  # sequences per rank


def job_of(name: str, seed: int = 0, rate: float | None = None) -> Job:
    config, size, best = MODELS[name]
    torch.manual_seed(seed)
    model, text = GPT(replace(config)), training_text()

    def next_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_batch(text.train, step=step, rank=rank, size=size, context=config.context, seed=seed)

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate or best, weight_decay=0.01)
    return Job(model, loss_fn, optimizer, next_batch(0, 0), next_batch=next_batch)


small = partial(job_of, "small")
large = partial(job_of, "large")


def trainings(arguments: argparse.Namespace) -> Iterator[tuple[str, str | None, str, GivenCompress | None]]:
    """Yield contestant, link or None, name for `make_contestant`, and plan."""
    steps = arguments.steps
    dense = fxcomp.Warmup(dense_steps=round(ONE_BIT_WARMUP * steps))
    int4 = fxcomp.Warmup(int4_steps=round(WARMUP * steps))
    given: dict[str, tuple[str, GivenCompress | None]] = {
        "ddp_fp32": ("ddp_fp32", None),
        "ddp_bf16": ("ddp_bf16", None),
        "ddp_powersgd": ("ddp_powersgd", None),
        "one_bit_adam": ("by hand", at_momentum("sign(65536)", dense)),
        "diloco": ("free", None),
        "momentum_cmax8": ("by hand", at_momentum("cmax(8)", int4)),
    }
    for name in arguments.names.split(","):
        if name in given:
            yield (name, None, *given[name])
        for measured in read(arguments.times) if name in FXCOMP else ():
            if measured["name"] == name and measured["plan"] is not None:
                yield name, measured["inter"], name, fxcomp.Compress(plan=Plan.from_json(measured["plan"]), steps=steps)


def train(arguments: argparse.Namespace, name: str, made: str, given: GivenCompress | None) -> list[list[float]]:
    """Train a contestant; return its curve of [steps, loss]."""
    job, rank, steps = job_of(arguments.model, arguments.seed, arguments.rate), dist.get_rank(), arguments.steps
    contestant = make_contestant(made, job, plan=given)
    falling = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))  # pyright: ignore[reportArgumentType]
    curve: list[list[float]] = []
    for step in range(steps):
        contestant.step(job.batch_at(step, rank))
        falling.step()
        if name == "diloco" and (step + 1) % DILOCO_STEPS == 0:
            average(job.model)
        if (step + 1) % arguments.every == 0 or step + 1 == steps:
            curve.append([step + 1, judge(job.model, arguments.model)])
    if isinstance(contestant.step, fxcomp.CompiledStep):
        contestant.step.close()
    return curve


def average(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@torch.no_grad()
def judge(model: torch.nn.Module, name: str) -> float:
    """Return the mean loss over fixed sequences, different per rank."""
    text, context = training_text(), MODELS[name][0].context
    mean = loss_fn(model, draw_batch(text.train, step=-1, rank=dist.get_rank(), size=JUDGED, context=context))
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def on_rank(arguments: argparse.Namespace) -> None:
    join()
    torch.set_num_threads(1)
    tell, known = Teller(), dict[str, list[list[float]]]()
    for name, inter, made, given in trainings(arguments):
        key = given.digest if isinstance(given, Plan) else name
        if key not in known:
            known[key] = train(arguments, name, made, given)
        model, seed = arguments.model, arguments.seed
        found = {"model": model, "name": name, "inter": inter, "seed": seed, "steps": arguments.steps}
        tell.send({**found, "curve": known[key]})


def join_files(arguments: argparse.Namespace) -> None:
    losses = [record for path in arguments.losses for record in read(path)]
    runs = joined(read(arguments.times), losses)
    Records(arguments.json, hosts=4).add(*runs)
    text = page(runs)
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--names", default=",".join(dict.fromkeys(each.losses for each in CONTENDERS)))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=50, help="steps between two points of a curve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="the learning rate (default: the model's)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--times", type=Path, required=True, metavar="FILE", help="what step_time.py wrote")
    parser.add_argument("--losses", type=Path, nargs="+", metavar="FILE", help="train nothing, join these with --times")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table here, as Markdown")
    arguments = parser.parse_args()
    if is_rank():
        on_rank(arguments)
        return
    if arguments.losses:
        join_files(arguments)
        return
    kept = Records(arguments.json, ranks=arguments.ranks)

    def hear(record: Record) -> None:
        kept.add(record)
        print(json.dumps(record), flush=True)

    run([__file__, *sys.argv[1:]], hear, hosts=None, ranks_per_host=arguments.ranks)


if __name__ == "__main__":
    sys.exit(ends_well(main))
