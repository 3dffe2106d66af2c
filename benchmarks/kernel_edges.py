"""Measure the kernels where they were slow: sparse gradients, many small segments, tiny calls, two threads on little.

    git worktree add /tmp/old 22a9f62 && (cd /tmp/old && python setup.py build_ext --inplace)
    python benchmarks/kernel_edges.py --before /tmp/old --json FILE --report FILE

Each version runs in a process of its own; they take turns case by case, and the fastest of the turns counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).parent.parent
LARGE, SPARSE = 1 << 22, 0.001
SMALL, MANY = 2048, 300
ONE_TURN_S = 0.02


@dataclass(frozen=True)
class Case:
    """Encode, and decode one rank's payload, with a residual where there may be one."""

    what: str
    compressor: str
    segments: tuple[int, ...]
    share: float = 1.0
    """Of values that are not zero."""
    threads: int = 1


@dataclass(frozen=True)
class Record:
    case: str
    compressor: str
    before_us: float
    after_us: float


COPY = "a scaled copy"  # no compressor: what a call costs by itself

SELECTING = ("topk(0.01)", "dgc(0.01)", "sidco(0.01)", "threshold(2.5, 0.01)", "chunkmax(0.01)")

CASES = [
    *(Case("2^22 values", text, (LARGE,)) for text in SELECTING),
    *(Case("2^22 values, 0.1 % not zero", text, (LARGE,), SPARSE) for text in SELECTING),
    Case("2^22 values, all zero", "topk(0.01)", (LARGE,), 0.0),
    *(Case(f"{MANY * SMALL} values in one segment", text, (MANY * SMALL,)) for text in (*SELECTING, "int8")),
    *(Case(f"{MANY} segments of {SMALL} values", text, (SMALL,) * MANY) for text in (*SELECTING, "int8")),
    Case("64 values", COPY, (64,)),
    *(Case("64 values", text, (64,)) for text in ("int8", "topk(0.01)")),
    *(
        Case(f"2^18 values, {threads} threads", text, (1 << 18,), threads=threads)
        for text in ("int8", "topk(0.01)", "bf16")
        for threads in (1, 2)
    ),
]


# In the process of one version


def serve() -> None:
    """Measure the case of each number that comes, and answer with its time; 'memory' asks for what is kept."""
    torch.set_num_threads(1)  # torch's own threads stall where cores are shared; kernels ask how many they may use
    ready: dict[int, Run] = {}
    for line in sys.stdin:
        if line.strip() == "memory":
            print(memory_kept_mb(), flush=True)
            continue
        number = int(line)
        if number not in ready:
            ready[number] = prepare(CASES[number])
        count = CASES[number].threads
        with patch.object(torch, "get_num_threads", lambda count=count: count):
            print(fastest_us(ready[number]), flush=True)


@dataclass(frozen=True)
class Run:
    prepare: Callable[[], object]
    timed: Callable[[], object]


def prepare(case: Case) -> Run:
    from fxcomp.compressors import Feedback, parse_compressor
    from fxcomp.compressors.pack import scale_copy
    from fxcomp.testing.rounds import replicas_of

    if case.compressor == COPY:
        source, target = torch.randn(case.segments), torch.empty(case.segments)
        return Run(lambda: None, lambda: scale_copy(source, 0.5, target))
    compressor = parse_compressor(case.compressor).bound_to((), 1)
    segments, size = case.segments, sum(case.segments)
    bucket = torch.randn(size, generator=torch.Generator().manual_seed(0))
    bucket[torch.rand(size, generator=torch.Generator().manual_seed(1)) >= case.share] = 0.0
    feedback = compressor.feedback is not Feedback.FORBIDDEN
    [replica] = replicas_of(compressor, segments, feedback=feedback)
    payload = torch.empty(compressor.payload_elements(segments), dtype=compressor.payload_dtype)
    out = torch.empty(size)

    def forget() -> None:
        if replica.residual is not None:
            replica.residual.zero_()  # or a sparse gradient would not stay sparse

    def run() -> None:
        compressor.encode(bucket, replica.residual, payload, segments, replica.state)
        compressor.decode(payload, 1, segments, out, None, replica.state)

    return Run(forget, run)


def fastest_us(run: Run) -> float:
    fastest, end = float("inf"), time.perf_counter() + ONE_TURN_S
    while time.perf_counter() < end:
        run.prepare()
        start = time.perf_counter()
        run.timed()
        fastest = min(fastest, time.perf_counter() - start)
    return 1e6 * fastest


def memory_kept_mb() -> float:
    """By topk of 2^22 values of which few are not zero, beyond its tensors."""
    run = prepare(next(case for case in CASES if case.share == SPARSE))
    before = _resident_mb()
    run.timed()
    return _resident_mb() - before


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# In turns


class Version:
    """A process that measures with the package in `tree`."""

    def __init__(self, tree: Path):
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, what: int | str) -> float:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(what, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def compare(before: Path, turns: int) -> tuple[list[Record], dict[str, float]]:
    old, new = Version(before), Version(ROOT)
    memory = {"before_mb": old.ask("memory"), "after_mb": new.ask("memory")}
    fastest = [[float("inf"), float("inf")] for _ in CASES]
    for turn in range(turns):
        for number in range(len(CASES)):
            pair = list(enumerate((old, new)))
            for which, version in reversed(pair) if turn % 2 else pair:
                fastest[number][which] = min(fastest[number][which], version.ask(number))
    old.close()
    new.close()
    records = [Record(case.what, case.compressor, *times) for case, times in zip(CASES, fastest, strict=True)]
    return records, memory


def report(records: list[Record], memory: dict[str, float], turns: int) -> str:
    lines = [
        "# Kernels at their edges",
        "",
        f"Made by `python benchmarks/kernel_edges.py`: encoding and decoding together, µs, the fastest of {turns} turns"
        f" of {1000 * ONE_TURN_S:.0f} ms that both versions take alternately, on one thread where none is said.",
        "",
        f"What `topk(0.01)` keeps beyond its tensors after 2^22 values with 0.1 % not zero:"
        f" {memory['before_mb']:.0f} MB before, {memory['after_mb']:.0f} MB after.",
        "",
        "| | compressor | before | after | |",
        "|---|---|--:|--:|--:|",
    ]
    for record in records:
        ratio = record.before_us / record.after_us
        numbers = f"{record.before_us:,.0f} | {record.after_us:,.0f}"
        if record.before_us < 100:
            numbers = f"{record.before_us:.1f} | {record.after_us:.1f}"
        lines.append(f"| {record.case} | `{record.compressor}` | {numbers} | {ratio:.1f} × |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the kernels of two versions at their edges.")
    parser.add_argument("--before", type=Path, help="a checkout of the other version, built in place")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a table here, as Markdown")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.before is None:
        parser.error("--before names a checkout of the version to compare with, built in place")
    records, memory = compare(arguments.before, arguments.turns)
    text = report(records, memory, arguments.turns)
    if arguments.json:
        found = {"memory_kept": memory, "records": [asdict(record) for record in records]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.report:
        arguments.report.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
