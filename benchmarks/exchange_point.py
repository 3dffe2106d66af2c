"""Train a GPT with gradients or momenta exchanged, and compare loss and bytes over the whole job with dense training.

    python benchmarks/exchange_point.py --json exchange_point.json                       the small GPT, 1,000 steps
    python benchmarks/exchange_point.py --steps 3000 --seeds 0,1,2 --names dense,sign
    python benchmarks/exchange_point.py --model large --rate 1e-3 --steps 2000
    python benchmarks/exchange_point.py --steps 3000 --names "dense,cmax8 after int4" --people
    python benchmarks/exchange_point.py --steps 3000 --names dense,aggressive --inter 20mbit

All contestants train through `compile_step`, on ranks of this machine. The learning rate falls along a cosine. With
`--people` it rises over the first 5 % of the steps before it falls, beta2 is 0.95 and the weight decay 0.1.
`aggressive` is the mode as a user has it: it measures, chooses, races, verifies and watches for drift. With `--inter`
each rank has a host of its own, whose links are shaped. A record has the mean loss over passages that are the same for
all, the bytes that a rank has sent in the whole job (by ring and pairwise algorithms), and the ratio to dense ones. The
rate should be dense training's best: `--names dense --rate ...`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fixed_plans import at_momentum, shots
from records import Records, options
from shaped import UNSHAPED, Teller, ends_well, is_rank, join, run, set_rate

import fxcomp
from fxcomp.commands.demo.gpt import GPT, GPTConfig, draw_batch, loss_fn, training_text

MODELS = {
    "small": (GPTConfig(layers=2, heads=4, width=64, context=32), 4, 2e-3),
    "large": (GPTConfig(layers=4, heads=8, width=256, context=64), 4, 1e-3),
}
"""The configuration, the passages of a rank's batch, and the learning rate."""


MODE = "aggressive"
RISING = 0.05  # the share of the steps in which `--people` let the learning rate rise


def contestants(steps: int, share: float) -> dict[str, Any]:
    """The `compress=` of each contestant, with a warm-up of this share of the steps."""
    warmup, shorter = fxcomp.Warmup(int8_steps=round(share * steps)), fxcomp.Warmup(int4_steps=round(share * steps))
    return {
        "dense": lambda: "dense",
        MODE: lambda: fxcomp.Compress(within=MODE, steps=steps),
        "int4": lambda: shots("int4"),
        "sign of gradients": lambda: fxcomp.Compress(
            plan=shots("sign"), feedback=fxcomp.ErrorFeedback(allow_diverging=True)
        ),
        "sign": lambda: at_momentum("sign(65536)", warmup),
        "exact momentum": lambda: at_momentum("int8", warmup),
        "cmax8": lambda: at_momentum("cmax(8)", warmup),
        "cmax16": lambda: at_momentum("cmax(16)", warmup),
        "sign after int4": lambda: at_momentum("sign(65536)", shorter),
        "cmax8 after int4": lambda: at_momentum("cmax(8)", shorter),
    }


def sent_bytes(payloads: dict[tuple[str, str], int], ranks: int) -> float:
    """Count what one rank sends for its payloads."""
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "all_to_all": share, "reduce_scatter": share, "all_gather": ranks - 1}
    return sum(factors.get(kind, 1.0) * count for (kind, _), count in payloads.items())


def make_optimizer(model: torch.nn.Module, rate: float, people: bool) -> torch.optim.Optimizer:
    betas, decay = ((0.9, 0.95), 0.1) if people else ((0.9, 0.999), 0.01)
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=decay)


def share_of_rate(step: int, steps: int, rising: int) -> float:
    """The learning rate of a step over the highest: a line up, then a cosine down."""
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def train(name: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train one contestant; returns its record."""
    config, size, rate = MODELS[arguments.model]
    rate, steps, text = arguments.rate or rate, arguments.steps, training_text()
    batch = partial(draw_batch, text.train, rank=dist.get_rank(), size=size, context=config.context, seed=seed)
    torch.manual_seed(seed)
    model = GPT(replace(config))
    optimizer = make_optimizer(model, rate, arguments.people)
    rising = round(RISING * steps) if arguments.people else 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: share_of_rate(i, steps, rising))
    checks: dict[str, Any] = {"checks": fxcomp.Checks(verify="never", race="off", replan="off")}
    chosen: dict[str, Any] = {} if name == MODE else {**checks, "costs": fxcomp.CostTable()}
    compress = contestants(steps, arguments.warmup)[name]()
    step = fxcomp.compile_step(model, loss_fn, optimizer, batch(step=0), compress=compress, **chosen)
    sent, begun = 0.0, time.perf_counter()
    for i in range(steps):
        step(batch(step=i))
        scheduler.step()
        sent += sent_bytes(dict(step.payload_bytes), dist.get_world_size())
    seconds = time.perf_counter() - begun
    step.close()
    dense = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * 4 * sum(p.numel() for p in model.parameters())
    inputs, targets = draw_batch(text.train, step=-1, rank=0, size=512, context=config.context, seed=0)
    with torch.no_grad():
        pieces = zip(inputs.split(64), targets.split(64), strict=True)
        loss = torch.stack([loss_fn(model, piece) for piece in pieces]).mean().item()
    return {
        "name": name,
        "model": arguments.model,
        "seed": seed,
        "rate": rate,
        "steps": steps,
        "warmup": arguments.warmup,
        "people": arguments.people,
        "loss": loss,
        "sent_mb": sent / 1e6,
        "fewer": dense * steps / sent,
        "ms": 1e3 * seconds / steps,
        "inter": arguments.inter,
        "plan": list(map(str, step.plan.buckets)),
        "notes": list(step.notes),
        "replicas_equal": are_equal(model),
    }


def are_equal(model: torch.nn.Module) -> bool:
    """Return whether all ranks have the same parameters, bit by bit."""
    mine = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    differs = (first.view(torch.int32) != mine.view(torch.int32)).any().int()
    dist.all_reduce(differs)
    return not differs.item()


def on_rank(arguments: argparse.Namespace) -> None:
    join()
    torch.set_num_threads(1)
    if arguments.inter != UNSHAPED:
        set_rate(arguments.inter)
    tell = Teller()
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.names.split(","):
            tell.send(train(name, arguments, seed))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--names", default="dense,int4,sign of gradients,exact momentum,sign")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, help="the learning rate (default: the model's)")
    parser.add_argument("--warmup", type=float, default=0.2, help="the warm-up's share of the steps")
    parser.add_argument("--people", action="store_true", help="beta2 0.95, weight decay 0.1, a rate that rises first")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--inter", default=UNSHAPED, help="the links' bandwidth, such as 20mbit, with a host a rank")
    arguments = parser.parse_args()
    if is_rank():
        on_rank(arguments)
        return
    kept = Records(arguments.json, ranks=arguments.ranks)

    def hear(record: dict[str, Any]) -> None:
        kept.add(record)
        print(json.dumps(record), flush=True)

    hosts, ranks = (None, arguments.ranks) if arguments.inter == UNSHAPED else (arguments.ranks, 1)
    run([__file__, *sys.argv[1:]], hear, hosts=hosts, ranks_per_host=ranks)


if __name__ == "__main__":
    sys.exit(ends_well(main))
