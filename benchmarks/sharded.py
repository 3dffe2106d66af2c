"""Measure sharded models over slow links: native FSDP and HSDP, and both with fxcomp.

    python benchmarks/sharded.py hsdp --inter 300mbit --json hsdp.json
    python benchmarks/sharded.py fsdp --hosts 4 --inter 300mbit --json fsdp.json

All contestants share processes and take turns in short blocks, in a new order each round. A step takes as long as its
slowest rank.

`hsdp` compares `average_replicas` with native HSDP. Two hosts hold one replica each, sharded over two ranks. `free` is
fully_shard on the shard dimension alone, a step without the slow link. The recovered share of native HSDP's network
cost is `(native - contestant) / (native - free)`, as a median over rounds and computed from medians.

`fsdp` compares `compress_reduce_scatter` with native FSDP. The model is sharded over hosts of one rank. Parameters are
gathered dense, so at most a third to a half of the bytes can be saved. Losses are of the last step, from the same start
and batches.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from records import Records, options, table
from shaped import Teller, ends_well, is_rank, join, run, set_rate, slowest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxcomp
from fxcomp.commands.demo.shaped_hosts import sent_by_this_host
from fxcomp.frontends.job import Job
from fxcomp.step.race import LONGEST, WARM_STEPS

PLANS = {"hsdp": ("dense", "balanced", "lossy"), "fsdp": ("dense", "int8", "balanced", "lossy")}
RANKS_PER_HOST = {"hsdp": 2, "fsdp": 1}
NATIVE, AGAIN, FREE = "native", "native_again", "free"
WARM_UP, RACE = 6, WARM_STEPS + LONGEST
"""Dense steps before a plan is followed, and maximum steps of a race."""


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    children = list(model.children())
    blocks = [block for child in children if isinstance(child, nn.ModuleList) for block in child]
    for layer in blocks or children:  # with blocks, other children may have tied parameters, so the root shards them
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass
class Contestant:
    job: Job
    model: nn.Module
    ours: Any
    """fxcomp's object, or None for native contestants."""
    steps: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.job.loss_fn(self.model, self.job.batch_at(self.steps, dist.get_rank()))
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return float(loss.detach())

    def block(self, steps: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return slowest([(time.perf_counter() - begin) / steps * 1e3])[0]

    def mean_loss(self) -> float:
        loss = torch.tensor([self.step()])
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()


def contestants(arguments: argparse.Namespace) -> dict[str, Contestant]:
    """Build all contestants by name, from the same start; every rank calls it."""
    kind = arguments.kind
    shape = (dist.get_world_size() // RANKS_PER_HOST[kind], RANKS_PER_HOST[kind])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if kind == "hsdp" else None

    def made(name: str) -> Contestant:
        torch.manual_seed(0)
        job = MODELS[arguments.model]()
        if mesh is None:
            wrapped, is_native = sharded(job.model), name in (NATIVE, AGAIN)
            return Contestant(
                job, wrapped, None if is_native else fxcomp.compress_reduce_scatter(wrapped, compress=name)
            )
        if name in (NATIVE, AGAIN):
            return Contestant(job, sharded(job.model, mesh), None)
        wrapped = sharded(job.model, mesh["shard"])
        ours = None if name == FREE else fxcomp.average_replicas(wrapped, mesh["replicate"], compress=name)
        return Contestant(job, wrapped, ours)

    names = (NATIVE, AGAIN, *((FREE,) if kind == "hsdp" else ()), *PLANS[kind])
    return {name: made(name) for name in names}


def rank_main(arguments: argparse.Namespace) -> None:
    join()
    tell = Teller()
    set_rate(arguments.inter)
    all_of_them, sent = contestants(arguments), dict[str, float]()
    for name, each in all_of_them.items():
        tell(f"warming {name} up")
        each.block(WARM_UP + (RACE if name in ("balanced", "lossy") else 0))
        before = sent_by_this_host()
        each.block(3)
        sent[name] = (sent_by_this_host() - before) / 3
    took: dict[str, list[float]] = {name: [] for name in all_of_them}
    order = random.Random(0)
    for number in range(arguments.rounds):
        tell(f"round {number + 1} of {arguments.rounds}")
        for name in order.sample(list(all_of_them), len(all_of_them)):
            took[name].append(all_of_them[name].block(arguments.steps))
    ours = {name: each.ours for name, each in all_of_them.items() if each.ours is not None}
    same_twice = statistics.median(a / b for a, b in zip(took[NATIVE], took[AGAIN], strict=True))
    where = {
        "kind": arguments.kind, "inter": arguments.inter, "model": arguments.model, "ranks": dist.get_world_size(),
        "A/A": same_twice, "steps_of_a_round": arguments.steps,
    }  # fmt: skip
    losses = {name: each.mean_loss() for name, each in all_of_them.items()}
    for name, beside in compared(took).items():
        tell.send({
            **where, "name": name, **beside, "sent_by_a_host_bytes": sent[name], "last_loss": losses[name],
            "plan": str(ours[name].plan) if name in ours else None, "rounds_ms": took[name],
        })  # fmt: skip
    dist.destroy_process_group()


def compared(took: Mapping[str, list[float]]) -> dict[str, dict[str, float | None]]:
    """Compare contestants with native steps, and with steps without the slow link if measured."""
    native = [(a + b) / 2 for a, b in zip(took[NATIVE], took[AGAIN], strict=True)]
    slow, found = statistics.median(native), dict[str, dict[str, float | None]]()
    for name, times in took.items():
        of_native = statistics.median(mine / theirs for mine, theirs in zip(times, native, strict=True))
        row: dict[str, float | None] = {"median_ms": statistics.median(times), "of_native": of_native}
        if FREE in took:
            both = zip(native, times, took[FREE], strict=True)
            row["recovered"] = statistics.median((theirs - mine) / (theirs - free) for theirs, mine, free in both)
            free = statistics.median(took[FREE])
            row["recovered_of_medians"] = (slow - statistics.median(times)) / (slow - free)
        found[name] = row
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("kind", choices=list(PLANS))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--inter", default="300mbit", help="the bandwidth between hosts")
    parser.add_argument("--model", default="mlp", choices=sorted(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="of a contestant in a round")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    arguments = parser.parse_args()
    if is_rank():
        rank_main(arguments)
        return
    kept = Records(arguments.json)
    ranks = RANKS_PER_HOST[arguments.kind]
    run([__file__, *sys.argv[1:]], kept.add, hosts=arguments.hosts, ranks_per_host=ranks, timeout_s=arguments.timeout)
    rows = [
        (
            r["name"], f"{r['median_ms']:.1f}", f"{r['of_native']:.3f}", f"{r['sent_by_a_host_bytes'] / 1e6:.2f}",
            f"{r['recovered']:.1%}" if "recovered" in r else "", f"{r['last_loss']:.4f}",
        )
        for r in kept.found
    ]  # fmt: skip
    print(table("name | median ms > | of native > | MB sent by a host > | recovered > | last loss >", rows))
    print(f"A/A {kept.found[0]['A/A']:.3f}")


if __name__ == "__main__":
    sys.exit(ends_well(main))
