"""The payload of fixed size of sidco: which values are sent when too many or none survive."""

import pytest
import torch
from helpers.compressor_cases import WITH_KERNELS
from torch import Tensor

from fxcomp.compressors import Compressed, EncoderInput, Sidco, places, survivors
from fxcomp.errors import BadTensor


def _sent(payload: Tensor, n: int, slots: int) -> tuple[int, list[float], list[int]]:
    words, end = payload.view(torch.int32), 4 + 4 * slots
    kept = places.read(payload[end:][: places.bytes_of(n, slots)], n, slots)
    return int(words[0]), words[1 : 1 + slots].view(torch.float32).tolist(), kept[: int(words[0])].tolist()


def _compress(bucket: Tensor, residual: Tensor | None, ratio: float, threshold: float) -> Compressed:
    bits = int(torch.tensor(threshold).view(torch.int32))
    return survivors.compress(EncoderInput(bucket, residual, (len(bucket),)), ratio, [bits])[0]


def test_a_payload_holds_a_count_then_values_then_places_then_zeros() -> None:
    bucket = torch.tensor([0.5, -3.0, 0.0, 2.0, 1.0] + [0.0] * 15)
    payload = _compress(bucket, None, ratio=0.1, threshold=2.0).payload
    assert _sent(payload, 20, 3) == (2, [-3.0, 2.0, 0.0], [1, 3])


def test_where_too_many_survive_the_largest_are_sent_and_the_rest_stays() -> None:
    bucket = torch.tensor([5.0, 2.0, -5.0, 3.0, 2.0, 2.0] + [0.0] * 14)
    payload, residual, _ = _compress(bucket, torch.zeros(20), ratio=0.15, threshold=1.0)  # k = 3, 4 slots
    assert residual is not None
    assert _sent(payload, 20, 4) == (4, [5.0, 2.0, -5.0, 3.0], [0, 1, 2, 3])
    assert residual.tolist() == [0.0] * 4 + [2.0, 2.0] + [0.0] * 14


def test_nothing_is_sent_where_nothing_reaches_the_threshold_until_it_has_added_up() -> None:
    bucket, residual = torch.full((10,), 0.4), torch.zeros(10)
    counts: list[int] = []
    for _ in range(4):
        payload, residual, _ = _compress(bucket, residual, ratio=1.0, threshold=1.0)
        counts.append(_sent(payload, 10, 10)[0])
    assert counts == [0, 0, 10, 0]


def test_there_are_thirty_per_cent_more_slots_than_values_to_send() -> None:
    assert survivors.capacities((0, 1, 10, 1000, 1001), 0.1) == (0, 1, 2, 130, 132)
    assert survivors.capacities((100,), 1.0) == (100,)
    assert survivors.payload_bytes((0, 1, 1000), 0.1) == (4 + 4 * 1 + 4) + (4 + 4 * 130 + 128)


@WITH_KERNELS
@pytest.mark.parametrize("count", [-1, 14, 2**31 - 1])
def test_a_count_that_no_payload_has_is_refused_though_as_many_places_follow(count: int) -> None:
    """13 slots: the 14th value would be read from the places."""
    compressor = Sidco(0.1)
    payload = torch.zeros(compressor.payload_elements((100,)), dtype=torch.uint8)
    payload.view(torch.int32)[0] = count
    payload[4 + 4 * 13 :][:2] = torch.tensor([0xFF, 0x3F], dtype=torch.uint8)
    with pytest.raises(BadTensor, match="outside its segment"):
        compressor.decode(payload, 1, (100,), torch.empty(100))


@WITH_KERNELS
def test_a_payload_that_is_not_ours_is_refused() -> None:
    compressor = Sidco(0.1)
    payload = torch.zeros(compressor.payload_elements((100,)), dtype=torch.uint8)
    payload.view(torch.int32)[0] = 14
    with pytest.raises(BadTensor, match="outside its segment"):
        compressor.decode(payload, 1, (100,), torch.empty(100))
    payload.view(torch.int32)[0] = 3  # and no bit says where
    with pytest.raises(BadTensor, match="outside its segment"):
        compressor.decode(payload, 1, (100,), torch.empty(100))
