"""Denormals are flushed in the threads of a kernel, and in the pool's, as they are in the thread that calls."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from helpers.compressor_cases import COMPRESSORS, WITH_KERNELS
from torch import Tensor

from fxcomp.compressors import Compressor, Feedback
from fxcomp.runtime.host_pool import flushes_denormals
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import NullTransport
from fxcomp.testing.kernel_checks import assert_same_bits
from fxcomp.testing.rounds import agree, decode, encode, replicas_of
from fxcomp.testing.samples import gaussian

SEGMENTS = (400_001, 70, 60_000)  # two parts also where work comes in stages

# About half of v is denormal.
BUCKET, RESIDUAL = 1e-38 * gaussian(sum(SEGMENTS)), 1e-38 * gaussian(sum(SEGMENTS), 7)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def _step(compressor: Compressor, *, flush: bool, threads: int) -> list[Tensor]:
    """All that comes of compressing the bucket: payload, mean, and what is kept."""
    bound = compressor.bound_to((), 1)
    [replica] = replicas_of(bound, SEGMENTS, feedback=False)
    if bound.feedback is not Feedback.FORBIDDEN:
        replica.residual = RESIDUAL.clone()
    torch.set_flush_denormal(flush)
    with patch.object(torch, "get_num_threads", return_value=threads):  # the kernels' threads alone, not torch's own
        agreed = agree(bound, [BUCKET], [replica], SEGMENTS)
        payload = encode(bound, BUCKET, replica, SEGMENTS, agreed)
        copies = 1 if bound.is_linear else 2
        mean = decode(bound, payload.repeat(copies), copies, SEGMENTS, agreed, replica.state)
    torch.set_flush_denormal(False)
    return [payload, mean, *(t for t in (agreed, replica.residual, replica.state) if t is not None)]


@pytest.mark.one_in(4)
@WITH_KERNELS
@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor flushes nothing")
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_threads_change_no_bit_whether_denormals_are_flushed_or_not(compressor: Compressor) -> None:
    for flush in (False, True):  # the threads start in the first
        alone = _step(compressor, flush=flush, threads=1)
        for threads in (2, 3):
            for one, other in zip(alone, _step(compressor, flush=flush, threads=threads), strict=True):
                assert_same_bits(other, one, f"{threads} threads, flushed {flush}")


def test_the_pool_of_a_runtime_flushes_denormals_as_its_caller_does() -> None:
    runtime = Runtime(NullTransport(), torch.device("cpu"))
    for flush in (False, True, False):
        torch.set_flush_denormal(flush)
        assert runtime.pool.submit(flushes_denormals).result() == flush
    runtime.close()
