"""Measure what a cost table holds, on this machine: the only file here with a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fxcomp.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.compressors.powersgd import near_square
from fxcomp.cost import collectives as formulas
from fxcomp.cost.table import AlphaBeta, CompressorPoint, Roofline
from fxcomp.strategy import CollectiveKind, Device

TimeCollective = Callable[[CollectiveKind, Level, int], float]
"""Runs one collective over so many bytes; returns seconds, the slowest rank's, the same number on every rank."""

SMALLEST_BYTES = 1 << 10
LARGEST_BYTES = 16 << 20
GROWTH = 4
REPEATS = 3
RANKS = 2  # whose payloads a compressor is timed with


def measure_collectives(
    time_collective: TimeCollective, cluster: Cluster, budget_s: float = 3.0
) -> dict[tuple[CollectiveKind, Level], AlphaBeta]:
    """Fit α and bandwidth of all_reduce and all_gather at each level of the cluster to live timings.

    What is measured next depends on the returned numbers alone: ranks that took different decisions would wait for
    each other for ever. So time is what `time_collective` says has passed, never a clock.
    """
    pairs = [
        (kind, level) for level in _levels(cluster) for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
    ]
    fits: dict[tuple[CollectiveKind, Level], AlphaBeta] = {}
    for kind, level in pairs:
        samples = _sample(
            lambda size, kind=kind, level=level: time_collective(kind, level, size), budget_s / len(pairs)
        )
        fits[kind, level] = fit_alpha_beta(kind, cluster.ranks_at(level), samples)
    return fits


def _levels(cluster: Cluster) -> list[Level]:
    if cluster.world_size == 1:
        return []
    return list(Level) if cluster.has_levels else [Level.WORLD]


def _sample(timed: Callable[[int], float], budget_s: float) -> list[tuple[int, float]]:
    """Time growing sizes while the budget lasts: the next size may cost `GROWTH` times the last."""
    spent = timed(SMALLEST_BYTES)  # the first one opens connections: not a sample
    samples: list[tuple[int, float]] = []
    size = SMALLEST_BYTES
    while size <= LARGEST_BYTES:
        for _ in range(REPEATS):
            seconds = timed(size)
            spent += seconds
            samples.append((size, seconds))
            if spent + seconds > budget_s and len(samples) > REPEATS:
                return samples
        if spent + GROWTH * samples[-1][1] > budget_s and size > SMALLEST_BYTES:
            break
        size *= GROWTH
    return samples


def fit_alpha_beta(kind: CollectiveKind, ranks: int, samples: Sequence[tuple[int, float]]) -> AlphaBeta:
    """Fit `steps · α + wire bytes / B` to (bytes, seconds): the median of each size, by least squares.

    Medians, because another job's traffic must not bend the line. Weighted 1/t, between absolute errors, which would
    leave α to noise, and relative ones, which would believe the short bursts that a shaped link lets through.
    """
    steps = formulas.steps(kind, ranks)
    sizes = sorted({size for size, _ in samples})
    medians = [1e6 * max(1e-9, statistics.median(t for size, t in samples if size == s)) for s in sizes]
    rows = [(steps, formulas.wire_bytes(kind, ranks, size), us) for size, us in zip(sizes, medians, strict=True)]
    alpha, us_per_byte = _least_squares(rows)
    errors = [abs(alpha * s + us_per_byte * b - t) / t for s, b, t in rows]
    return AlphaBeta(
        alpha_us=alpha,
        gb_per_s=1e-3 / us_per_byte,
        spread=statistics.median(errors),
        source=f"measured, {len(samples)} samples up to {max(sizes):,} bytes",
    )


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Minimise Σ (α s + β b - t)² / t with α ≥ 0 and β > 0."""
    ss = sum(s * s / t for s, _, t in rows)
    sb = sum(s * b / t for s, b, t in rows)
    bb = sum(b * b / t for _, b, t in rows)
    st, bt = sum(s for s, _, _ in rows), sum(b for _, b, _ in rows)
    determinant = ss * bb - sb * sb
    if determinant > 1e-12 * ss * bb:
        alpha, beta = (st * bb - bt * sb) / determinant, (bt * ss - st * sb) / determinant
        if alpha >= 0 and beta > 0:
            return alpha, beta
        if beta <= 0:  # time does not grow with size: the link is too fast to be seen
            return st / ss, _FASTEST_US_PER_BYTE
    return 0.0, max(bt / bb, _FASTEST_US_PER_BYTE)


_FASTEST_US_PER_BYTE = 1e-6  # 1 TB/s: nothing measured here is faster


def measure_compressors(
    compressors: Sequence[Compressor],
    sizes: Sequence[int] = (4_096, 65_536, 524_288, 2_097_152, 8_388_608),
    *,
    device: Device = Device.GPU,
    on: torch.device | None = None,
    each_s: float = 0.25,
) -> dict[str, tuple[CompressorPoint, ...]]:
    """Time proposing, encoding and decoding at growing sizes, keyed as a cost table wants it.

    `device` is the name to file the numbers under, `on` is where the tensors lie (default: the CPU, and then the
    threads are those that the caller allows). A compressor stops at a smaller size where more would take it longer than
    `each_s`. One that knows shapes is given a matrix, as square as its size allows.
    """
    on = on or torch.device("cpu")
    source = torch.randn(max(sizes), generator=torch.Generator().manual_seed(0)).to(on)
    return {f"{c}@{device.value}": _measure_compressor(c, source, sorted(sizes), each_s) for c in compressors}


def _measure_compressor(
    compressor: Compressor, source: torch.Tensor, sizes: Sequence[int], budget_s: float
) -> tuple[CompressorPoint, ...]:
    points: list[CompressorPoint] = []
    begun = time.perf_counter()
    for size in sizes:
        if points and time.perf_counter() - begun + _cost_of_next_s(points[-1], size) > budget_s:
            break
        points.append(_measure_point(compressor.bound_to([near_square(size)], RANKS), source[:size]))
    return tuple(points)


def _measure_point(compressor: Compressor, bucket: torch.Tensor) -> CompressorPoint:
    """Time one size, for one of `RANKS` ranks that bring the same."""
    facts, segments, on = compressor.facts, (bucket.numel(),), bucket.device
    residual = torch.zeros_like(bucket) if compressor.needs_error_feedback else None
    state = compressor.fresh_state(bucket.numel(), 0, 0).to(on) if compressor.has_state else None
    proposal = torch.zeros(compressor.proposal_elements(segments), dtype=facts.proposal_dtype, device=on)
    propose_us, agreed = 0.0, None
    if facts.agreement is not None:
        propose_us = median_us(lambda: compressor.propose(bucket, residual, segments, state, proposal), on=on)
        agreed = proposal
    payload = torch.zeros(compressor.payload_elements(segments), dtype=compressor.payload_dtype, device=on)
    encode_us = median_us(lambda: compressor.encode(bucket, residual, payload, segments, state, agreed), on=on)
    copies, out = 1 if compressor.is_linear else RANKS, torch.zeros_like(bucket)
    payloads, known = payload.repeat(copies), state if facts.decode_needs_state else None
    decode_us = median_us(lambda: compressor.decode(payloads, copies, segments, out, agreed, known), on=on)
    return CompressorPoint(bucket.numel(), encode_us, decode_us / copies, propose_us)


def _cost_of_next_s(last: CompressorPoint, size: int) -> float:
    once_us = last.propose_us + last.encode_us + RANKS * last.decode_us
    return 1e-6 * size / last.elements * 2 * REPEATS * once_us


def measure_memory(on: torch.device | None = None) -> tuple[float, Roofline]:
    """Measure how fast a bucket is filled (its bytes, in GB/s), and the roofline of matrix products and copies."""
    on = on or torch.device("cpu")
    source = torch.ones(16 << 20, device=on)  # 64 MiB: a cache must not hold it
    target = torch.zeros_like(source)
    square = torch.ones(512, 512, device=on)
    product = torch.zeros_like(square)
    pack_us = median_us(lambda: torch.mul(source, 0.5, out=target), on=on)
    gemm_us = median_us(lambda: torch.mm(square, square, out=product), on=on)
    size = source.numel() * source.element_size()
    roofline = Roofline(gflops=2 * 512**3 / gemm_us / 1e3, gb_per_s=2 * size / pack_us / 1e3, source="measured")
    return size / pack_us / 1e3, roofline


def measure_copy(on: torch.device) -> float | None:
    """Measure the slower direction between pinned host memory and a device, in GB/s; None if they are the same."""
    if on.type == "cpu":
        return None
    host = torch.zeros(4 << 20, pin_memory=True)
    there = torch.zeros_like(host, device=on)
    slower_us = max(
        median_us(lambda: there.copy_(host, non_blocking=True), on=on),
        median_us(lambda: host.copy_(there, non_blocking=True), on=on),
    )
    return host.numel() * host.element_size() / slower_us / 1e3


def median_us(run: Callable[[], object], *, on: torch.device, repeats: int = 2 * REPEATS - 1) -> float:
    """The median time of a call, after one that does not count. On a GPU until the device is done."""
    run()
    times: list[float] = []
    for _ in range(repeats):
        _synchronize(on)
        begun = time.perf_counter()
        run()
        _synchronize(on)
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times)


def _synchronize(on: torch.device) -> None:
    if on.type != "cpu":
        torch.accelerator.synchronize(on)
