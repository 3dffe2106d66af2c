"""The sampled threshold."""

import pytest
import torch
from helpers.compressor_cases import WITH_KERNELS
from torch import Tensor

from fxcomp.compressors import DGC, EncoderInput
from fxcomp.compressors.dgc import strides
from fxcomp.compressors.topk import counts

N = 300_000


def _gaussian(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def _encode(compressor: DGC, bucket: Tensor, residual: Tensor | None, state: Tensor) -> tuple[int, Tensor]:
    payload = torch.empty(compressor.payload_elements((N,)), dtype=torch.uint8)
    compressor.encode(bucket, residual, payload, (N,), state)
    return int(payload[:4].view(torch.int32)), payload


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_about_k_values_are_sent(ratio: float) -> None:
    compressor, (k,) = DGC(ratio), counts((N,), ratio)
    state = compressor.fresh_state(N, 1, 0)
    sent = [_encode(compressor, _gaussian(seed), None, state)[0] / k for seed in range(8)]
    assert 0.9 < sum(sent) / len(sent) < 1.1
    assert min(sent) > 0.6


def test_strides_are_odd_and_small_segments_are_their_own_sample() -> None:
    assert strides((0, 1000, 10_000), 0.01) == (1, 1, 1)
    assert all(stride % 2 == 1 for stride in strides(tuple(range(1, 10_000_000, 99_999)), 0.1))
    assert strides((1 << 24,), 0.01) == (99,)


@WITH_KERNELS
def test_a_second_look_gives_the_bits_of_the_reference() -> None:
    """Most of the sample is large, and little else is: too few reach the threshold."""
    compressor = DGC(0.01)
    (stride,) = strides((N,), 0.01)
    state = compressor.fresh_state(N, 1, 0)
    bucket, residual = _gaussian(0), _gaussian(1) * 0.01
    for start in range(stride):  # whichever start the stream draws, one of them makes its sample large
        large = bucket.clone()
        large[start::stride][: N // stride // 90] *= 1000
        large[N // 2] = torch.nan
        kernel_residual, kernel_state = residual.clone(), state.clone()
        expected = compressor.compress_reference(EncoderInput(large, residual, (N,), state))
        _, payload = _encode(compressor, large, kernel_residual, kernel_state)
        assert torch.equal(payload, expected.payload)
        assert torch.equal(kernel_residual, expected.residual)
        assert torch.equal(kernel_state, expected.state)
