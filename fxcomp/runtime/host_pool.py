"""Run work on the host's own threads, in the order in which it is handed over, and copy values there and back.

    sending    d2h 0, compress 0, launch 0 | d2h 1, compress 1, launch 1 | ...
    arriving              wait 0, decompress 0           | wait 1, decompress 1 | ...

A collective is waited for by the thread that needs its result: the second one where it is decompressed, the first one
where ranks agree on something before they compress.

Two threads, because a wait for a collective would hold up the buckets that are to be sent after it. All collectives are
launched by one of them, so they leave in the same order on every rank. Work waits only for work that was handed over
before it, so the two never wait for each other in a circle.

Threads flush denormals as the thread that hands work over: `torch.set_flush_denormal` holds for one thread alone, and
without it a bucket compressed here would have other bits than one compressed there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fxcomp import compat

NewBuffer = Callable[[], Tensor]


class HostCopies:
    """Copies in both directions, each on a stream of its own, so that neither waits for the other, nor compute."""

    def __init__(self, device: torch.device):
        self._streams = streams = compat.streams_of(device)
        self._device = device
        self._going: Any = None if streams is None else streams.Stream(device)
        self._coming: Any = None if streams is None else streams.Stream(device)

    @property
    def pins(self) -> bool:
        """Tell copies from and to pinned memory, which the host does not wait for."""
        return self._streams is not None

    def to_host(self, value: Tensor, buffer: NewBuffer) -> Callable[[], Tensor]:
        """Start a copy after what compute has been given so far; the result waits for it, on any thread.

        `buffer` makes pinned host memory of the value's size, if it is needed.
        """
        if self._streams is None:
            return lambda: value
        target = buffer()
        self._going.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._going):
            target.copy_(value, non_blocking=True)
            value.record_stream(self._going)
            copied = compat.recorded(self._device)

        def arrived() -> Tensor:
            copied.synchronize()
            return target

        return arrived

    def to_device(self, value: Tensor, buffer: NewBuffer) -> Tensor:
        """Start a copy back; compute that is given from now on waits for it. `buffer` makes device memory."""
        if self._streams is None:
            return value
        compute = self._streams.current_stream(self._device)
        with self._streams.stream(self._coming):
            target = buffer()
            # The last step has read it: what comes back was given to the host since, after all of that step.
            target.copy_(value, non_blocking=True)
        target.record_stream(compute)
        compute.wait_stream(self._coming)
        return target


T = TypeVar("T")


OnHost = Future[Tensor]
"""A value that the pool is computing, or that arrives there."""


class Arriving(OnHost):
    """The result of a collective. The first thread that needs it waits for it; another one waits for that thread."""

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        super().__init__()
        self._wait = wait
        self._lock = Lock()

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait, and return what arrived."""
        with self._lock:
            if not self.done():
                self.set_result(self._wait())
        return super().result(timeout)


class PoolThread(Enum):
    """The pool's two threads."""

    SENDING = "sending"
    """Compresses, and launches all collectives."""
    ARRIVING = "arriving"
    """Decompresses what arrives."""


def value_of(value: Any) -> Any:
    """Wait for a value if the pool is computing it."""
    return cast("OnHost", value).result() if isinstance(value, Future) else value


class HostPool:
    """A pool of two threads, each of which starts with its first work."""

    def __init__(self) -> None:
        self.watch: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        """Puts a clock around work, in a step that is timed."""
        self._executors: dict[PoolThread, ThreadPoolExecutor] = {}
        self._last: dict[PoolThread, Future[Any]] = {}
        self._failures: list[BaseException] = []
        """Errors raised on a thread: nobody may read the result."""

    def submit(self, work: Callable[..., T], *given: Any, on: PoolThread = PoolThread.SENDING) -> Future[T]:
        """Hand work over, with arguments that the pool may still be computing."""
        executor = self._executors.get(on)
        if executor is None:
            executor = self._executors[on] = ThreadPoolExecutor(1, thread_name_prefix=f"fxcomp-pool-{on.value}")
        work = _as_caller_computes(work if self.watch is None else self.watch(work))
        failures = self._failures

        def run() -> T:
            try:
                return work(*map(value_of, given))
            except BaseException as error:
                failures.append(error)
                raise

        future = self._last[on] = executor.submit(run)
        return future

    def after(self, run: Callable[..., Tensor], *values: Any, on: PoolThread = PoolThread.SENDING) -> Tensor | OnHost:
        """Run with these arguments: now, or on the pool if it is computing one of them."""
        if any(isinstance(value, Future) for value in values):
            return self.submit(run, *values, on=on)
        return run(*values)

    def arriving(self, take: Callable[[], Tensor]) -> OnHost:
        """Stand in for what a collective brings until a thread needs it."""
        return Arriving(take if self.watch is None else self.watch(take))

    def wait(self) -> None:
        """Wait until everything that was handed over is done."""
        wait(self._last.values())  # a thread's earlier work is done, too
        self._last.clear()

    def finish(self) -> None:
        """Wait, and raise what was raised on a thread, whoever reads its results."""
        self.wait()
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    def settle(self) -> None:
        """Wait, and forget what was raised."""
        self.wait()
        self._failures = []

    def drop(self) -> None:
        """Leave the work alone: it is not waited for, and what has not begun never does."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        self._executors, self._last, self._failures = {}, {}, []

    def close(self) -> None:
        """End the threads."""
        for executor in self._executors.values():
            executor.shutdown(wait=True)
        self._executors = {}


def flushes_denormals() -> bool:
    """Return whether this thread flushes denormals to zero. Torch cannot be asked; Python's floats obey as well."""
    return sys.float_info.min / 2 == 0.0


def _as_caller_computes(work: Callable[..., T]) -> Callable[..., T]:
    """Make work flush denormals as the calling thread does, on whatever thread it runs."""
    flushes = flushes_denormals()

    def run(*given: Any) -> T:
        if flushes_denormals() != flushes:
            torch.set_flush_denormal(flushes)
        return work(*given)

    return run
