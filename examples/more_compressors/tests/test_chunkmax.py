"""Which values chunkmax sends."""

from collections.abc import Callable

import pytest
import torch
from fxcomp_more import ChunkMax
from fxcomp_more.chunkmax import _library
from round_trip import decode, encode
from torch import Tensor

from fxcomp.errors import BadTensor
from fxcomp.testing.result_checks import relative_error
from fxcomp.testing.samples import gaussian, laplace


def _decoded(values: list[float], ratio: float) -> list[float]:
    bucket = torch.tensor(values)
    return decode(ChunkMax(ratio), encode(ChunkMax(ratio), bucket), len(values)).tolist()


def test_each_chunk_sends_its_largest_magnitude() -> None:
    assert _decoded([1.0, -5.0, 2.0, 4.0, 0.5], 0.5) == [0.0, -5.0, 0.0, 4.0, 0.5]


def test_of_equal_magnitudes_the_lower_place_goes() -> None:
    assert _decoded([1.0, -3.0, 3.0, 0.0, 2.0, 2.0], 1 / 3) == [0.0, -3.0, 0.0, 0.0, 2.0, 0.0]


def test_chunks_are_as_long_as_the_ratio_says_in_exact_arithmetic() -> None:
    assert [ChunkMax(ratio).chunk for ratio in (0.5, 0.3, 0.1, 0.07, 0.01, 0.0001)] == [2, 4, 10, 15, 100, 10_000]


@pytest.mark.parametrize(("ratio", "size"), [(0.01, 4 * 11 + 12), (0.001, 4 * 2 + 4), (0.5, 4 * 501 + 504)])
def test_the_size_is_the_formula(ratio: float, size: int) -> None:
    assert ChunkMax(ratio).payload_bytes((1001,)) == size


@pytest.mark.parametrize("place", [0, 255, 256, 1023, 1024, 39_999])
def test_any_place_of_a_long_chunk_arrives(place: int) -> None:
    values = torch.zeros(100_000)
    values[40_000 + place] = -1.0
    decoded = decode(ChunkMax(1 / 40_000), encode(ChunkMax(1 / 40_000), values), 100_000)
    assert torch.equal(decoded, values)


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("sample", [gaussian, laplace], ids=lambda sample: sample.__name__)
def test_what_is_left_out_is_at_most_one_minus_the_ratio(sample: Callable[[int], Tensor], ratio: float) -> None:
    assert relative_error(ChunkMax(ratio), sample(131_000)) <= 1 - ratio


@pytest.mark.skipif(_library() is None, reason="the kernel is not built")
@pytest.mark.parametrize("place", [3, 100, 255])
def test_a_payload_with_places_outside_their_chunks_is_refused(place: int) -> None:
    payload = torch.zeros(ChunkMax(0.01).payload_elements((103,)), dtype=torch.uint8)
    payload[4 * 2 + 1] = place
    with pytest.raises(BadTensor, match="a payload names places outside its segment"):
        ChunkMax(0.01).decode(payload, 1, (103,), torch.zeros(103))
