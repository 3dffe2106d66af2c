"""Kernels of momentum correction give the bits of the ops; compressors that send values send them as they are."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fxcomp.compressors import Compressor, kernels
from fxcomp.compressors.examples import examples
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import NullTransport
from fxcomp.testing import average, replicas_of


@pytest.mark.parametrize("elements", [0, 1, 31, 1000, 300_001])
def test_kernels_give_the_bits_of_the_ops(elements: int):
    random = torch.Generator().manual_seed(elements)
    bucket, velocity, residual = (torch.randn(elements, generator=random) for _ in range(3))
    residual[torch.rand(elements, generator=random) < 0.05] = 0
    residual[elements // 2 :: 7] = -0.0
    for place, value in ((0, math.nan), (elements // 2, math.inf), (elements - 1, -math.inf)):
        if elements:
            bucket[place] = value
            residual[place] = 0
    velocity[elements // 3 : elements // 2] *= 1e-42
    new = torch.ops.fxcomp.accumulate(bucket, velocity, 0.9)
    kept = torch.ops.fxcomp.keep(velocity, new)
    masked = torch.ops.fxcomp.mask_velocity(new, velocity, residual)
    runtime = Runtime(NullTransport(), torch.device("cpu"))
    for have_kernels in (kernels.available(), False):
        with patch.object(kernels, "can_run_on", lambda _, have=have_kernels: have):
            own_bucket, own_velocity = bucket.clone(), velocity.clone()
            assert runtime.accumulate(own_bucket, own_velocity, 0.9) is own_bucket
            assert_same_bits(own_bucket, new)
            assert_same_bits(own_velocity, kept)
            runtime.mask_velocity(own_velocity, own_bucket, residual)
            assert_same_bits(own_velocity, masked)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    finite = one.isfinite()
    assert torch.equal(finite, other.isfinite())
    assert torch.equal(one[finite].view(torch.int32), other[finite].view(torch.int32))


def test_the_ops_are_what_torch_takes_for_ops():
    value = torch.randn(7)
    for op, arguments in (
        (torch.ops.fxcomp.accumulate.default, (value, value.clone(), 0.5)),
        (torch.ops.fxcomp.mask_velocity.default, (value, value.clone(), value.clone())),
    ):
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("compressor", [c for c in examples() if c.sends_values], ids=str)
def test_what_sends_values_sends_them_as_they_are(compressor: Compressor):
    segments = (3000, 1, 0, 700)
    bound = compressor.bound_to(((3000,), (1,), (0,), (700,)), 1)
    [replica] = replicas_of(bound, segments, feedback=True)
    value = torch.randn(sum(segments), generator=torch.Generator().manual_seed(0))
    decoded = average(bound, [value], [replica], segments)
    assert replica.residual is not None
    sent = replica.residual == 0
    assert 0 < sent.sum() < len(value) / 5
    assert torch.equal(torch.where(sent, value, 0.0), decoded)
    assert torch.equal(torch.where(sent, 0.0, value), replica.residual)


def test_which_compressors_send_values():
    names = {c.name for c in examples() if c.sends_values}
    assert names == {"topk", "sidco"}
