"""Compile, see new shapes and plan again, many times: what a process holds does not grow."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import table
from helpers.jobs import cross_entropy, rows
from helpers.ranks import run_ranks
from helpers.small_step import replanning
from torch import nn
from torch.fx import GraphModule

import fxcomp
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

ON_POOL = Strategy.parse("compress(int8)@cpu > all_gather@world > decompress@cpu")


@dataclass(frozen=True)
class Held:
    """Hold counts of what a process has open."""

    descriptors: int
    tasks: tuple[str, ...]
    """Names of threads, those of backends among them."""
    python_threads: int
    graphs: int
    tensors: int

    @classmethod
    def after(cls, before: Held) -> Held:
        """Return what is held once threads have ended: one that Python counts no more may exist a moment longer."""
        held = cls.now()
        for _ in range(100):
            if len(held.tasks) <= len(before.tasks):
                break
            time.sleep(0.05)
            held = cls.now()
        return held

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        _let_threads_end()
        objects = gc.get_objects()
        graphs = sum(issubclass(type(thing), GraphModule) for thing in objects)
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
        return cls(len(os.listdir("/proc/self/fd")), _tasks(), threading.active_count(), graphs, tensors)


def _tasks() -> tuple[str, ...]:
    names: list[str] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended since
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return tuple(sorted(names))


def _let_threads_end() -> None:
    """Give the pool of a step that has just gone the time to end its thread."""
    for _ in range(100):
        if all(thread.name == "fxcomp-presence" for thread in threading.enumerate()[1:]):
            break
        time.sleep(0.05)


def resident_mb() -> float:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def one_compile(number: int, shapes: int = 1) -> None:
    """Compile, train on batches of some lengths, and let go; every other plan needs the pool's process groups, too."""
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bucket = Bucket(("bias", "weight"), (10, 200), ON_POOL if number % 2 else Strategy.parse("all_reduce@world"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    step = fxcomp.compile_step(
        model, cross_entropy, optimizer, rows(generator, 6), costs=table(2.0), compress=Plan((bucket,))
    )
    for length in range(shapes):
        step(rows(generator, 4 + length))
    if number % 3 == 0:
        step.close()  # the others are closed by going away


def plan_anew(times: int) -> None:
    """One step that is planned again and again."""
    plan = replanning()
    for _ in range(times):
        plan()


def soak(compiles: int, shapes: int, replans: int) -> list[tuple[Held, Held, float]]:
    """Return what is held when everything has happened a few times, and at the end; and how much memory has grown."""

    def phase(work: Callable[[int], None], first: int, times: int) -> tuple[Held, Held, float]:
        for number in range(first):
            work(number)
        before, resident = Held.now(), resident_mb()
        for number in range(first, first + times):
            work(number)
        return before, Held.after(before), resident_mb() - resident

    return [
        phase(one_compile, 4, compiles),
        phase(lambda _: one_compile(1, shapes), 1, 2),
        phase(lambda _: plan_anew(replans), 1, 2),
    ]


def check(phases: list[tuple[Held, Held, float]], most_mb: float) -> None:
    for before, after, grown_mb in phases:
        assert after.descriptors <= before.descriptors, (before, after)
        assert len(after.tasks) <= len(before.tasks), (before, after)
        assert after.python_threads <= before.python_threads, (before, after)
        assert after.graphs <= before.graphs, (before, after)
        assert after.tensors <= before.tensors + 20, (before, after)
        assert grown_mb < most_mb, (grown_mb, before, after)


@pytest.mark.slow
def test_what_a_process_holds_does_not_grow_over_many_plans():
    for phases in run_ranks(2, soak, 50, 30, 20, timeout_s=1200):
        check(phases, 40.0)
