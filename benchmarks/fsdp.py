"""Measure plain FSDP over slow links: native, and with `fxcomp.compress_reduce_scatter`.

    python benchmarks/fsdp.py --hosts 4 --inter 300mbit --json fsdp.json

A model is sharded over hosts of one rank each. All contestants live in the same processes and take turns in short
blocks, in another order each round. A step takes as long as its slowest rank. Parameters are gathered dense, so at best
a half to a third of the bytes can be saved. Losses are those of the last step, from the same start and batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from sharded import Contestant, Turns, options, run, sharded

import fxcomp

CHOSEN = {
    "fxcomp_dense": "dense",
    "fxcomp_int8": "int8",
    "fxcomp_balanced": "balanced",
    "fxcomp_aggressive": "aggressive",
}
NAMES = ("native", "native_again", *CHOSEN)


def contestant(name: str, model: str) -> Contestant:
    torch.manual_seed(0)
    job = MODELS[model]()
    wrapped = sharded(job.model)
    ours = fxcomp.compress_reduce_scatter(wrapped, compress=CHOSEN[name]) if name in CHOSEN else None
    return Contestant(job, wrapped, ours)


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    contestants = {name: contestant(name, arguments.model) for name in NAMES}
    turns = Turns.of(contestants, arguments.rounds, arguments.steps)
    took = turns.took
    native = [(a + b) / 2 for a, b in zip(took["native"], took["native_again"], strict=True)]
    ratios = {
        name: statistics.median(mine / slow for mine, slow in zip(took[name], native, strict=True)) for name in CHOSEN
    }
    losses = {name: _mean_loss(each) for name, each in contestants.items()}
    ours = {name: each.ours for name, each in contestants.items() if each.ours is not None}
    return {
        "inter": arguments.inter, "model": arguments.model, "ranks": dist.get_world_size(), "torch": torch.__version__,
        "median_ms": turns.medians, "of_native": ratios, "A/A": turns.same_twice, "last_loss": losses,
        "sent_by_a_host_bytes": turns.sent, "reports": {name: each.report() for name, each in ours.items()},
        "rounds_ms": took, "steps_of_a_round": arguments.steps,
    }  # fmt: skip


def _mean_loss(each: Contestant) -> float:
    loss = torch.tensor([each.step()])
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def show(found: dict[str, Any]) -> None:
    for name, ms in found["median_ms"].items():
        share = f"{found['of_native'][name]:8.3f}" if name in CHOSEN else " " * 8
        sent, loss = found["sent_by_a_host_bytes"][name] / 1e6, found["last_loss"][name]
        print(f"{name:<18}{ms:9.1f} ms {sent:9.2f} MB {share}  loss {loss:.4f}")
    print(f"A/A {found['A/A']:.3f}")


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    given = parser.parse_args()
    sys.exit(run(__file__, given, given.hosts, 1, record, show))
