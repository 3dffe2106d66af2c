"""Check and time every compressor's kernels on a GPU; called by `gpu_all.py`.

Checks compare a round on the GPU with plain torch on the CPU, bit for bit if the compressor has Triton kernels, and
verify that a step never waits for the GPU. Times are GB/s of the minimum of touched bytes, and their share of a copy on
the device: `{compressor, device, kernels, n, encode_gbps, decode_gbps, copy_gbps, encode_share, decode_share}`. Buckets
below about 2^23 values, and the copies of this size, stay in the GPU's cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from helpers.devices import round_on
from records import Results

from fxcomp.compressors import CATALOGUE, Compressor, Feedback, parse_compressor
from fxcomp.compressors.triton import dispatch
from fxcomp.testing import SAMPLES, replicas_of
from fxcomp.testing.kernel_checks import assert_same_bits, plain_torch
from fxcomp.testing.samples import NOT_FINITE

TIMED = 15
SIZES = (1 << 26, 1 << 23, 1 << 20, 1 << 16)
NEEDED = ("0.01", "2")  # first parameters for compressors without defaults
VARIANTS = (
    "int8(stochastic=true)",
    "int4(stochastic=true)",
    "int2(stochastic=true)",
    "topk(0.1)",
)
SEGMENTS = ((0, 1, 513, 0, 66, 3), (65_537,), (3_000_000, 70_000))
CPU = torch.device("cpu")


def every_compressor() -> list[Compressor]:
    """Return all registered compressors, with defaults or the first valid parameters, and variants."""
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
    return dispatch.available() and dispatch.has_kernels(type(compressor))


def bits(results: Results, device: torch.device, share: tuple[int, int]) -> None:
    """Check the i-th of n shares of all compressors, `share` = (i, n)."""
    for compressor in every_compressor()[share[0] :: share[1]]:
        name = f"{compressor} on the device"
        results.check(name, lambda compressor=compressor: same_as_on_the_cpu(compressor, device))
        results.check(f"{name}, without waiting", lambda compressor=compressor: waits_nowhere(compressor, device))


def speeds(results: Results, device: torch.device, sizes: tuple[int, ...] = SIZES) -> None:
    """Time every compressor, those with kernels first."""
    for compressor in sorted(every_compressor(), key=lambda each: not has_kernels(each)):
        for n in sizes:
            results.check(f"{compressor}, {n} values", lambda c=compressor, n=n: speed(results, c, n, device))


def same_as_on_the_cpu(compressor: Compressor, device: torch.device) -> tuple[bool, str]:
    """Compare bits if the compressor has kernels; else the relative difference, as references may round differently."""
    off = 0.0
    for segments in SEGMENTS:
        for name in SAMPLES if sum(segments) < 1000 else ("laplace",):
            bucket, feedback = SAMPLES[name](sum(segments)), compressor.feedback is not Feedback.FORBIDDEN
            with plain_torch():
                expected = round_on(CPU, compressor, bucket, segments, feedback=feedback)
            actual = round_on(device, compressor, bucket, segments, feedback=feedback)
            if has_kernels(compressor):
                for what, tensor in expected.items():
                    # NaN sums have other bits on GPUs, and integer payloads contain them.
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
    """Return in-place functions that encode (with proposal and residual if supported) and decode one payload."""
    bound, n = compressor.bound_to((), 1), sum(segments)  # without shapes, low-rank compressors assume square matrices
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
    encode(), decode()  # compile and make this division's tables
    if device.type != "cuda":
        return True, "there is nothing to wait for"
    torch.cuda.set_sync_debug_mode("error")
    try:
        encode(), decode()
    except RuntimeError as error:
        # Only kernels must not wait; a reference's wait is reported.
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
    device_us, host_us = median_us(contestants, device)
    gbps = {name: touched[name] / us / 1e3 for name, us in device_us.items()}
    shares = {f"{name}_share": gbps[name] / gbps["copy"] for name in ("encode", "decode")}
    results.add(
        {"compressor": str(compressor), "device": str(device), "kernels": has_kernels(compressor), "n": n}
        | {f"{name}_gbps": value for name, value in gbps.items()}
        | {f"{name}_us": value for name, value in device_us.items()}
        | {f"{name}_host_us": value for name, value in host_us.items()}
        | shares
    )
    text = ", ".join(
        f"{name} {gbps[name]:.0f} GB/s ({shares[f'{name}_share']:.2f}, launched in {host_us[name]:.0f} us)"
        for name in ("encode", "decode")
    )
    return True, f"{text}; a copy {gbps['copy']:.0f} GB/s"


def median_us(
    contestants: dict[str, Callable[[], object]], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Time contestants in turns: device time by GPU events, and the host's launch time.

    The GPU sleeps until the host has launched all work, so that device times exclude launching.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    hosts: dict[str, list[float]] = {name: [] for name in contestants}
    asleep = 2_000_000  # cycles: about 1 ms; raised if launches take longer
    for turn in range(TIMED + 3):
        for name, run in contestants.items():
            start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
            if device.type == "cuda":
                torch.cuda._sleep(asleep)  # pyright: ignore[reportPrivateUsage] nothing public waits on the device
            start.record()
            begun = time.perf_counter()
            run()
            took = 1e6 * (time.perf_counter() - begun)
            end.record()
            end.synchronize()
            if turn >= 3:  # the first turns compile and warm up
                times[name].append(1e3 * start.elapsed_time(end))
                hosts[name].append(took)
            elif turn == 2:
                asleep = max(asleep, int(4000 * took))  # twice the launch time, at 2 cycles per ns
    medians = [{name: statistics.median(found) for name, found in each.items()} for each in (times, hosts)]
    return medians[0], medians[1]
