"""Check and time everything that needs a GPU, in one call: what to run first on a machine that has one.

    python benchmarks/gpu_all.py --json gpu.json
    python benchmarks/gpu_all.py --json gpu.json --only int8      # only what has this in its name

It runs from a checkout, installed or not, and builds the C++ kernels first if they are not there. The file has every
record as soon as there is one, so a run that is cut off loses nothing that it has found.

On one GPU: parity of the compiled step with eager PyTorch, with eager regions and with Inductor's; training scripts as
people have them (`gpu_scripts.py`); the CPU-offload path against the same compressor on the GPU, over two processes
that share the GPU through gloo, and through NCCL if it lets them. Each check prints a line and becomes a record
`{check, ok, detail}`; each time a record `{name, ms: {median, p10, p90, n}}`.

Every compressor: a round of two ranks on the GPU against the same in plain torch on the CPU, bit for bit where it has
Triton kernels; that a step waits for the GPU nowhere; and GB/s over the bytes that it must touch, as a share of a copy
on the device, `{compressor, device, kernels, n, encode_gbps, decode_gbps, copy_gbps, encode_share, decode_share}`.
Buckets below about 2^23 values stay in the GPU's cache, and so does the copy that they are compared with.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from gpu_records import TIMED, Results
from gpu_scripts import SCRIPTS, SHARDED, largest_distance, sharded_distance
from helpers.devices import round_on
from records import options, read
from torch import nn

import fxcomp
from fxcomp.cluster.cluster import Level
from fxcomp.codegen import program
from fxcomp.commands.demo.gpt import GPT
from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.compressors import CATALOGUE, Compressor, Feedback, kernels, parse_compressor, triton
from fxcomp.frontends.job import Job
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Device, Strategy
from fxcomp.testing import SAMPLES, replicas_of
from fxcomp.testing.kernel_checks import assert_same_bits, plain_torch
from fxcomp.testing.samples import NOT_FINITE

STEPS = 20
SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
NEEDED = ("0.01", "2", "2.0, 0.01")  # what the first parameters may be where a compressor has no defaults
VARIANTS = (
    "int8(stochastic=true)",
    "int4(stochastic=true)",
    "int2(stochastic=true)",
    "shared_int8(stochastic=false)",
    "randomk(0.01, scaled=true)",
    "topk(0.1)",
)
SEGMENTS = ((0, 1, 513, 0, 66, 3), (65_537,), (3_000_000, 70_000))
CPU = torch.device("cpu")


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


def one_gpu(results: Results) -> None:
    contestants: dict[str, Callable[[], object]] = {"eager": eager_step(job())}
    for regions in ("eager", "inductor"):
        program.INDUCTOR_DEVICES = ("cuda",) if regions == "inductor" else ()

        def parity(regions: str = regions) -> tuple[bool, str]:
            mine, reference = job(), job()
            step, eager = (
                compiled_step(mine, checks=fxcomp.Checks(verify=1 if regions == "eager" else 0)),
                eager_step(reference),
            )
            for _ in range(STEPS):
                step(mine.batch), eager()
            contestants[f"compiled, {regions} regions"] = lambda: step(mine.batch)
            difference = largest_difference(mine.model, reference.model)
            return difference <= (1e-5 if regions == "eager" else 1e-3), f"{difference:.3g} after {STEPS} steps"

        def clock() -> tuple[bool, str]:
            mine = job()
            step = compiled_step(mine, checks=fxcomp.Checks(verify="never"))
            for _ in range(STEPS):
                step(mine.batch)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(TIMED):
                step(mine.batch)
            torch.cuda.synchronize()
            ms = 1e3 * (time.perf_counter() - start) / TIMED
            return (
                0.7 < step.step_ms / ms < 1.3,
                f"{step.step_ms:.3g} ms by the step's own clock, {ms:.3g} by the wall's",
            )

        results.check(f"parity with eager, {regions} regions", parity)
        results.check(f"what a step says it takes, {regions} regions", clock)
    if not results.only:
        results.time(contestants)


def every_compressor() -> list[Compressor]:
    """All that are registered, with their defaults, or else with the first parameters that they take; and variants."""
    found: list[Compressor] = []
    for name in sorted(CATALOGUE):
        for text in (name, *(f"{name}({value})" for value in NEEDED)):
            try:
                found.append(parse_compressor(text))
                break
            except ValueError:
                continue
    return found + [parse_compressor(text) for text in VARIANTS]


def has_kernels(compressor: Compressor) -> bool:
    return triton.available() and triton.has_kernels(type(compressor))


def compressors(results: Results, device: torch.device, sizes: tuple[int, ...] = SIZES) -> None:
    """Check and time every compressor on a device."""
    for compressor in every_compressor():
        name = f"{compressor} on the device"
        results.check(name, lambda compressor=compressor: same_as_on_the_cpu(compressor, device))
        results.check(f"{name}, without waiting", lambda compressor=compressor: waits_nowhere(compressor, device))
        for n in sizes:
            results.check(f"{name}, {n} values", lambda c=compressor, n=n: speed(results, c, n, device))


def same_as_on_the_cpu(compressor: Compressor, device: torch.device) -> tuple[bool, str]:
    """Bit for bit if it has kernels; a reference may round otherwise on a GPU, and only says how far it is off."""
    off = 0.0
    for segments in SEGMENTS:
        for name in SAMPLES if sum(segments) < 1000 else ("laplace",):
            bucket, feedback = SAMPLES[name](sum(segments)), compressor.feedback is not Feedback.FORBIDDEN
            with plain_torch():
                expected = round_on(CPU, compressor, bucket, segments, feedback=feedback)
            actual = round_on(device, compressor, bucket, segments, feedback=feedback)
            if has_kernels(compressor):
                for what, tensor in expected.items():
                    # A GPU's sum of a NaN is another NaN than a processor's, and a payload has them as bytes.
                    if name not in NOT_FINITE or tensor.is_floating_point():
                        assert_same_bits(actual[what], tensor, f"{name}, {segments}, {what}")
            one, two = actual["mean of 1"].nan_to_num(), expected["mean of 1"].nan_to_num()
            off = max(off, ((one - two).abs().sum() / two.abs().sum().clamp_min(1e-30)).item())
    if has_kernels(compressor):
        return True, "bits equal the reference's on the CPU"
    return off < 1e-2, f"no kernels; the reference on the device is off by {off:.1e}"


def step_of(
    compressor: Compressor, segments: tuple[int, ...], device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Propose if ranks agree, encode with error feedback where it may have it, and decode one payload; in place."""
    bound, n = compressor.bound_to((), 1), sum(segments)  # without shapes, low rank sees squares
    [replica] = replicas_of(bound, segments, feedback=compressor.feedback is not Feedback.FORBIDDEN)
    residual = None if replica.residual is None else replica.residual.to(device)
    state = None if replica.state is None else replica.state.to(device)
    bucket, out = torch.randn(n, device=device), torch.empty(n, device=device)
    payload = torch.empty(bound.payload_elements(segments), dtype=bound.payload_dtype, device=device)
    agreed = None
    if bound.facts.agreement is not None:
        agreed = torch.empty(bound.proposal_elements(segments), dtype=bound.facts.proposal_dtype, device=device)
    seen = state if bound.facts.decode_needs_state else None

    def encode() -> None:
        if agreed is not None:
            bound.propose(bucket, residual, segments, state, agreed)
        bound.encode(bucket, residual, payload, segments, state, agreed)

    return encode, lambda: bound.decode(payload, 1, segments, out, agreed, seen)


def waits_nowhere(compressor: Compressor, device: torch.device) -> tuple[bool, str]:
    encode, decode = step_of(compressor, (1 << 16, 70_001, 3), device)
    encode(), decode()  # compiles, and makes the tables of this division
    torch.cuda.set_sync_debug_mode("error")
    try:
        encode(), decode()
    except RuntimeError as error:
        # A kernel must not wait; for a reference it is worth knowing.
        return not has_kernels(compressor), f"waits: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True, "the host waits for nothing"


def speed(results: Results, compressor: Compressor, n: int, device: torch.device) -> tuple[bool, str]:
    encode, decode = step_of(compressor, (n,), device)
    source, target = torch.randn(n, device=device), torch.empty(n, device=device)
    contestants: dict[str, Callable[[], object]] = {
        "encode": encode,
        "decode": decode,
        "copy": lambda: target.copy_(source),
    }
    payload = compressor.bound_to((), 1).payload_bytes((n,))
    is_fed_back = compressor.feedback is not Feedback.FORBIDDEN
    proposing = 0 if compressor.facts.agreement is None else 8 if is_fed_back else 4
    touched = {
        "encode": ((12 if is_fed_back else 4) + proposing) * n + payload,
        "decode": 4 * n + payload,
        "copy": 8 * n,
    }
    gbps = {name: touched[name] / us / 1e3 for name, us in median_us(contestants, device).items()}
    shares = {f"{name}_share": gbps[name] / gbps["copy"] for name in ("encode", "decode")}
    results.add(
        {"compressor": str(compressor), "device": str(device), "kernels": has_kernels(compressor), "n": n}
        | {f"{name}_gbps": value for name, value in gbps.items()}
        | shares
    )
    text = ", ".join(f"{name} {gbps[name]:.0f} GB/s ({shares[f'{name}_share']:.2f})" for name in ("encode", "decode"))
    return True, f"{text}; a copy {gbps['copy']:.0f} GB/s"


def median_us(contestants: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """In turns, by the GPU's own clock, so that launching does not count while the GPU is busy."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(TIMED + 3):
        for name, run in contestants.items():
            start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 3:  # the first ones compile and warm up
                times[name].append(1e3 * start.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


def offload_plan(step: fxcomp.CompiledStep, device: Device) -> Plan:
    strategy = Strategy.flat(parse_compressor("int8"), device, level=Level.WORLD)
    return step.plan.with_strategies([strategy] * len(step.plan.buckets))


def rank_main(backend: str, path: Path) -> None:
    """One of two ranks on one GPU; rank 0 writes its records."""
    if backend == "nccl":
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # NCCL refuses two ranks on one GPU of one host
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    else:
        join()
    results = Results(path if dist.get_rank() == 0 else None)
    program.INDUCTOR_DEVICES = ()
    plans: dict[str, object] = {"dense": "dense", "bf16": "bf16", "int8": "int8"}
    first = compiled_step(job(), compress="dense")
    plans["int8 on the host"] = offload_plan(first, Device.CPU)
    models: dict[str, nn.Module] = {}
    for name, plan in plans.items():

        def agreement(name: str = name, plan: object = plan) -> tuple[bool, str]:
            mine = job()
            step = compiled_step(mine, compress=plan, checks=fxcomp.Checks(verify=5))
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
    if backend == "nccl":  # fully_shard gathers by collectives that gloo has not on a GPU
        for plan in SHARDED:
            check = partial(sharded_distance, plan, torch.device("cuda", 0), STEPS)
            results.check(f"{backend}, fully_shard, {plan}", check)
    dist.destroy_process_group()


def two_ranks(results: Results, backend: str) -> None:
    def run() -> tuple[bool, str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "records.json"
            try:
                run_ranks([__file__, "--rank", backend, "--json", str(path)], ranks_per_host=2, timeout_s=300)
            finally:  # what was found before a rank failed or hung is kept
                records = read(path) if path.exists() else []
                results.add(*records)
        return all(record["ok"] for record in records), f"{len(records)} checks"

    results.check(f"two ranks on one GPU over {backend}", run)


def built_kernels() -> tuple[bool, str]:
    """Build the C++ kernels where they are not; what is slow without them says so in its record."""
    if kernels.available():
        return True, "there already"
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or ["built"])[-1]
    return done.returncode == 0, f"{last}; the ranks that are started from here on use them"


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="run only checks with this in their name")
    parser.add_argument("--rank", choices=("gloo", "nccl"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing was checked")
        return 2
    if arguments.rank:
        rank_main(arguments.rank, arguments.json)
        return 0
    results = Results(arguments.json, arguments.only, device=torch.cuda.get_device_name(0))
    results.check("the C++ kernels are built", built_kernels)
    one_gpu(results)
    for name in SCRIPTS:
        results.check(f"script, {name}", partial(largest_distance, name, torch.device("cuda", 0), STEPS))
    for backend in ("gloo", "nccl"):
        two_ranks(results, backend)
    compressors(results, torch.device("cuda", 0))
    failed = [record for record in results.found if record.get("ok") is False]
    print(f"{len(failed)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
