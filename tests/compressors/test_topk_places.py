"""Which values topk sends."""

import pytest
import torch
from helpers.compressor_cases import WITH_KERNELS, decode, encode

from fxcomp.compressors import TopK
from fxcomp.compressors.places import bytes_of, form_of, read
from fxcomp.errors import BadTensor
from fxcomp.testing.kernel_checks import assert_same_bits, plain_torch
from fxcomp.testing.samples import SAMPLES, gaussian


def _sent(values: list[float], k: int) -> list[tuple[int, float]]:
    n = len(values)
    payload = encode(TopK(k / n), torch.tensor(values), None, (n,))
    sent, places = payload[: 4 * k].view(torch.float32), read(payload[4 * k :][: bytes_of(n, k)], n, k)
    return list(zip(places.tolist(), sent.tolist(), strict=True))


def test_the_largest_magnitudes_go_in_order_of_their_places() -> None:
    assert _sent([1.0, -5.0, 2.0, 4.0], 2) == [(1, -5.0), (3, 4.0)]


def test_of_equal_magnitudes_the_lower_place_goes() -> None:
    assert _sent([1.0, 3.0, -3.0, 3.0, -7.0], 3) == [(1, 3.0), (2, -3.0), (4, -7.0)]


def test_zeros_go_where_nothing_else_is_left() -> None:
    assert _sent([0.0, 0.0, 0.0, 6.0], 2) == [(0, 0.0), (3, 6.0)]


def test_nan_is_larger_than_infinity() -> None:
    (place, value), *_ = _sent([1.0, torch.inf, torch.nan], 1)
    assert place == 2
    assert value != value


def test_a_place_above_65535_arrives() -> None:
    values = torch.zeros(70_000)
    values[69_999] = 1.0
    payload = encode(TopK(1e-5), values, None, (70_000,))
    assert read(payload[4:][: bytes_of(70_000, 1)], 70_000, 1).tolist() == [69_999]


@WITH_KERNELS
@pytest.mark.parametrize("form", [8, 16])
def test_kernels_write_as_many_bits_where_the_last_block_is_full(form: int) -> None:
    """k places in m blocks take k + m - 1 bits: where that is a whole number of bytes, one bit more shows."""
    whole = 0
    for blocks in (1, 2, 3, 4):
        for k in range(1, 17):
            n = blocks << form
            compressor = TopK(max(1e-6, (k - 0.5) / n))
            assert compressor.payload_elements((n, n)) == 2 * (4 * k + -(-bytes_of(n, k) // 4) * 4)
            whole += form_of(n, k) == form and (k + blocks - 1) % 8 == 0
            bucket = torch.cat([gaussian(n, k), gaussian(n, k + 100)])
            payload = encode(compressor, bucket, None, (n, n))
            with plain_torch():
                expected = encode(compressor, bucket, None, (n, n))
                decoded = decode(compressor, payload, 1, (n, n))
            assert_same_bits(payload, expected, f"{k} of {n}")
            assert_same_bits(decode(compressor, payload, 1, (n, n)), decoded, f"{k} of {n}")
    assert whole >= 4, "no case is at the edge"


@WITH_KERNELS
def test_places_that_go_down_are_refused() -> None:
    """Both lie in the first 65536, and the first in a later tile than the second."""
    n = 200_000
    bucket = torch.zeros(n)
    bucket[100], bucket[40_000] = 1.0, 2.0
    payload = encode(TopK(1e-5), bucket, None, (n,))
    assert form_of(n, 2) == 16
    lows = payload[8:12].view(torch.int16)
    assert lows.tolist() == [100, 40_000 - 65_536]
    lows.copy_(lows.flip(0))
    out = torch.empty(n)
    with pytest.raises(BadTensor, match="outside its segment"):
        decode(TopK(1e-5), payload, 1, (n,))
    with plain_torch():
        TopK(1e-5).decode(payload, 1, (n,), out)
    assert out.nonzero().flatten().tolist() == [100, 40_000], "the reference does not look at the order"


@WITH_KERNELS
@pytest.mark.parametrize("ratio", [1e-5, 0.01, 0.06, 0.3])
@pytest.mark.parametrize("kind", ["laplace", "ties", "large where a sample looks", "many nan"])
@pytest.mark.one_in(4)
def test_a_segment_cut_among_threads_sends_what_one_thread_sends(ratio: float, kind: str) -> None:
    segments = (300, 400_000, 3, 150_000)
    bucket, old = SAMPLES[kind](sum(segments)), 0.1 * gaussian(sum(segments), 7)
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 3, 7):
            torch.set_num_threads(count)
            residual = old.clone()
            payload = encode(TopK(ratio), bucket, residual, segments)
            seen.append((payload, residual, decode(TopK(ratio), payload.repeat(2), 2, segments)))
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            assert_same_bits(one, two)
