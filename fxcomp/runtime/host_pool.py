"""Run work on the host's own thread, in the order in which it is handed over.

One thread for all, so collectives that it launches leave in the same order on every rank. It flushes denormals as the
thread that hands work over: `torch.set_flush_denormal` holds for one thread alone, and without it a bucket compressed
here would have other bits than one compressed there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OnHost:
    """A value that the pool is computing."""

    future: Future[Tensor]


def value_of(value: Any) -> Any:
    """Wait for a value if the pool is computing it."""
    return value.future.result() if isinstance(value, OnHost) else value


class HostPool:
    """A pool of one thread, which starts with the first work."""

    def __init__(self) -> None:
        self.watch: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None
        """Puts a clock around work, in a step that is timed."""
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None
        self._failures: list[BaseException] = []
        """Errors raised on the thread: nobody may read the result."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Hand work over."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="fxcomp-pool")
        work = _as_caller_computes(work if self.watch is None else self.watch(work))
        failures = self._failures

        def run() -> T:
            try:
                return work()
            except BaseException as error:
                failures.append(error)
                raise

        future = self._last = self._executor.submit(run)
        return future

    def after(self, run: Callable[..., Tensor], *values: Any) -> Tensor | OnHost:
        """Run with these arguments: now, or on the pool if it is computing one of them."""
        if any(isinstance(value, OnHost) for value in values):
            return OnHost(self.submit(lambda: run(*map(value_of, values))))
        return run(*values)

    def wait(self) -> None:
        """Wait until everything that was handed over is done."""
        if self._last is not None:
            wait([self._last])  # one thread: earlier work is done, too
            self._last = None

    def finish(self) -> None:
        """Wait, and raise what was raised on the thread, whoever reads its results."""
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
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self._last, self._failures = None, []

    def close(self) -> None:
        """End the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None


def flushes_denormals() -> bool:
    """Tell whether this thread flushes denormals to zero. Torch cannot be asked; Python's floats obey as well."""
    return sys.float_info.min / 2 == 0.0


def _as_caller_computes(work: Callable[[], T]) -> Callable[[], T]:
    """Make work flush denormals as the calling thread does, on whatever thread it runs."""
    flushes = flushes_denormals()

    def run() -> T:
        if flushes_denormals() != flushes:
            torch.set_flush_denormal(flushes)
        return work()

    return run
