"""Train over links whose rate changes, with batches of changing sizes; compare the end of a long job with its start.

    python benchmarks/soak.py --steps 10000 --period 500 --json soak.json --log soak.jsonl
    fxcomp plot soak.jsonl --metrics loss,took_ms,sent_mb -o soak.html

Four hosts of one rank each train a GPT with `Checks(replan="auto")` and other options at their defaults. The rate of
their links changes every period, in a repeating order; batch sizes repeat every few steps. At the end of each period,
every rank counts its memory, descriptors and threads, and all ranks compare their parameters.

The exit status is 1 if one of these does not hold:

    median step time    the last and the first period with the same rate and sizes differ by at most 5 %; the job's
                        first period, which compiles and chooses a plan, does not count
    memory              grows by at most 2 % on every rank, from the end of the second period (from step 1,000 on):
                        resident, own, and allocated (without the freed memory that glibc keeps)
    descriptors         as many as then
    threads             as many as then
    replicas            equal to the bit on all ranks, at the end of every period
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from records import Records, options, table
from shaped import Teller, ends_well, is_rank, join, run, set_rate, slowest

import fxcomp
from fxcomp.commands.demo.gpt import GPT, GPTConfig, draw_batch, loss_fn, training_text

RATES = ("100mbit", "300mbit", "1gbit", "300mbit")
SIZES = ((4, 32), (2, 32), (4, 24), (3, 16))
"""Sequences and their length, in the order of steps."""
MODEL = GPTConfig(layers=2, heads=4, width=128, context=32)

SETTLED_STEPS = 1000
"""Steps after which memory, descriptors and threads are counted first."""
MOST_SLOWER, MOST_GROWN = 0.05, 0.02


@dataclass(frozen=True)
class Held:
    """Resources of a process. `own_mb` counts a page shared by n processes as 1/n."""

    resident_mb: float
    own_mb: float
    allocated_mb: float
    """Memory that malloc gave out, without freed memory."""
    descriptors: int
    threads: int
    tensors: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        memory = Path("/proc/self/smaps_rollup").read_text().splitlines()
        kb = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in memory[1:])}
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        descriptors, threads = (len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task"))
        return cls(kb["Rss"] / 1e3, kb["Pss"] / 1e3, allocated_bytes() / 1e6, descriptors, threads, tensors)


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later (malloc.h): all sizes in bytes."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def allocated_bytes() -> int:
    """Return the bytes that malloc gave out and did not get back, from its heaps and by mmap."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = MallInfo
    found = read()
    return found.uordblks + found.hblkhd


@dataclass(frozen=True)
class Period:
    """Steps under one rate, and the state of all ranks after them."""

    ends: int
    rate: str
    ms: Mapping[str, float]
    """Median step time of the slowest rank, by batch size."""
    held: Sequence[Held]
    equal: bool
    """True if all ranks have the same parameters."""
    plan: str
    notes: Sequence[str]
    """Notes of the step since the last period."""


def name_of(step: int) -> str:
    return "x".join(map(str, SIZES[step % len(SIZES)]))


# Ranks


def train(steps: int, length: int, log: Path | None) -> None:
    join()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tell, rank, model, text = Teller(), dist.get_rank(), GPT(MODEL), training_text().train

    def batch_at(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        size, context = SIZES[index % len(SIZES)]
        return draw_batch(text, step=index, rank=rank, size=size, context=context)

    set_rate(RATES[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = fxcomp.compile_step(model, loss_fn, optimizer, batch_at(0), checks=fxcomp.Checks(replan="auto"))
    lines = None if log is None or rank else log.open("w", buffering=1)
    begun, notes = time.perf_counter(), 0
    for number, first in enumerate(range(0, steps, length)):
        set_rate(rate := RATES[number % len(RATES)])
        took: list[float] = []
        for index in range(first, min(first + length, steps)):
            batch, start = batch_at(index), time.perf_counter()
            loss = step(batch)
            took.append(1e3 * (time.perf_counter() - start))
            if lines is not None:
                line = {"loss": float(loss), "seconds": time.perf_counter() - begun, **step.metrics()}
                lines.write(json.dumps({**line, "took_ms": took[-1], "rate": rate}) + "\n")
        ms, (held, equal) = medians(first, slowest(took)), everywhere(model)
        period = Period(step.steps, rate, ms, held, equal, step.plan.digest, step.notes[notes:])
        notes = len(step.notes)
        tell.send(asdict(period))
    step.close()
    dist.destroy_process_group()


def medians(first: int, took: Sequence[float]) -> dict[str, float]:
    of_size: dict[str, list[float]] = {}
    for index, ms in enumerate(took, first):
        of_size.setdefault(name_of(index), []).append(ms)
    return {name: statistics.median(each) for name, each in of_size.items()}


def everywhere(model: torch.nn.Module) -> tuple[list[Held], bool]:
    """Return the resources of every rank, and whether all have the same parameters."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (Held.now(), digest.hexdigest()))
    return [held for held, _ in found], len({name for _, name in found}) == 1


# Verdict


def verdict(periods: Sequence[Period]) -> Iterator[tuple[str, bool, str]]:
    """Yield each requirement, whether it holds, and the numbers."""
    compared = list(ratios(periods))
    slower = [each for each in compared if abs(each[-1] - 1) > MOST_SLOWER]
    furthest = max((abs(ratio - 1) for *_, ratio in compared), default=0.0)
    said = f"{len(slower)} of {len(compared)} differ by more than {MOST_SLOWER:.0%}, at most {furthest:.1%}"
    yield "median step times", not slower and bool(compared), said
    first, last = since(periods), periods[-1]
    for name in ("resident_mb", "own_mb", "allocated_mb", "descriptors", "threads", "tensors"):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(first.held, last.held, strict=True)]
        most = {"descriptors": 0.0, "threads": 0.0}.get(name, MOST_GROWN)
        grown = max(b / a - 1 for a, b in pairs)
        said = f"{', '.join(f'{a:g} to {b:g}' for a, b in pairs)}: {grown:+.2%}"
        yield name, grown <= most, said
    unequal = [period.ends for period in periods if not period.equal]
    yield "replicas", not unequal, f"unequal after steps {unequal}" if unequal else "equal to the bit"


def since(periods: Sequence[Period]) -> Period:
    """Return the period after which resources are counted first."""
    return next((each for each in periods[1:-1] if each.ends >= SETTLED_STEPS), periods[min(1, len(periods) - 1)])


def ratios(periods: Sequence[Period]) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield rate, batch size, the medians of the first and the last period with them, and their ratio."""
    for rate in dict.fromkeys(period.rate for period in periods[1:]):
        alike = [period for period in periods[1:] if period.rate == rate]
        if len(alike) > 1:
            for size, before in alike[0].ms.items():
                now = alike[-1].ms[size]
                yield rate, size, before, now, now / before


def page(periods: Sequence[Period]) -> str:
    rows = [(rate, size, f"{a:.2f}", f"{b:.2f}", f"{ratio:.3f}") for rate, size, a, b, ratio in ratios(periods)]
    checks = [(name, "holds" if ok else "**missed**", said) for name, ok, said in verdict(periods)]
    first = table("rate | batch | first, ms > | last, ms > | ratio >", rows)
    return f"{first}\n\n{table('after step ' + str(since(periods).ends) + ' and at the end | | ', checks)}\n"


def period_of(record: Mapping[str, Any]) -> Period:
    return Period(**{**record, "held": [Held(**each) for each in record["held"]]})


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--period", type=int, default=500, help="steps until the rate changes")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write a line of JSON per step, for `fxcomp plot`")
    arguments = parser.parse_args()
    if is_rank():
        train(arguments.steps, arguments.period, arguments.log)
        return 0
    return soak(arguments)


def soak(arguments: argparse.Namespace) -> int:
    kept, periods = Records(arguments.json, hosts=4, steps=arguments.steps, period=arguments.period), list[Period]()

    def hear(record: Mapping[str, Any]) -> None:
        kept.add(record)
        periods.append(period_of(record))
        held = periods[-1].held[0]
        times = " ".join(f"{name} {ms:.1f}" for name, ms in periods[-1].ms.items())
        print(
            f"step {record['ends']}, {record['rate']}: {times} ms; rank 0 has {held.resident_mb:.1f} MB,"
            f" {held.descriptors} descriptors, {held.threads} threads, {held.tensors} tensors",
            flush=True,
        )

    run([__file__, *sys.argv[1:]], hear, hosts=4)
    found = [{"check": name, "ok": ok, "detail": said} for name, ok, said in verdict(periods)]
    kept.add(*found)
    print(f"\n{page(periods)}")
    return 0 if all(each["ok"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(ends_well(main))
