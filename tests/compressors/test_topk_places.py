"""Which values topk sends."""

import torch
from compressor_cases import encode

from fxcomp.compressors import TopK


def _sent(values: list[float], k: int) -> list[tuple[int, float]]:
    payload = encode(TopK(k / len(values)), torch.tensor(values), None, (len(values),))
    places, sent = payload[4 * k :].view(torch.int32), payload[: 4 * k].view(torch.float32)
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
    assert payload[4:].view(torch.int32).tolist() == [69_999]
