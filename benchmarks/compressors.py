"""Measure encoding and decoding against a copy of the same values and against torch's equivalents.

    python benchmarks/compressors.py --json compressors.json --report report.md

Rates count the minimum of touched bytes. Encoding reads 4 bytes per value and writes the payload. A residual adds a
read and a write of 4 bytes per value. Decoding reads one rank's payload and writes 4 bytes per value. A copy, torch's
`copy_`, reads and writes 4 bytes. A share is a rate divided by the copy's. Compressor and copy take turns; results are
medians.

Encoding includes a residual if the compressor needs one, and an agreement's proposal. Values and residual are Gaussian.
The residual is reset before each turn, so that every turn does the same work.

`ours_ms` is encoding. `torch_ms` is torch's equivalent on one tensor: `topk` of magnitudes with a gather, a cast, the
math of DDP's per-tensor quantization hook, or of its PowerSGD hook.

All compressors at nine sizes, with one thread and with all, take about ten minutes. `gpu_all.py` times GPU kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from records import Records, options, read, show_progress, table
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor

from fxcomp.compressors import Bias, Compressor, kernels, parse_compressor
from fxcomp.compressors.examples import examples
from fxcomp.testing.rounds import replicas_of

SIZES = tuple(2**exponent for exponent in range(10, 27, 2))
JUDGED_SIZE = 2**24
WARM_UPS = 3
MOST_TURNS, FEWEST_TURNS, LEAST_TURNS = 50, 7, 3
SECONDS = 0.35  # time limit per compressor, size and threads, after FEWEST_TURNS
SLOW_S = 0.7  # a first turn this long gets LEAST_TURNS
TOO_SLOW_S = 6.0  # larger sizes are skipped with a message


@dataclass(frozen=True)
class Record:
    compressor: str
    device: str
    threads: int
    n: int
    encode_gbps: float
    decode_gbps: float
    copy_gbps: float
    encode_share: float
    decode_share: float
    torch_ms: float | None
    ours_ms: float


# Measuring


class Bench:
    """Tensors of one size, and cached times of torch."""

    def __init__(self, n: int, clock: Callable[[], float] = time.perf_counter) -> None:
        random = torch.Generator().manual_seed(0)
        self.clock = clock
        self.n = n
        self.bucket = 0.8 * torch.randn(n, generator=random)
        self.kept = 0.6 * torch.randn(n, generator=random)  # unit variance together with bucket
        self.residual = self.kept.clone()
        self.out = torch.empty_like(self.bucket)
        self.torch_ms: dict[str, float] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Most square matrix shape, for compressors that need one."""
        rows = 1 << (self.n.bit_length() - 1) // 2
        return (rows, self.n // rows) if self.n % rows == 0 else (1, self.n)

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.clock()
        work()
        return self.clock() - start


def measure(compressor: Compressor, bench: Bench, threads: int) -> tuple[Record, float]:
    """Return the record and the seconds of the first turn."""
    bound, segments = compressor.bound_to([bench.shape], 1), (bench.n,)
    residual = bench.residual if compressor.needs_error_feedback else None
    [replica] = replicas_of(bound, segments, feedback=False)
    state = replica.state
    payload = torch.zeros(bound.payload_elements(segments), dtype=bound.payload_dtype)
    agreed = None
    if bound.facts.agreement is not None:
        agreed = torch.zeros(bound.proposal_elements(segments), dtype=bound.facts.proposal_dtype)

    def encode() -> None:
        if agreed is not None:
            bound.propose(bench.bucket, residual, segments, state, agreed)
        bound.encode(bench.bucket, residual, payload, segments, state, agreed)
        if state is not None and bound.facts.state_from_payload:
            state.copy_(payload)

    def decode() -> None:
        bound.decode(payload, 1, segments, bench.out, agreed, state)

    def turn() -> tuple[float, float, float]:
        if residual is not None:
            residual.copy_(bench.kept)
        copied = bench.seconds(lambda: bench.out.copy_(bench.bucket))
        return copied, bench.seconds(encode), bench.seconds(decode)

    started = time.perf_counter()
    turn()
    first_s = time.perf_counter() - started
    if first_s < SLOW_S:
        for _ in range(WARM_UPS):
            turn()
    turns: list[tuple[float, float, float]] = []
    started = time.perf_counter()
    while len(turns) < MOST_TURNS:
        turns.append(turn())
        spent = time.perf_counter() - started
        enough = LEAST_TURNS if first_s >= SLOW_S else FEWEST_TURNS
        if spent > SECONDS and len(turns) >= enough:
            break
    copy_s, encode_s, decode_s = (statistics.median(times) for times in zip(*turns, strict=True))

    payload_bytes = bound.payload_bytes(segments)
    encode_bytes = (4 if residual is None else 12) * bench.n + payload_bytes
    copy_rate = 8 * bench.n / copy_s
    encode_rate, decode_rate = encode_bytes / encode_s, (4 * bench.n + payload_bytes) / decode_s
    return Record(
        str(compressor),
        "cpu",
        threads,
        bench.n,
        encode_rate / 1e9,
        decode_rate / 1e9,
        copy_rate / 1e9,
        encode_rate / copy_rate,
        decode_rate / copy_rate,
        torch_ms_of(compressor, bench),
        encode_s * 1e3,
    ), first_s


# Equivalents in torch


def torch_ms_of(compressor: Compressor, bench: Bench) -> float | None:
    """Time torch's equivalent encoding, in ms; None if there is none."""
    name, work = torch_alternative(compressor, bench) or ("", None)
    if work is None:
        return None
    if name not in bench.torch_ms:
        first_s = bench.seconds(work)
        more = 1 if first_s > 2.0 else LEAST_TURNS if first_s > SECONDS / FEWEST_TURNS else FEWEST_TURNS
        bench.torch_ms[name] = statistics.median(bench.seconds(work) for _ in range(more)) * 1e3
    return bench.torch_ms[name]


def torch_alternative(compressor: Compressor, bench: Bench) -> tuple[str, Callable[[], object]] | None:
    values = bench.bucket
    ratio = getattr(compressor, "ratio", None)
    if compressor.name in CASTS:
        return compressor.name, partial(values.to, CASTS[compressor.name])
    if compressor.name == "int8":
        return "quantise", partial(quantise_as_the_hook, values)
    if compressor.name == "powersgd":
        rank = int(getattr(compressor, "rank", 1))
        random = torch.Generator().manual_seed(0)
        start = torch.randn(bench.shape[1], rank, generator=random)
        return f"powersgd {rank}", partial(powersgd_as_the_hook, values.view(bench.shape), start)
    if ratio is not None:
        return f"topk {ratio}", partial(select, values, max(1, round(ratio * bench.n)))
    return None


CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def select(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    places = values.abs().topk(k, sorted=False).indices
    return values[places], places


def quantise_as_the_hook(values: Tensor) -> Tensor:
    """Quantize to 8 bits between minimum and maximum, as quantization_pertensor_hook does."""
    low, high = values.aminmax()
    low, high = low.clamp_max(0), high.clamp_min(0)
    scale = ((high - low) / 255).clamp_min(torch.finfo(torch.float32).eps)
    zero_point = (-(low / scale).round()).clamp(0, 255)
    return ((values / scale).round() + zero_point).clamp(0, 255).to(torch.uint8)


def powersgd_as_the_hook(matrix: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors and the residual, as powerSGD_hook computes them on one rank."""
    q = torch.linalg.qr(q).Q
    p = torch.linalg.qr(matrix @ q).Q
    q = matrix.T @ p
    return p, q, matrix - p @ q.T


# Verdicts


def target_of(compressor: Compressor) -> float | None:
    """Return the target share of encoding and decoding at the judged size on one thread."""
    if compressor.name.startswith("sidco"):
        return 0.5
    if compressor.name == "topk":
        return 0.35
    if compressor.bias is Bias.UNBIASED or (compressor.has_state and compressor.facts.state_dtype is torch.int64):
        return 0.4
    return 0.8 if compressor.facts.passes == 1 else None


SPEED_UPS = {"sidco": 20.0, "topk": 5.0}  # over torch.topk at 1 %, by name prefix


def verdicts(records: Sequence[Record]) -> list[str]:
    lines: list[str] = []
    for record in records:
        if record.n != JUDGED_SIZE or record.threads != 1:
            continue
        compressor = parse_compressor(record.compressor)
        target = target_of(compressor)
        if target is not None:
            for what, share in (("encodes", record.encode_share), ("decodes", record.decode_share)):
                lines.append(_verdict(f"{record.compressor} {what} at {share:.2f} of a copy", share, target, ""))
        for name, factor in SPEED_UPS.items():
            if compressor.name.startswith(name) and record.torch_ms is not None:
                ratio = record.torch_ms / record.ours_ms
                text = f"{record.compressor} is {ratio:.1f} times as fast as torch.topk"
                lines.append(_verdict(text, ratio, factor, " times"))
    return lines


def _verdict(text: str, value: float, target: float, unit: str) -> str:
    return f"{text}: {'reaches' if value >= target else '**misses**'} {target:g}{unit}"


def report(records: Sequence[Record]) -> str:
    lines = ["# Compressors against a copy", "", INTRODUCTION]
    judged = verdicts(records)
    if judged:
        lines += [f"## Targets, at {_size(JUDGED_SIZE)} values", "", *(f"- {line}" for line in judged), ""]
    for threads in dict.fromkeys(record.threads for record in records):
        found = [record for record in records if record.threads == threads]
        sizes = sorted({record.n for record in found})
        copies = {n: statistics.median(record.copy_gbps for record in found if record.n == n) for n in sizes}
        where = f"{threads} thread{'s' if threads > 1 else ''}"
        lines += [f"## {where}", "", "Shares of a copy's rate, encoding / decoding.", ""]
        rows: list[Sequence[str]] = [("copy, GB/s", *(f"{copies[n]:.1f}" for n in sizes), "")]
        for name in dict.fromkeys(record.compressor for record in found):
            own = {record.n: record for record in found if record.compressor == name}
            cells = [f"{own[n].encode_share:.2f} / {own[n].decode_share:.2f}" if n in own else "–" for n in sizes]
            last = own[max(own)]
            theirs = "–" if last.torch_ms is None else f"{last.torch_ms:.3g}"
            rows.append((name, *cells, f"{last.ours_ms:.3g}, {theirs}"))
        heads = [*map(_size, sizes), "ms at largest: ours, torch's"]
        lines += [table("compressor | " + " > | ".join(heads) + " >", rows), ""]
    return "\n".join(lines).rstrip() + "\n"


INTRODUCTION = """\
Made by `python benchmarks/compressors.py`. Rates count the bytes that must be touched at least: encoding reads 4 bytes
a value, 8 more where error feedback is needed (the residual, read and written), and writes the payload; decoding reads
one rank's payload and writes 4 bytes a value. The copy is torch's `copy_` of the same values, 8 bytes a value, in turns
with the compressor on as many threads; at small sizes its rate is that of a cache. *Ours* is encoding, with its
agreement; *torch's* is `topk` of magnitudes and the gathered values, a cast, the maths of DDP's per-tensor quantisation
hook, or of its PowerSGD hook.
"""


def _size(n: int) -> str:
    exponent = n.bit_length() - 1
    return f"2^{exponent}" if n == 1 << exponent else f"{n:,}"


# The command


def main() -> None:
    arguments = parse_arguments()
    if arguments.render:
        found = [Record(**entry) for entry in read(arguments.render)]
    else:
        print(kernels.describe())
        found, kept = [], Records(arguments.json)
        clock = time.thread_time if arguments.thread_time else time.perf_counter
        for record in measurements(arguments.compressors, arguments.sizes, arguments.threads, clock):
            found.append(record)
            kept.add(record)
    text = report(found)
    if arguments.report:
        arguments.report.write_text(text)
    Console().print(Markdown(text))


def measurements(
    compressors: Sequence[Compressor],
    sizes: Sequence[int],
    threads: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Record]:
    """Yield records from small to large sizes; slow compressors skip larger sizes."""
    for count in threads:
        with threads_of_torch(count):
            left_out: set[Compressor] = set()
            for n in sorted(sizes):
                bench = Bench(n, clock)
                for compressor in compressors:
                    if compressor in left_out:
                        continue
                    show_progress(f"{count} threads, {_size(n)} values: {compressor}")
                    record, turn_s = measure(compressor, bench, count)
                    yield record
                    if turn_s > TOO_SLOW_S:
                        left_out.add(compressor)
                        show_progress("")
                        print(f"{compressor} takes {turn_s:.1f} s at {_size(n)} values: larger sizes are left out")
    show_progress("")


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--compressors", metavar="TEXT", help="only these, separated by semicolons: 'int8;topk(0.01)'")
    parser.add_argument("--sizes", help="values, as 2^24 or 1000000, separated by commas (default 2^10 to 2^26)")
    parser.add_argument("--threads", help="numbers of threads, separated by commas (default 1 and all)")
    parser.add_argument("--thread-time", action="store_true", help="processor time of one thread: others may be busy")
    parser.add_argument("--quick", action="store_true", help="the judged size on one thread alone")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write verdicts and tables here, as Markdown")
    parser.add_argument("--render", type=Path, metavar="FILE", help="measure nothing, take the records of this file")
    arguments = parser.parse_args()
    given, every = arguments.compressors, torch.get_num_threads()
    arguments.compressors = [parse_compressor(text) for text in given.split(";")] if given else examples()
    default_sizes = (JUDGED_SIZE,) if arguments.quick else SIZES
    arguments.sizes = [read_size(text) for text in arguments.sizes.split(",")] if arguments.sizes else default_sizes
    alone = arguments.quick or arguments.thread_time
    default_threads = [1] if alone else sorted({1, every})
    arguments.threads = list(map(int, arguments.threads.split(","))) if arguments.threads else default_threads
    if arguments.thread_time and arguments.threads != [1]:
        parser.error("--thread-time counts one thread on the processor: leave --threads out")
    return arguments


def read_size(text: str) -> int:
    base, _, exponent = text.partition("^")
    return int(base) ** int(exponent or 1)


if __name__ == "__main__":
    main()
