"""Check on a GPU that compiled steps train like eager steps: alone, from scripts, and on two ranks that share it.

`gpu_all.py` runs it. Checks compare parameters after some steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_scripts import SCRIPTS, SHARDED, largest_distance, sharded_distance
from records import Results, read, wait
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cluster.cluster import Level
from fxcomp.codegen import program
from fxcomp.commands.demo.gpt import GPT, GPTConfig
from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.compressors import parse_compressor
from fxcomp.frontends.job import Job
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Device, Strategy

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CONFIG = GPTConfig() if torch.cuda.is_available() else GPTConfig(layers=1, heads=2, width=64)  # small for rehearsals
STEPS = 20 if torch.cuda.is_available() else 6
TIMED = 30
RANKS_LIMIT_S = 165.0


def job(seed: int = 0) -> Job:
    torch.manual_seed(seed)
    model = GPT(CONFIG).to(DEVICE)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (8, 129), generator=generator).to(DEVICE)
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


def scripts(results: Results) -> None:
    for name in SCRIPTS:
        results.check(f"script, {name}", partial(largest_distance, name, DEVICE, STEPS))


def one_gpu(results: Results) -> None:
    """Train the example GPT with eager and with Inductor regions, and check the step's own timing."""
    for regions in ("eager", "inductor"):
        program.INDUCTOR_DEVICES = (DEVICE.type,) if regions == "inductor" else ()

        def parity(regions: str = regions) -> tuple[bool, str]:
            mine, reference = job(), job()
            step, eager = (
                compiled_step(mine, checks=fxcomp.Checks(verify=1 if regions == "eager" else 0)),
                eager_step(reference),
            )
            for _ in range(STEPS):
                step(mine.batch), eager()
            difference = largest_difference(mine.model, reference.model)
            return difference <= (1e-5 if regions == "eager" else 1e-3), f"{difference:.3g} after {STEPS} steps"

        def clock() -> tuple[bool, str]:
            mine = job()
            step = compiled_step(mine, checks=fxcomp.Checks(verify="never"))
            for _ in range(STEPS):
                step(mine.batch)
            wait(DEVICE)
            start = time.perf_counter()
            for _ in range(TIMED):
                step(mine.batch)
            wait(DEVICE)
            ms = 1e3 * (time.perf_counter() - start) / TIMED
            return (
                0.7 < step.step_ms / ms < 1.3,
                f"{step.step_ms:.3g} ms by the step's own clock, {ms:.3g} by the wall's",
            )

        results.check(f"parity with eager, {regions} regions", parity)
        results.check(f"what a step says it takes, {regions} regions", clock)


def one_shot(step: fxcomp.CompiledStep, device: Device) -> Plan:
    strategy = Strategy.flat(parse_compressor("int8"), device, level=Level.WORLD)
    return step.plan.with_strategies([strategy] * len(step.plan.buckets))


def rank_main(backend: str, path: Path) -> None:
    """Run one of two ranks on one GPU; rank 0 writes its records."""
    if backend == "nccl":
        os.environ |= {
            "NCCL_HOSTID": os.environ["RANK"],
            "NCCL_SOCKET_IFNAME": "lo",
        }  # else two ranks may not share a GPU
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    else:
        join()
    results = Results(path if dist.get_rank() == 0 else None)
    program.INDUCTOR_DEVICES = ()
    first = compiled_step(job(), compress="dense")
    on_device, on_host = one_shot(first, Device.GPU), one_shot(first, Device.CPU)
    plans: dict[str, object] = {"dense": "dense", "bf16": "bf16", "int8": on_device, "int8 on the host": on_host}
    models: dict[str, nn.Module] = {}
    for name, plan in plans.items():

        def agreement(name: str = name, plan: object = plan) -> tuple[bool, str]:
            mine = job()
            step = compiled_step(mine, compress=plan, checks=fxcomp.Checks(verify=5))
            for _ in range(STEPS):
                step(own_tokens(mine))
            models[name] = mine.model
            return same_on_all_ranks(mine.model)

        results.check(f"{backend}, {name}", agreement)
    if {"int8", "int8 on the host"} <= models.keys():
        difference = largest_difference(models["int8"], models["int8 on the host"])
        results.check(f"{backend}, offload equals GPU", lambda: (difference <= 1e-5, f"{difference:.3g}"))
    for name in FRONTENDS:

        def nearness(name: str = name) -> tuple[bool, str]:
            same, said = same_on_all_ranks(trained_by(name))
            return same, f"{said}"

        results.check(f"{backend}, {name}", nearness)
    if backend == "nccl":  # fully_shard needs collectives that gloo lacks on a GPU
        for plan in SHARDED:
            check = partial(sharded_distance, plan, DEVICE, STEPS)
            results.check(f"{backend}, fully_shard, {plan}", check)
    dist.destroy_process_group()


FRONTENDS = ("hook, int8", "hook, topk(0.1)", "backend, dense", "backend, int8", "momenta, sign", "powersgd", "topk")


def trained_by(name: str) -> nn.Module:
    """Train the example GPT by a frontend, with different tokens per rank."""
    mine = job()
    tokens = own_tokens(mine)
    kind, _, plan = name.partition(", ")
    model: Any = mine.model
    if kind == "hook":
        model = DistributedDataParallel(mine.model)
        model.register_comm_hook(None, fxcomp.ddp_hook(compress=plan))
    if kind == "backend":
        model = fxcomp.compile_model(mine.model, plan)
    if kind in ("hook", "backend"):
        for _ in range(STEPS):
            mine.optimizer.zero_grad()
            loss(model, tokens).backward()
            mine.optimizer.step()
        return mine.model
    if kind == "momenta":
        warmup = fxcomp.Warmup(int8_steps=STEPS // 2)
        step = compiled_step(
            replace(mine, max_grad_norm=None), compress=fxcomp.Compress(plan=plan, at="momentum", warmup=warmup)
        )
    elif kind == "topk":
        optimizer = torch.optim.SGD(mine.model.parameters(), lr=0.1, momentum=0.9)
        step = compiled_step(replace(mine, optimizer=optimizer), compress="topk(0.01)")
    else:
        step = compiled_step(mine, compress="powersgd(4)", checks=fxcomp.Checks(verify=5))
    for _ in range(STEPS):
        step(tokens)
    return mine.model


def own_tokens(of: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a different batch per rank, so that ranks that do not exchange gradients diverge."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    tokens = torch.randint(0, 256, (8, 129), generator=generator).to(of.batch[0].device)
    return tokens[:, :-1], tokens[:, 1:]


def same_on_all_ranks(model: nn.Module) -> tuple[bool, str]:
    """Compare parameters with rank 0's, and check that training changed them."""
    flat, start = (torch.cat([p.detach().flatten() for p in each.parameters()]) for each in (model, job().model))
    other = flat.clone()
    dist.broadcast(other, 0)
    same = bool(torch.equal(flat, other)) and bool(flat.isfinite().all()) and not torch.equal(flat, start)
    return same, "ranks bit-identical" if same else "ranks drift, have not moved, or are not finite"


def two_ranks(results: Results, backend: str, path: Path) -> None:
    """Check on two ranks that share the GPU; rank 0 writes its own file of records."""

    def hear(rank: int, line: str) -> None:
        print(line if rank == 0 else f"[rank {rank}] {line}", flush=True)

    def run() -> tuple[bool, str]:
        program = str(Path(__file__).with_name("gpu_all.py"))
        command = [program, "--rank", backend, "--json", str(path)]
        run_ranks(command, ranks_per_host=2, timeout_s=RANKS_LIMIT_S, on_line=hear)
        found = read(path)
        return all(record["ok"] for record in found), f"{len(found)} checks"

    results.check(f"two ranks on one GPU over {backend}", run)
