"""Compare predictions made without a GPU with measurements of `gpu_steps.py`.

    python benchmarks/gpu_predicted.py                                                  a table
    python benchmarks/gpu_predicted.py --json FILE                                      records, too
    fxcomp explain benchmarks/gpu_predicted.py --cluster 2x1 --device h100              the whole report

The job is a GPT of 127 M parameters, written for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from records import Records, options, read, table
from torch import nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.commands.demo.gpt import GPT, GPTConfig
from fxcomp.frontends.job import Job, load_job
from fxcomp.frontends.what_if import WhatIf, imagining, what_if
from fxcomp.plan.compress import Compress

CONFIG, SIZE = GPTConfig(layers=6, heads=16, width=1024, context=1024, vocabulary=50304), 8
"""Configuration `127m` of `gpu_steps.py`, and sequences per batch."""

WHERE = Cluster.parse("2x1", intra=Link.parse("100gbit"), inter=Link.parse("10gbit"))

MEASURED = Path(__file__).parents[1] / "docs" / "benchmarks"

RECORDS = {"h100": "gpu_2026-11-26_h100.json", "h200": "gpu_2026-11-26_h200.json"}
"""Records of `gpu_steps.py` by device."""

CONTESTANTS = {"step_dense": "dense", "step_int8": "int8", "step_powersgd(4)": "powersgd(4)", "ddp_eager": "dense"}
"""Plan for predicting each contestant."""


def job() -> Job:
    torch.manual_seed(0)
    model = GPT(CONFIG).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, CONFIG.vocabulary, (SIZE, CONFIG.context + 1), device="cuda")

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return fxcomp.Job(model, loss, optimizer, (tokens[:, :-1], tokens[:, 1:]), max_grad_norm=1.0)


def predicted(device: str) -> Iterator[dict[str, Any]]:
    with imagining(device):
        loaded = load_job(f"{__file__}:job")
        found = {
            plan: what_if(loaded, WHERE, WhatIf(compress=Compress.parse(plan), device=device))
            for plan in dict.fromkeys(CONTESTANTS.values())
        }
    for contestant, plan in CONTESTANTS.items():
        use = found[plan].device
        assert use is not None, "a device was named"
        step = use.steps[-1 if contestant == "ddp_eager" else 0]
        yield {
            "device": device,
            "contestant": contestant,
            "kernels": step.kernels,
            "kernel_ms": step.kernels_us / 1e3,
            "peak_mb": step.peak_bytes / 1e6,
        }


def main() -> None:
    arguments = options(__doc__).parse_args()
    records = Records(arguments.json)
    rows: list[tuple[object, ...]] = []
    for device, file in RECORDS.items():
        measured = {each["contestant"]: each for each in read(MEASURED / file) if "kernel_ms" in each}
        for record in predicted(device):
            there = measured.get(record["contestant"])
            if there is None:
                continue
            kept = {f"measured_{name}": there[name] for name in ("kernels", "kernel_ms", "peak_mb")}
            records.add({**record, **kept})
            times = [f"{ms:.1f}" for ms in (record["kernel_ms"], there["kernel_ms"])]
            others = [f"{each[name]:,.0f}" for name in ("peak_mb", "kernels") for each in (record, there)]
            rows.append((device, record["contestant"], *times, *others))
    names = ("ms in kernels", "peak MB", "kernels")
    head = " | ".join(f"{name} predicted > | measured >" for name in names)
    print(table(f"device | step | {head}", rows))


if __name__ == "__main__":
    main()
