"""Send the place and sign of each chunk's largest value, and nothing for a chunk of zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from helpers.compressor_cases import WITH_KERNELS, decode, encode
from torch import Tensor

from fxcomp.compressors import CMax
from fxcomp.compressors.inputs import EncoderInput
from fxcomp.errors import BadOption, BadTensor
from fxcomp.testing.kernel_checks import assert_same_bits, compare_with_reference, plain_torch
from fxcomp.testing.result_checks import relative_error
from fxcomp.testing.samples import gaussian, laplace

CHUNKS = (2, 4, 8, 16, 32, 64, 128)


def decoded(values: Tensor, chunk: int) -> Tensor:
    segments = (len(values),)
    return decode(CMax(chunk), encode(CMax(chunk), values, None, segments), 1, segments)


def rows_with_zeros(rows: int, chunk: int, share: float = 0.5) -> Tensor:
    """Gaussian chunks, of which this share is zero."""
    values = gaussian(rows * chunk).view(rows, chunk)
    values[torch.rand(rows, generator=torch.Generator().manual_seed(1)) < share] = 0.0
    return values


def test_each_chunk_sends_place_and_sign_of_its_largest() -> None:
    values = torch.tensor([1.0, -5.0, 2.0, 0.5, 0.5, 3.0, -1.0])
    assert decoded(values, 2).tolist() == [0.0, -2.75, 2.75, 0.0, 0.0, 2.75, -2.75]


def test_of_equal_magnitudes_the_lower_place_goes() -> None:
    assert decoded(torch.tensor([1.0, -3.0, 3.0, 0.0, 2.0, 2.0, -2.0, 1.0]), 4).tolist() == [
        0,
        -2.5,
        0,
        0,
        2.5,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_any_place_and_sign_arrives(chunk: int, sign: float) -> None:
    values = sign * torch.eye(chunk)
    assert torch.equal(decoded(values.flatten(), chunk), values.flatten())


@pytest.mark.parametrize(
    ("chunk", "size"),
    [(8, 4 + 62_500), (16, 4 + 31_250 + 7_813 + 1), (64, 4 + 7_813 + 3_907 + 1_954 + 2), (128, 4 + 7_813 + 3)],
)
def test_the_size_is_the_formula(chunk: int, size: int) -> None:
    assert CMax(chunk).payload_bytes((1_000_000,)) == size
    assert size == pytest.approx(1_000_000 * chunk.bit_length() / (8 * chunk), rel=1e-3)


@pytest.mark.parametrize("chunk", [0, 1, 3, 12, 256])
def test_a_chunk_is_a_power_of_two(chunk: int) -> None:
    with pytest.raises(BadOption, match=r"cmax needs (a chunk that is a power of two|chunk from 2 to 128)"):
        CMax(chunk)


@pytest.mark.parametrize(
    ("chunk", "of_gaussian", "of_laplace"), [(2, 0.36, 0.44), (8, 0.60, 0.54), (16, 0.73, 0.64), (128, 0.94, 0.88)]
)
def test_the_error_is_what_the_docs_say(chunk: int, of_gaussian: float, of_laplace: float) -> None:
    assert relative_error(CMax(chunk), gaussian(131_072)) == pytest.approx(of_gaussian, abs=0.01)
    assert relative_error(CMax(chunk), laplace(131_072)) == pytest.approx(of_laplace, abs=0.01)


@pytest.mark.parametrize("chunk", [8, 16])
def test_the_scale_is_of_least_squared_error(chunk: int) -> None:
    values = laplace(4096)
    sent = decoded(values, chunk)
    assert ((values - sent) * sent).sum().item() == pytest.approx(0.0, abs=1e-2)


# Chunks of zeros


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_of_zeros_decode_to_zeros_and_what_they_cost_is_few_chunks(chunk: int) -> None:
    values = rows_with_zeros(4096, chunk)
    sent = decoded(values.flatten(), chunk).view(-1, chunk)
    is_zero = (values == 0).all(dim=1)
    assert not sent[is_zero].any()
    waiting = (sent[~is_zero] == 0).all(dim=1).float().mean().item()
    assert waiting <= 2 / (2 * chunk)
    of_all = values[~is_zero].abs().amax(dim=1).mean().item()
    assert sent.abs().amax().item() == pytest.approx(of_all, rel=1e-5)


def test_where_no_chunk_is_zero_each_sends() -> None:
    sent = decoded(gaussian(65_536), 16).view(-1, 16)
    assert (sent != 0).any(dim=1).all()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_segment_of_zeros_decodes_to_zeros(zero: float) -> None:
    values = torch.full((1001,), zero)
    assert_same_bits(decoded(values, 8), torch.zeros(1001))


@pytest.mark.parametrize("way", [pytest.param(nullcontext, marks=WITH_KERNELS), plain_torch])
def test_no_place_waits_for_ever_beside_chunks_of_zeros(way: Callable[[], AbstractContextManager[None]]) -> None:
    """One value a chunk, the same at each step: every place and sign gets through."""
    chunk, steps = 8, 64
    gradient = torch.cat([torch.eye(chunk), -torch.eye(chunk), torch.zeros(1, chunk)]).flatten()
    residual, total, segments = torch.zeros_like(gradient), torch.zeros_like(gradient), (len(gradient),)
    with way():
        for _ in range(steps):
            total += decode(CMax(chunk), encode(CMax(chunk), gradient, residual, segments), 1, segments)
    torch.testing.assert_close(total + residual, steps * gradient)
    assert residual.abs().amax() < 8.0


def test_what_is_left_out_is_less_than_everything_in_the_mean_over_the_code() -> None:
    """Bound the loss of a step in which the chunk of most energy has the code that means nothing: at most twice."""
    lost = []
    for step in range(400):
        values = torch.zeros(10, 8)
        values[torch.arange(9), torch.arange(9) % 8] = torch.tensor([1.0, *[0.01] * 8]) * (1 + step / 1000)
        lost.append(relative_error(CMax(8), values.flatten()))
    assert max(lost) <= 2.0
    assert sum(lost) / len(lost) < 1.0


# Values that are not finite, payloads that are damaged


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_segment_with_a_value_that_is_not_finite_decodes_to_nan_and_keeps_its_residual(bad: float) -> None:
    segments = (100, 70)
    bucket, old = gaussian(170), 0.1 * gaussian(170, 7)
    bucket[120] = bad
    residual = old.clone()
    mean = decode(CMax(8), encode(CMax(8), bucket, residual, segments), 1, segments)
    assert mean[:100].isfinite().all()
    assert mean[100:].isnan().all()
    assert_same_bits(residual[100:], old[100:])
    assert not torch.equal(residual[:100], old[:100])


@WITH_KERNELS
@pytest.mark.parametrize("n", [17, 1000 * 16 + 1])
def test_a_payload_with_a_place_outside_a_short_chunk_is_refused(n: int) -> None:
    payload = encode(CMax(16), torch.ones(n), None, (n,))
    chunks = -(-n // 16)
    payload[4 + (chunks - 1) // 2] |= 0xF << 4 * ((chunks - 1) % 2)
    with pytest.raises(BadTensor, match="a payload names places outside its segment"):
        decode(CMax(16), payload, 1, (n,))


# Kernels


@WITH_KERNELS
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(
    "segments", [(1,), (1024, 1023, 1025), (131_072, 0, 5), (262_144 + 77,), (3 * 65_536, 3 * 65_536 + 1)]
)
def test_kernels_give_the_bits_of_the_reference_with_chunks_of_zeros(chunk: int, segments: Sequence[int]) -> None:
    size = sum(segments)
    for share in (0.0, 0.001, 0.5):
        values = rows_with_zeros(-(-size // chunk), chunk, share).flatten()[:size]
        compare_with_reference(CMax(chunk), values, segments, f"{share} of the chunks are zero")
        _compare_with_sparse_residual(CMax(chunk), values, segments)


def _compare_with_sparse_residual(compressor: CMax, values: Tensor, segments: Sequence[int]) -> None:
    """As the conformance suite does, but chunks that are zero stay so with their residual."""
    residuals = [0.5 * values.flip(0) * (values != 0), 0.5 * values.flip(0) * (values != 0)]
    payload = encode(compressor, values, residuals[0], segments)
    with plain_torch():
        new = compressor.compress_reference(EncoderInput(values, residuals[1], tuple(segments)))
    assert_same_bits(payload, new.payload)
    assert new.residual is not None
    assert_same_bits(residuals[0], new.residual)
