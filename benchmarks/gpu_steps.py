"""Time whole steps on one GPU, of fxcomp, DDP and its hooks, all with Inductor.

    python benchmarks/gpu_steps.py --json steps.json --trace traces

Two ranks share the GPU and compile. Then rank 0 times alone without a network: DDP in a group of one rank, fxcomp with
a transport that completes immediately. The difference is forward and backward, and packing, compressing, clipping and
updating on the device. With `--network` both ranks step, and gradients use NCCL's sockets on the loopback interface, as
between two hosts; the ranks share the GPU.

Contestants take turns, one step each. `wall_ms` is the host's time until the GPU has finished, `launch_ms` until the
host has launched the step, `through_ms` the time per step of ten without waiting.

    ddp_eager, ddp              eager, and `torch.compile(DDP(model))`; foreach clipping, fused AdamW
    ddp_whole                   the loss compiled with the model
    ddp_bf16, ddp_powersgd      as `ddp`, with torch's hooks
    hook_*                      as `ddp`, with `fxcomp.ddp_hook` under a plan or mode
    step_*                      `fxcomp.compile_step` under a plan or mode
    backend_*                   `fxcomp.compile_model(model)`

Records contain the peak device memory above the level before the contestant was made, and counts from a profile:
kernels, kernel time, launching and waiting calls. `--trace` keeps profiles for Perfetto (https://ui.perfetto.dev).
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from records import Results, options, read, spread, table, wait
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.commands.demo.gpt import GPT, GPTConfig
from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.frontends.torch_compile import compiled_model
from fxcomp.runtime.transport import NullTransport

MODELS = {
    "127m": (GPTConfig(layers=6, heads=16, width=1024, context=1024, vocabulary=50304), 8),
    "tiny": (GPTConfig(layers=2, heads=2, width=32, context=16, vocabulary=64), 2),
}
"""Configuration, and sequences per batch."""
CONTESTANTS = (
    "ddp,step_dense,ddp_whole,backend_dense,step_int8,ddp_eager,ddp_powersgd,step_powersgd(4),ddp_bf16,backend_int8"
)
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
PROFILED = 3  # steps
IN_A_ROW, ROWS = 10, 3
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

UNVERIFIED = fxcomp.Checks(verify="never")  # a single rank's gradients are not the mean of two

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], object]


class Maker:
    """Makes contestants, each with its own model, optimizer and batch."""

    def __init__(self, model: str, device: torch.device, *, network: bool) -> None:
        self.config, self.size = MODELS[model]
        self.device, self.network = device, network
        self.group: dist.ProcessGroup | None = None
        if not network:
            self.group = dist.new_group([0], backend="nccl" if device.type == "cuda" else "gloo")
            dist.new_group([1])

    def __call__(self, name: str) -> Step:
        torch.manual_seed(0)
        model = GPT(self.config).to(self.device)
        kind, _, rest = name.partition("_")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        draw = torch.Generator().manual_seed(dist.get_rank())
        drawn = torch.randint(0, self.config.vocabulary, (self.size, self.config.context + 1), generator=draw)
        tokens = drawn.to(self.device)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        made = {"ddp": self.parallel, "hook": self.hooked, "step": self.compiled, "backend": self.backend}[kind]
        return made(rest, model, optimizer, batch)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def eager(
        self, call: Any, optimizer: torch.optim.Optimizer, batch: Batch, loss: Callable[..., torch.Tensor]
    ) -> Step:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss(call, batch).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.step()

        return step

    def parallel(self, rest: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
        if dist.get_rank() and not self.network:
            return lambda: None
        whole = DistributedDataParallel(model, process_group=self.group, gradient_as_bucket_view=True)
        if rest == "bf16":
            whole.register_comm_hook(self.group, bf16_compress_hook)
        if rest == "powersgd":
            state = PowerSGDState(self.group, matrix_approximation_rank=4, start_powerSGD_iter=2)
            whole.register_comm_hook(state, powerSGD_hook)
        if rest == "whole":
            return self.eager(whole, optimizer, batch, torch.compile(self.loss))
        return self.eager(whole if rest == "eager" else torch.compile(whole), optimizer, batch, self.loss)

    def hooked(self, rest: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
        whole = DistributedDataParallel(model)
        whole.register_comm_hook(None, fxcomp.ddp_hook(compress=rest))
        return self.eager(torch.compile(whole), optimizer, batch, self.loss)

    def compiled(self, rest: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
        made = fxcomp.compile_step(
            model, self.loss, optimizer, batch, max_grad_norm=1.0, compress=rest, checks=UNVERIFIED
        )
        made(batch)
        if not self.network:
            made.in_force.runtime.transport = NullTransport(made.in_force.runtime.transport)
        while made.is_racing:
            made(batch)
        if dist.get_rank() == 0:
            print(made.explain(), flush=True)
        return lambda: made(batch)

    def backend(self, rest: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
        call: Any = fxcomp.compile_model(model, rest)
        step = self.eager(call, optimizer, batch, self.loss)
        step()
        if not self.network:
            runtime = compiled_model(model).runtime
            runtime.transport = NullTransport(runtime.transport)
        return step


def made_and_run(maker: Maker, name: str, device: torch.device) -> tuple[Step | None, dict[str, Any]]:
    """Make a contestant and run its first steps; return build time and memory, or the exception."""
    begun, before = time.perf_counter(), allocated(device)
    try:
        step = maker(name)
        for _ in range(3):
            step()
        wait(device)
        made_s = time.perf_counter() - begun
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    except Exception as error:
        traceback.print_exc()
        return None, {"failed": f"{type(error).__name__}: {error}"[:2000]}
    return step, {"made_s": made_s, "kept_mb": (allocated(device) - before) / 1e6, "peak_mb": (peak - before) / 1e6}


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def take_turns(steps: Mapping[str, Step], rounds: int, device: torch.device, *, network: bool) -> dict[str, Any]:
    """Time steps until the device has finished and until the host has; then steps without waiting."""
    walls: dict[str, list[float]] = {name: [] for name in steps}
    hosts: dict[str, list[float]] = {name: [] for name in steps}
    through: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + ROWS):
        for name, step in steps.items():
            wait(device)
            if network:
                dist.barrier()
            start = time.perf_counter()
            for _ in range(1 if number < rounds else IN_A_ROW):
                step()
            launched = 1e3 * (time.perf_counter() - start)
            wait(device)
            done = 1e3 * (time.perf_counter() - start)
            if number < rounds:
                hosts[name].append(launched)
                walls[name].append(done)
            else:
                through[name].append(done / IN_A_ROW)
    kinds = {"wall_ms": walls, "launch_ms": hosts, "through_ms": through}
    return {name: {kind: spread(found[name]) for kind, found in kinds.items()} for name in steps}


def profiled(name: str, step: Step, device: torch.device, folder: Path | None) -> dict[str, Any]:
    """Profile three steps: count launches and waits, and sum kernel times."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            with torch.profiler.record_function(f"step of {name}"):
                step()
        wait(device)
    kernels, calls = Counter[str](), Counter[str]()
    busy = Counter[str]()
    for event in profile.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False):
                kernels[event.name] += 1
                busy[event.name] += event.device_time_total
        elif event.name in (*LAUNCHES, *WAITS):
            calls[event.name] += 1
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        plain = folder / f"{name}.json"
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(f"{plain}.gz", "wb") as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
    return {
        "kernels": sum(kernels.values()) / PROFILED,
        "kernel_ms": sum(busy.values()) / PROFILED / 1e3,
        "calls": {call: count / PROFILED for call, count in sorted(calls.items())},
        "most": {
            kernel[:120]: [round(us / PROFILED / 1e3, 4), kernels[kernel] / PROFILED]
            for kernel, us in busy.most_common(40)
        },
    }


def rank_main(arguments: argparse.Namespace) -> None:
    """Make all contestants on both ranks; rank 0 records times. With a network both ranks step."""
    device, network = torch.device(arguments.device), arguments.network
    if network and device.type == "cuda":
        # Else two ranks may not share a GPU.
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo"}
        dist.init_process_group("nccl", device_id=device)
    else:
        join()
    leads = dist.get_rank() == 0
    made = {"model": arguments.model, "device": arguments.device, "network": network}
    results = Results(arguments.json if leads else None, **made)
    maker = Maker(arguments.model, device, network=network)
    steps, facts = dict[str, Step](), dict[str, dict[str, Any]]()
    begun = time.perf_counter()
    on = device if network else "cpu"
    for name in arguments.names.split(","):
        took = torch.tensor(time.perf_counter() - begun, device=on)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if took > arguments.make_s:
            break
        step, found = made_and_run(maker, name, device)
        failed = torch.tensor(float(step is None), device=on)
        dist.all_reduce(failed)
        if step is not None and not failed.item():
            steps[name], facts[name] = step, found
        if leads:
            print(f"{name}: {found}", flush=True)
            if step is None:
                results.add({"contestant": name, **found})
    if leads or network:
        times = take_turns(steps, arguments.rounds, device, network=network)
        for name, step in steps.items():
            found = profiled(name, step, device, arguments.trace if leads else None)
            results.add({"contestant": name, **facts[name], **times[name], **found})
    dist.barrier()
    dist.destroy_process_group()


def tell(path: Path) -> None:
    found = [record for record in read(path) if "wall_ms" in record]
    head = "step | wall ms > | p10 > | p90 > | launched > | of ten > | kernels > | in kernels > | peak MB > | made, s >"
    rows = [
        (
            r["contestant"], *(f"{r['wall_ms'][each]:.2f}" for each in ("median", "p10", "p90")),
            *(f"{r[each]['median']:.2f}" for each in ("launch_ms", "through_ms")), f"{r['kernels']:.0f}",
            f"{r['kernel_ms']:.2f}", f"{r['peak_mb']:.0f}", f"{r['made_s']:.0f}",
        )
        for r in found
    ]  # fmt: skip
    print(table(head, rows))


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--model", choices=MODELS, default="127m")
    parser.add_argument("--names", default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each contestant that count")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="keep profiles here")
    parser.add_argument("--network", action="store_true", help="gradients cross NCCL's sockets between the ranks")
    parser.add_argument("--make-s", type=float, default=180, metavar="SECONDS", help="after them no more are made")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return 0
    if arguments.json is None:
        parser.error("--json FILE is needed: ranks write there")

    def hear(rank: int, line: str) -> None:
        print(line if rank == 0 else f"[rank {rank}] {line}", flush=True)

    run_ranks([__file__, *sys.argv[1:]], ranks_per_host=2, timeout_s=arguments.timeout, on_line=hear)
    tell(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
