"""Let another thread compute as this one: `torch.set_flush_denormal` holds for the calling thread alone.

Without it a bucket that is compressed on the pool would have other bits than one that is compressed here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def flushes_denormals() -> bool:
    """Whether this thread takes denormal results for zeros. Torch cannot be asked, but Python's floats obey as well."""
    smallest = sys.float_info.min
    return smallest / 2 == 0.0


def as_caller_computes(work: Callable[[], T]) -> Callable[[], T]:
    """The same work, on whatever thread, with the flushing of denormals of the thread that calls this."""
    flushes = flushes_denormals()

    def run() -> T:
        if flushes_denormals() != flushes:
            torch.set_flush_denormal(flushes)
        return work()

    return run
