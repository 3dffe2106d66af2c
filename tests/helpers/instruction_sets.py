"""Run kernels at each of the levels that they are compiled for (csrc/levels.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from torch import Tensor

from fxcomp.compressors import Compressor, Feedback
from fxcomp.testing import SAMPLES
from fxcomp.testing.kernel_checks import second_step
from fxcomp.testing.samples import SMALL_SEGMENTS

LEVELS = {"baseline": 0, "AVX2": 1, "AVX-512": 2}


@contextmanager
def at_level(library: ctypes.CDLL, name: str) -> Generator[None]:
    """Skips the test where the processor has no such level."""
    level, widest = LEVELS[name], max(LEVELS.values())
    try:
        if library.fxcomp_set_level(level) != level:
            pytest.skip(f"this processor has no {name}")
        yield
    finally:
        library.fxcomp_set_level(widest)


def steps(compressor: Compressor) -> dict[str, list[Tensor]]:
    """Compress every sample in one step, without a residual and, where there may be one, with it."""
    bound = compressor.bound_to((), 1)
    return {
        f"{name}, {segments}, feedback {feedback}": second_step(
            bound, sample(sum(segments)), segments, feedback=feedback
        )
        for segments in SMALL_SEGMENTS
        for name, sample in SAMPLES.items()
        for feedback in {False, compressor.feedback is not Feedback.FORBIDDEN}
    }
