"""What benchmarks of sharded models share: contestants that take turns in the same processes, over shaped links."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from torch import nn
from torch.distributed.fsdp import fully_shard

from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, sent_by_this_host, why_not
from fxcomp.frontends.job import Job
from fxcomp.step.race import LONGEST, WARM_STEPS

MARK = "@sharded "
WARM_UP = 6 + WARM_STEPS + LONGEST
"""Steps: six dense ones before there is a plan, and those in which it may race."""


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Shard a model block by block."""
    children = list(model.children())
    blocks = [block for child in children if isinstance(child, nn.ModuleList) for block in child]
    for layer in blocks or children:  # beside blocks there may be tied parameters, which belong together
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass
class Contestant:
    """A model in training, and what its steps took."""

    job: Job
    model: nn.Module
    ours: Any
    """What fxcomp does for it; None for native ones."""
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
        """Return the milliseconds of a step: the slowest rank's."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        took = torch.tensor([(time.perf_counter() - begin) / steps * 1e3])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()


@dataclass(frozen=True)
class Turns:
    """What rounds of contestants took."""

    took: Mapping[str, list[float]]
    sent: Mapping[str, float]
    """Bytes of a step that left a host."""

    @classmethod
    def of(cls, contestants: Mapping[str, Contestant], rounds: int, steps: int) -> Turns:
        sent: dict[str, float] = {}
        for name, each in contestants.items():
            each.block(WARM_UP)
            before = sent_by_this_host()
            each.block(3)
            sent[name] = (sent_by_this_host() - before) / 3
        took: dict[str, list[float]] = {name: [] for name in contestants}
        order, names = random.Random(0), list(contestants)
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                took[name].append(contestants[name].block(steps))
        return cls(took, sent)

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.took.items()}

    @property
    def same_twice(self) -> float:
        """native against native again: what is noise."""
        pairs = zip(self.took["native"], self.took["native_again"], strict=True)
        return statistics.median(a / b for a, b in pairs)


def options(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser of the options that all have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inter", default="300mbit", help="the bandwidth between hosts")
    parser.add_argument("--model", default="mlp", choices=sorted(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="of a contestant in a round")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--json", help="write the record here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(
    script: str, arguments: argparse.Namespace, hosts: int, ranks_per_host: int,
    on_rank: Callable[[argparse.Namespace], dict[str, Any]], show: Callable[[dict[str, Any]], None],
) -> int:  # fmt: skip
    """Run a script's ranks over shaped links, show rank 0's record and write it; on a rank, make the record."""
    if arguments.rank:
        join()
        record = on_rank(arguments)
        if dist.get_rank() == 0:
            print(MARK + json.dumps(record), flush=True)
        dist.destroy_process_group()
        return 0
    missing = why_not()
    if missing:
        print(f"cannot measure: {missing}", file=sys.stderr)
        return 2
    left_out = {"json", "rank", "timeout"}
    given = [f"--{name}={value}" for name, value in vars(arguments).items() if name not in left_out]
    with ShapedHosts(hosts, arguments.inter) as shaped:
        command = [script, *given, "--rank"]
        output = run_ranks(command, hosts=shaped, ranks_per_host=ranks_per_host, timeout_s=arguments.timeout)
    found = json.loads(next(line for line in output[0].splitlines() if line.startswith(MARK))[len(MARK) :])
    show(found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0
