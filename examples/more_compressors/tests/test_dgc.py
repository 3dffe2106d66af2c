"""The sampled threshold."""

import pytest
import torch
from fxcomp_more import DGC
from fxcomp_more.dgc import strides
from torch import Tensor

from fxcomp.compressors import EncoderInput, randomness
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


def test_there_is_a_second_look_where_fewer_than_half_reach_the_threshold() -> None:
    """k = 700 and 78 values of the sample decide: the first threshold is 10, that of a second look 5."""
    n, compressor = 70_000, DGC(0.01)
    (stride,) = strides((n,), 0.01)
    state = compressor.fresh_state(n, 1, 0)
    start = int(randomness.bits(randomness.stream_of(state, 0), 0, 1)) % stride
    for large, sent in ((350, 350), (349, 349 + 78)):
        bucket = torch.randn(n, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
        bucket[start::stride][:78] = 10.0
        bucket[start::stride][78:156] = 5.0
        bucket[(start + 1) % stride :: stride][: large - 78] = 10.0
        payload = compressor.compress_reference(EncoderInput(bucket, None, (n,), state)).payload
        assert int(payload[:4].view(torch.int32)) == sent
