"""Measure HSDP over a slow link between replicas: native, and with `fxcomp.average_replicas`.

    python benchmarks/hsdp.py --inter 300mbit --json hsdp.json

Two hosts hold a replica each, sharded over two ranks. All contestants live in the same processes and take turns in
short blocks, in another order each round. A step takes as long as its slowest rank. `free` is fully_shard on the shard
dimension alone: no replica hears of the other, which is a step without the slow link. What a contestant recovers is the
share of native HSDP's cost of the network, `(native - contestant) / (native - free)`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxcomp
from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, sent_by_this_host, why_not
from fxcomp.frontends.job import Job

MARK = "@hsdp "
RANKS_PER_HOST = 2
WARM_UP = 12
"""Steps: six dense ones before there is a plan, and what it takes to settle."""
MODES = {"fxcomp_dense": None, "fxcomp_balanced": "balanced", "fxcomp_aggressive": "aggressive"}
NAMES = ("native", "native_again", "free", *MODES)


@dataclass
class Contestant:
    """A model in training, and what its steps took."""

    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    outer: fxcomp.ReplicaAverage | None
    steps: int = 0

    @classmethod
    def made(cls, name: str, job: Job, mesh: DeviceMesh) -> Contestant:
        dimensions = mesh if name.startswith("native") else mesh["shard"]
        children = list(job.model.children())
        blocks = [block for child in children if isinstance(child, nn.ModuleList) for block in child]
        for layer in blocks or children:  # beside blocks there may be tied parameters, which belong together
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=dimensions)
        model = fully_shard(job.model, mesh=dimensions)
        outer = None
        if name in MODES:
            chosen: Any = {"plan": "dense"} if MODES[name] is None else {"mode": MODES[name]}
            outer = fxcomp.average_replicas(model, mesh["replicate"], **chosen)
        return cls(job, model, torch.optim.AdamW(model.parameters(), lr=1e-4), outer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.job.loss_fn(self.model, self.job.batch_at(self.steps, dist.get_rank())).backward()
        self.optimizer.step()
        self.steps += 1

    def block(self, steps: int) -> float:
        """Return the milliseconds of a step: the slowest rank's."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        took = torch.tensor([(time.perf_counter() - begin) / steps * 1e3])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()


def rank_main(arguments: argparse.Namespace) -> None:
    join()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // RANKS_PER_HOST, RANKS_PER_HOST),
                            mesh_dim_names=("replicate", "shard"))  # fmt: skip
    build: Callable[[], Job] = MODELS[arguments.model]
    contestants = {name: Contestant.made(name, build(), mesh) for name in NAMES}
    sent: dict[str, float] = {}
    for name, each in contestants.items():
        each.block(WARM_UP)
        before = sent_by_this_host()
        each.block(3)
        sent[name] = (sent_by_this_host() - before) / 3
    took: dict[str, list[float]] = {name: [] for name in NAMES}
    order = random.Random(0)
    for _ in range(arguments.rounds):
        for name in order.sample(NAMES, len(NAMES)):
            took[name].append(contestants[name].block(arguments.steps))
    if dist.get_rank() == 0:
        print(MARK + json.dumps(record(arguments, contestants, took, sent)), flush=True)
    dist.destroy_process_group()


def record(arguments: argparse.Namespace, contestants: dict[str, Contestant], took: dict[str, list[float]],
           sent: dict[str, float]) -> dict[str, Any]:  # fmt: skip
    native = [(a + b) / 2 for a, b in zip(took["native"], took["native_again"], strict=True)]
    medians = {name: statistics.median(times) for name, times in took.items()}
    recovered = {
        name: statistics.median(
            (slow - mine) / (slow - free) for slow, mine, free in zip(native, took[name], took["free"], strict=True)
        )
        for name in MODES
    }
    plans = {name: str(each.outer.plan) for name, each in contestants.items() if each.outer is not None}
    predicted = {
        name: each.outer.timeline.step_time_us / 1e3
        for name, each in contestants.items()
        if each.outer is not None and each.outer.timeline is not None
    }
    return {
        "inter": arguments.inter, "model": arguments.model, "ranks": "2x2", "torch": torch.__version__,
        "median_ms": medians, "recovered": recovered, "predicted_ms": predicted,
        "A/A": statistics.median(a / b for a, b in zip(took["native"], took["native_again"], strict=True)),
        "sent_by_a_host_bytes": sent, "plans": plans, "rounds_ms": took, "steps_of_a_round": arguments.steps,
    }  # fmt: skip


def main() -> int:
    arguments = parse()
    if arguments.rank:
        rank_main(arguments)
        return 0
    missing = why_not()
    if missing:
        print(f"cannot measure: {missing}", file=sys.stderr)
        return 2
    given = [f"--inter={arguments.inter}", f"--model={arguments.model}", f"--rounds={arguments.rounds}"]
    given += [f"--steps={arguments.steps}", "--rank"]
    with ShapedHosts(2, arguments.inter) as hosts:
        output = run_ranks([__file__, *given], hosts=hosts, ranks_per_host=RANKS_PER_HOST, timeout_s=arguments.timeout)
    found = json.loads(next(line for line in output[0].splitlines() if line.startswith(MARK))[len(MARK) :])
    for name, ms in found["median_ms"].items():
        share = f"{found['recovered'][name]:8.1%}" if name in MODES else ""
        print(f"{name:<18}{ms:9.1f} ms {found['sent_by_a_host_bytes'][name] / 1e6:9.2f} MB {share}")
    print(f"A/A {found['A/A']:.3f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inter", default="300mbit", help="the bandwidth between hosts")
    parser.add_argument("--model", default="mlp", choices=sorted(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="of a contestant in a round")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--json", help="write the record here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
