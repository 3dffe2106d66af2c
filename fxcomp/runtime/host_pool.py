"""Run work on two host threads, in submission order, and copy values between host and device.

    sending    d2h 0, compress 0, launch 0 | d2h 1, compress 1, launch 1 | ...
    arriving              wait 0, decompress 0           | wait 1, decompress 1 | ...

The thread that needs a collective's result waits for it: arriving to decompress, or sending if ranks reduce scales or
a basis before they compress. Waits of the second thread do not delay later buckets. One thread launches all
collectives, in the same order on every rank. Work waits only for earlier work, so there is no deadlock.

Both threads copy the submitting thread's denormal mode, which affects the bits of a compressed bucket.
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
    """Copies in both directions, on streams that block neither each other nor compute."""

    def __init__(self, device: torch.device):
        self._streams = streams = compat.streams_of(device)
        self._device = device
        self._going: Any = None if streams is None else streams.Stream(device)
        self._coming: Any = None if streams is None else streams.Stream(device)

    @property
    def pins(self) -> bool:
        """True if copies use pinned memory and do not block the host."""
        return self._streams is not None

    def to_host(self, value: Tensor, buffer: NewBuffer) -> Callable[[], Tensor]:
        """Start a copy after the compute queued so far, and return a function that waits for it on any thread.

        `buffer` allocates pinned memory.
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
        """Start a copy that later compute waits for. `buffer` allocates device memory."""
        if self._streams is None:
            return value
        compute = self._streams.current_stream(self._device)
        with self._streams.stream(self._coming):
            target = buffer()
            # The buffer is free: the last step read it before this value was copied to the host.
            target.copy_(value, non_blocking=True)
        target.record_stream(compute)
        compute.wait_stream(self._coming)
        return target


T = TypeVar("T")


OnHost = Future[Tensor]
"""A value that the pool is computing or receiving."""


class Arriving(OnHost):
    """Result of a collective. The first caller of `result` waits for it, other callers wait for the first."""

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        super().__init__()
        self._wait = wait
        self._lock = Lock()

    def result(self, timeout: float | None = None) -> Tensor:
        with self._lock:
            if not self.done():
                self.set_result(self._wait())
        return super().result(timeout)


class PoolThread(Enum):
    SENDING = "sending"
    """Compresses, and launches all collectives."""
    ARRIVING = "arriving"
    """Decompresses received payloads."""


def value_of(value: Any) -> Any:
    """Return a value, waiting for the pool if needed."""
    return cast("OnHost", value).result() if isinstance(value, Future) else value


class HostPool:
    """A pool of two threads, each created on first use."""

    def __init__(self) -> None:
        self.watch: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        """Wraps work with a clock; set during a timed step."""
        self._executors: dict[PoolThread, ThreadPoolExecutor] = {}
        self._last: dict[PoolThread, Future[Any]] = {}
        self._failures: list[BaseException] = []

    def submit(self, work: Callable[..., T], *given: Any, on: PoolThread = PoolThread.SENDING) -> Future[T]:
        """Submit work, with arguments that the pool may still be computing."""
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
        """Run on the pool if an argument is a future, else now."""
        if any(isinstance(value, Future) for value in values):
            return self.submit(run, *values, on=on)
        return run(*values)

    def arriving(self, take: Callable[[], Tensor]) -> OnHost:
        return Arriving(take if self.watch is None else self.watch(take))

    def wait(self) -> None:
        wait(self._last.values())  # the last future of each thread
        self._last.clear()

    def finish(self) -> None:
        self.wait()
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    def settle(self) -> None:
        self.wait()
        self._failures = []

    def drop(self) -> None:
        """Cancel pending work, and abandon running work."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        self._executors, self._last, self._failures = {}, {}, []

    def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown(wait=True)
        self._executors = {}


def flushes_denormals() -> bool:
    """Return whether this thread flushes denormals. torch has no getter, but Python floats use the same mode."""
    return sys.float_info.min / 2 == 0.0


def _as_caller_computes(work: Callable[..., T]) -> Callable[..., T]:
    flushes = flushes_denormals()

    def run(*given: Any) -> T:
        if flushes_denormals() != flushes:
            torch.set_flush_denormal(flushes)
        return work(*given)

    return run
