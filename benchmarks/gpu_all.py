"""Check and time everything that needs a GPU, in one call: what to run first on a machine that has one.

    python benchmarks/gpu_all.py --json gpu.json

On one GPU: parity of the compiled step with eager PyTorch, with eager regions and with Inductor's; the CPU-offload path
against the same compressor on the GPU, over two processes that share the GPU through gloo, and through NCCL if it lets
them. Each check prints a line and becomes a record `{check, ok, detail}`; each time a record
`{name, ms: {median, p10, p90, n}}`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fxcomp
from fxcomp import pipeline
from fxcomp.cluster import Level
from fxcomp.compressors import parse_compressor
from fxcomp.gpt import GPT
from fxcomp.hosts import join, run_ranks
from fxcomp.job import Job
from fxcomp.strategy import Bucket, Device, Plan, Strategy

MARK = "@gpu "
STEPS = 20
TIMED = 30


def job(seed: int = 0) -> Job:
    """The example GPT on the GPU, with tokens drawn from a seed."""
    torch.manual_seed(seed)
    model = GPT().cuda()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (8, 129), generator=generator).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-4)
    return Job(model, loss, optimizer, (tokens[:, :-1], tokens[:, 1:]), 1.0)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def eager_step(job: Job) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        job.optimizer.zero_grad(set_to_none=True)
        value = job.loss_fn(job.model, job.batch)
        value.backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), job.max_grad_norm or 0.0)
        job.optimizer.step()
        return value.detach()

    return step


def compiled_step(job: Job, **options: object) -> fxcomp.CompiledStep:
    return fxcomp.compile_step(
        job.model, job.loss_fn, job.optimizer, job.batch, max_grad_norm=job.max_grad_norm, **options
    )  # pyright: ignore[reportArgumentType] options are passed on


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


class Results:
    """Records of checks and times; a check that raises is a record too."""

    def __init__(self) -> None:
        self.records: list[dict[str, object]] = []

    def check(self, name: str, run: Callable[[], tuple[bool, str]]) -> None:
        try:
            ok, detail = run()
        except Exception as error:
            traceback.print_exc()
            ok, detail = False, f"{type(error).__name__}: {error}"
        self.records.append({"check": name, "ok": ok, "detail": detail})
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", flush=True)

    def time(self, contestants: dict[str, Callable[[], object]]) -> None:
        """Steps in turns, each until the GPU is done."""
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(TIMED):
            for name, run in contestants.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - start))
        for name, found in times.items():
            ordered = sorted(found)
            low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
            ms = {"median": statistics.median(ordered), "p10": low, "p90": high, "n": len(ordered)}
            self.records.append({"name": name, "ms": ms})
            print(f"     {name}: {ms['median']:.2f} ms ({low:.2f} to {high:.2f})", flush=True)


def one_gpu(results: Results) -> None:
    contestants: dict[str, Callable[[], object]] = {"eager": eager_step(job())}
    for regions in ("eager", "inductor"):
        pipeline.INDUCTOR_DEVICES = ("cuda",) if regions == "inductor" else ()

        def parity(regions: str = regions) -> tuple[bool, str]:
            mine, reference = job(), job()
            step, eager = compiled_step(mine, verify_every=1 if regions == "eager" else 0), eager_step(reference)
            for _ in range(STEPS):
                step(mine.batch), eager()
            contestants[f"compiled, {regions} regions"] = lambda: step(mine.batch)
            difference = largest_difference(mine.model, reference.model)
            return difference <= (1e-5 if regions == "eager" else 1e-3), f"{difference:.3g} after {STEPS} steps"

        results.check(f"parity with eager, {regions} regions", parity)
    results.time(contestants)


def offload_plan(step: fxcomp.CompiledStep, device: Device) -> Plan:
    strategy = Strategy.flat(parse_compressor("int8"), device, level=Level.WORLD)
    return Plan(tuple(Bucket(bucket.names, bucket.sizes, strategy) for bucket in step.plan.buckets))


def rank_main(backend: str) -> None:
    """One of two ranks on one GPU; prints its records."""
    if backend == "nccl":
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # NCCL refuses two ranks on one GPU of one host
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    else:
        join()
    results = Results()
    pipeline.INDUCTOR_DEVICES = ()
    plans: dict[str, object] = {"dense": "dense", "bf16": "bf16", "int8": "int8"}
    first = compiled_step(job(), plan="dense")
    plans["int8 on the host"] = offload_plan(first, Device.CPU)
    models: dict[str, nn.Module] = {}
    for name, plan in plans.items():

        def agreement(name: str = name, plan: object = plan) -> tuple[bool, str]:
            mine = job()
            step = compiled_step(mine, plan=plan, verify_every=5)
            for _ in range(STEPS):
                step(mine.batch)
            models[name] = mine.model
            flat = torch.cat([p.detach().flatten() for p in mine.model.parameters()])
            other = flat.clone()
            dist.broadcast(other, 0)
            return bool(torch.equal(flat, other)), "ranks bit-identical" if torch.equal(flat, other) else "ranks drift"

        results.check(f"{backend}, {name}", agreement)
    if {"int8", "int8 on the host"} <= models.keys():
        difference = largest_difference(models["int8"], models["int8 on the host"])
        results.check(f"{backend}, offload equals GPU", lambda: (difference <= 1e-5, f"{difference:.3g}"))
    if dist.get_rank() == 0:
        print(MARK + json.dumps(results.records), flush=True)
    dist.destroy_process_group()


def two_ranks(results: Results, backend: str) -> None:
    def run() -> tuple[bool, str]:
        outputs = run_ranks([__file__, "--rank", backend], ranks_per_host=2, timeout_s=300)
        lines = [line for line in outputs[0].splitlines() if line.startswith(MARK)]
        records = json.loads(lines[-1].removeprefix(MARK))
        results.records.extend(records)
        return all(record["ok"] for record in records), f"{len(records)} checks"

    results.check(f"two ranks on one GPU over {backend}", run)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", choices=("gloo", "nccl"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing was checked")
        return 2
    if arguments.rank:
        rank_main(arguments.rank)
        return 0
    results = Results()
    results.records.append({"device": torch.cuda.get_device_name(0), "torch": torch.__version__})
    one_gpu(results)
    for backend in ("gloo", "nccl"):
        two_ranks(results, backend)
    if arguments.json:
        arguments.json.write_text(json.dumps(results.records, indent=1) + "\n")
    failed = [record for record in results.records if record.get("ok") is False]
    print(f"{len(failed)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
