"""Measure HSDP over a slow link between replicas: native, and with `fxcomp.average_replicas`.

    python benchmarks/hsdp.py --inter 300mbit --json hsdp.json

Two hosts hold a replica each, sharded over two ranks. All contestants live in the same processes and take turns in
short blocks, in another order each round. A step takes as long as its slowest rank. `free` is fully_shard on the shard
dimension alone: no replica hears of the other, which is a step without the slow link. What a contestant recovers is the
share of native HSDP's cost of the network, `(native - contestant) / (native - free)`: the median of all rounds, and
that of the medians.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxcomp

HOSTS, RANKS_PER_HOST = 2, 2
CHOSEN = {"fxcomp_dense": "dense", "fxcomp_balanced": "balanced", "fxcomp_aggressive": "aggressive"}
NAMES = ("native", "native_again", "free", *CHOSEN)


def contestant(name: str, model: str, mesh: DeviceMesh) -> Contestant:
    job = MODELS[model]()
    wrapped = sharded(job.model, mesh if name.startswith("native") else mesh["shard"])
    if name not in CHOSEN:
        return Contestant(job, wrapped, None)
    return Contestant(job, wrapped, fxcomp.average_replicas(wrapped, mesh["replicate"], compress=CHOSEN[name]))


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // RANKS_PER_HOST, RANKS_PER_HOST),
                            mesh_dim_names=("replicate", "shard"))  # fmt: skip
    contestants = {name: contestant(name, arguments.model, mesh) for name in NAMES}
    turns = Turns.of(contestants, arguments.rounds, arguments.steps)
    took = turns.took
    native = [(a + b) / 2 for a, b in zip(took["native"], took["native_again"], strict=True)]
    recovered = {
        name: statistics.median(
            (slow - mine) / (slow - free) for slow, mine, free in zip(native, took[name], took["free"], strict=True)
        )
        for name in CHOSEN
    }
    medians = turns.medians
    slow, free = statistics.median(native), medians["free"]
    of_medians = {name: (slow - medians[name]) / (slow - free) for name in CHOSEN}
    ours = {name: each.ours for name, each in contestants.items() if each.ours is not None}
    predicted = {name: each.timeline.step_time_us / 1e3 for name, each in ours.items() if each.timeline is not None}
    return {
        "inter": arguments.inter, "model": arguments.model, "ranks": "2x2", "torch": torch.__version__,
        "median_ms": medians, "recovered": recovered, "recovered_of_medians": of_medians, "predicted_ms": predicted,
        "A/A": turns.same_twice,
        "sent_by_a_host_bytes": turns.sent, "plans": {name: str(each.plan) for name, each in ours.items()},
        "rounds_ms": took, "steps_of_a_round": arguments.steps,
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    for name, ms in found["median_ms"].items():
        both = (found["recovered"][name], found["recovered_of_medians"][name]) if name in CHOSEN else ()
        share = "".join(f"{each:8.1%}" for each in both)
        print(f"{name:<18}{ms:9.1f} ms {found['sent_by_a_host_bytes'][name] / 1e6:9.2f} MB {share}")
    print(f"A/A {found['A/A']:.3f}")


if __name__ == "__main__":
    sys.exit(run(__file__, options(__doc__).parse_args(), HOSTS, RANKS_PER_HOST, record, show))
