"""Measure collectives, compressors and memory for a cost table. Only this module of the package reads a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.topology import GroupTopology
from fxcomp.compressors import Compressor
from fxcomp.compressors.powersgd import near_square
from fxcomp.cost.collectives import Library, large_algorithm
from fxcomp.cost.fit import anchored, fit
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective, compressor_key, format_bytes
from fxcomp.cost.roofline import Roofline
from fxcomp.plan.kinds import IN_STEPS, CollectiveKind
from fxcomp.plan.strategy import Device

TimeCollective = Callable[[CollectiveKind, Level, int], float]
"""Runs one collective of this many bytes and returns the slowest rank's seconds, equal on every rank."""

SMALLEST_BYTES = 1 << 10
LARGEST_BYTES = 16 << 20
MOST_RECEIVED = 256 << 20
"""Maximum bytes of a gather's output on one rank, because training needs the memory."""
GROWTH = 4
REPEATS = 3
LONG = 1 / 16
"""Samples longer than this fraction of the time budget are not repeated."""
SLOWER = 1.1
"""Assumed ratio of times per byte, longer to shorter transfer, to estimate the time of the longer transfer."""
RANKS = 2  # for binding a compressor
MANY = 8
"""Decoding is timed with 1 and 8 payloads, because times are linear in payloads. With 1 and 4 payloads, which fit a
cache, predictions for 16 payloads would be 34 % too low (int8, measured, 2026-11).
"""


# Collectives


def measure_collectives(
    time_collective: TimeCollective,
    cluster: Cluster,
    budget_s: float = 3.0,
    *,
    kinds: Sequence[CollectiveKind] = IN_STEPS,
    library: Library | None = None,
    largest: int = LARGEST_BYTES,
    rounds: int = 1,
) -> dict[tuple[CollectiveKind, str], MeasuredCollective]:
    """Fit timings of collectives at each level, keyed by collective and topology. Every rank calls it.

    Round 1 times sizes that grow by `GROWTH`, round 2 sizes in between, round 3 all again. The number of samples
    depends only on the times that `time_collective` returns, which are equal on all ranks; with local clocks ranks
    could start different collectives and deadlock. Time that a collective does not use is left to later collectives.
    If `library` is given, an all_to_all is skipped among two ranks, or if the all_gather uses the same algorithm.
    """
    pairs = [
        (kind, level)
        for level in _levels(cluster)
        for kind in kinds
        if library is None or not _is_told_by_gather(kind, cluster.topology_at(level), library)
    ]
    fits: dict[tuple[CollectiveKind, str], MeasuredCollective] = {}
    for k, (kind, level) in enumerate(pairs):
        group = cluster.topology_at(level)
        if group.ranks == 1 or (kind, group.text) in fits:
            continue
        received = group.ranks if kind.gathers else 1
        sizes = _rounds(min(largest, MOST_RECEIVED // received), rounds)
        samples, spent = _sample(partial(time_collective, kind, level), sizes, budget_s / (len(pairs) - k))
        budget_s -= spent
        fits[kind, group.text] = fitted_collective(group.ranks, samples)
    return fits


def _is_told_by_gather(kind: CollectiveKind, group: GroupTopology, library: Library) -> bool:
    gather = CollectiveKind.ALL_GATHER
    alike = group.ranks == 2 or large_algorithm(kind, group, library) is large_algorithm(gather, group, library)
    return kind is CollectiveKind.ALL_TO_ALL and alike


def fitted_collective(ranks: int, samples: Sequence[tuple[int, float]]) -> MeasuredCollective:
    times = [(size, 1e6 * seconds) for size, seconds in samples]
    found = anchored(fit(times), times)
    largest = max(size for size, _ in samples)
    return MeasuredCollective(ranks, found, f"measured, {len(samples)} samples up to {format_bytes(largest)}")


def _levels(cluster: Cluster) -> list[Level]:
    if cluster.world_size == 1:
        return []
    return [level for level in Level if cluster.ranks_at(level) > 1] if cluster.has_levels else [Level.WORLD]


def _rounds(largest: int, rounds: int) -> list[list[int]]:
    coarse = [SMALLEST_BYTES]
    while coarse[-1] * GROWTH <= largest:
        coarse.append(coarse[-1] * GROWTH)
    between = [size * GROWTH // 2 for size in coarse[:-1]]
    if largest >= 2 * coarse[-1]:
        coarse.append(largest)
    return [coarse, between, sorted(coarse + between)][:rounds]


def _sample(
    timed: Callable[[int], float], rounds: Sequence[Sequence[int]], budget_s: float
) -> tuple[list[tuple[int, float]], float]:
    """Time every size of every round within the budget; return the samples and the seconds spent.

    The expected time of a size is its shortest time so far. For a new size it is the time of the next smaller size,
    scaled. If the largest sizes were not timed, the remaining budget pays for one more sample, because long transfers
    have another rate. Its size is at least twice the largest size so far, or else the largest size so far again.
    """
    spent = timed(SMALLEST_BYTES)  # opens connections; not a sample
    samples: list[tuple[int, float]] = []
    known: dict[int, float] = {}
    for sizes in rounds:
        for size in sizes:
            for _ in range(REPEATS):
                below = max((other for other in known if other < size), default=None)
                next_s = known.get(size) or (0.0 if below is None else known[below] * size / below)
                if len(samples) > REPEATS and spent + next_s > budget_s:
                    break
                seconds = timed(size)
                spent += seconds
                samples.append((size, seconds))
                known[size] = min(seconds, known.get(size, seconds))
                if seconds > LONG * budget_s:
                    break
    last, most = max(known), max(max(sizes) for sizes in rounds)
    fits = min(most / last, (budget_s - spent) / (SLOWER * known[last]))
    if fits < 1 or last == most:
        return samples, spent
    size = int(last * fits) // SMALLEST_BYTES * SMALLEST_BYTES if fits >= 2 else last
    seconds = timed(size)
    return [*samples, (size, seconds)], spent + seconds


# Compressors

SIZES = (8_192, 1_048_576, 4_194_304)
"""Sizes at which compressors are timed, in elements.

Of all triples tried, linear interpolation between these predicts ten other sizes best (measured, 2026-11).
"""


def measure_compressors(
    compressors: Sequence[Compressor],
    sizes: Sequence[int] = SIZES,
    *,
    device: Device = Device.GPU,
    on: torch.device | None = None,
    each_s: float = 0.25,
) -> dict[str, CompressorCost]:
    """Time proposing, encoding and decoding at growing sizes. Return costs by the keys of a cost table.

    Calls run as in a step: the bucket has just been filled, and other data is in the caches. bf16 of 65,536 values
    takes 0.14 ms as in a step, 0.02 ms if only repeated (measured, 2026-11). `device` is the name in the key, `on` the
    tensors' device (default CPU, with the number of torch's threads in the key). The two smallest sizes are always
    timed, larger sizes if expected to take at most `each_s` seconds. Compressors that use shapes get a nearly square
    matrix.
    """
    on = on or torch.device("cpu")
    values = torch.zeros(4, max(sizes), device=on)
    values[0] = torch.randn(max(sizes), generator=torch.Generator().manual_seed(0))
    other = torch.zeros((CPU_CACHES if on.type == "cpu" else GPU_CACHES) // 4, device=on)
    threads = torch.get_num_threads() if on.type == "cpu" else None
    return {
        compressor_key(str(c), device.value, threads): _measure_compressor(c, values, other, sorted(sizes), each_s)
        for c in compressors
    }


CPU_CACHES, GPU_CACHES = 64 << 20, 256 << 20
"""Bytes that exceed one rank's caches (assumed)."""


def _measure_compressor(
    compressor: Compressor, values: torch.Tensor, other: torch.Tensor, sizes: Sequence[int], budget_s: float
) -> CompressorCost:
    points: list[CompressorPoint] = []
    for size in sizes:
        if len(points) > 1 and _cost_of_s(points[-1], size) > budget_s:
            break
        points.append(_measure_point(compressor.bound_to([near_square(size)], RANKS), values[:, :size], other))
    return CompressorCost(tuple(points))


def _measure_point(compressor: Compressor, values: torch.Tensor, other: torch.Tensor) -> CompressorPoint:
    """Time a compressor at one size. Between calls, reading `other` fills the caches.

    `values` has a gradient row and three scratch rows, because new memory would dominate the times.
    """
    source, bucket, residual, out = values
    facts, segments, on = compressor.facts, (bucket.numel(),), bucket.device

    def median(run: Callable[[], object]) -> float:
        return median_us(run, on=on, repeats=REPEATS, before=other.sum)

    def median_after_packing(run: Callable[[], object]) -> float:
        # Packing also fills the caches, so `rest` is smaller.
        rest = other[2 * len(bucket) :]
        return median_us(run, on=on, repeats=REPEATS, before=lambda: (rest.sum(), bucket.copy_(source)))

    residual = residual.zero_() if compressor.needs_error_feedback else None
    state = compressor.fresh_state(bucket.numel(), 0, 0).to(on) if compressor.has_state else None
    proposal = torch.zeros(compressor.proposal_elements(segments), dtype=facts.proposal_dtype, device=on)
    propose_us, agreed = 0.0, None
    if facts.agreement is not None:
        propose_us = median_after_packing(lambda: compressor.propose(bucket, residual, segments, state, proposal))
        agreed = proposal
    payload = torch.zeros(compressor.payload_elements(segments), dtype=compressor.payload_dtype, device=on)
    encode_us = median_after_packing(lambda: compressor.encode(bucket, residual, payload, segments, state, agreed))
    known = state if facts.decode_needs_state else None

    def decode_us(ranks: int, payloads: torch.Tensor) -> float:
        return median(lambda: compressor.decode(payloads, ranks, segments, out, agreed, known))

    first_us, all_us = decode_us(1, payload), decode_us(MANY, payload.repeat(MANY))
    further_us = max(0.0, all_us - first_us) / (MANY - 1)
    return CompressorPoint(bucket.numel(), encode_us, first_us, propose_us, further_us)


def _cost_of_s(last: CompressorPoint, size: int) -> float:
    once_us = last.propose_us + last.encode_us + 2 * last.decode_us + (MANY - 1) * (last.decode_more_us or 0.0)
    return 1e-6 * size / last.elements * (REPEATS + 1) * once_us


# Memory


def measure_memory(on: torch.device | None = None) -> tuple[float, Roofline]:
    """Measure the rate of filling a bucket (GB/s), and the roofline."""
    on = on or torch.device("cpu")
    source = torch.ones(16 << 20, device=on)  # 64 MiB, larger than caches
    target = torch.zeros_like(source)
    pack_us = median_us(lambda: torch.mul(source, 0.5, out=target), on=on)
    size = source.numel() * source.element_size()
    others = {} if on.type == "cpu" else {"bf16": _gflops(torch.bfloat16, on), "f16": _gflops(torch.float16, on)}
    gb_per_s = 2 * size / pack_us / 1e3
    roofline = Roofline(gflops=_gflops(torch.float32, on), gb_per_s=gb_per_s, source="measured", others=others)
    return size / pack_us / 1e3, roofline


def _gflops(dtype: torch.dtype, on: torch.device) -> float:
    """Measure the GFLOP/s of a product of square matrices, large enough to use the whole device."""
    side = 512 if on.type == "cpu" else 4096
    square = torch.ones(side, side, device=on, dtype=dtype)
    product = torch.zeros_like(square)
    return 2 * side**3 / median_us(lambda: torch.mm(square, square, out=product), on=on) / 1e3


def measure_copy(on: torch.device) -> float | None:
    """Measure copies between pinned host memory and a device; return the slower direction in GB/s, None on the CPU."""
    if on.type == "cpu":
        return None
    host = torch.zeros(4 << 20, pin_memory=True)
    there = torch.zeros_like(host, device=on)
    slower_us = max(
        median_us(lambda: there.copy_(host, non_blocking=True), on=on),
        median_us(lambda: host.copy_(there, non_blocking=True), on=on),
    )
    return host.numel() * host.element_size() / slower_us / 1e3


def median_us(
    run: Callable[[], object],
    *,
    on: torch.device,
    repeats: int = 2 * REPEATS - 1,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Return the median time of a call after a warm-up, in µs; `before` runs untimed."""
    run()
    times: list[float] = []
    for _ in range(repeats):
        before()
        compat.synchronize(on)
        begun = time.perf_counter()
        run()
        compat.synchronize(on)
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times)
