"""Writing places down in few bytes."""

import math

import pytest
import torch
from torch import Tensor

from fxcomp.compressors.places import BITMAP, bytes_of, form_of, read, write


def _some_places(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values


def test_the_picture_is_right() -> None:
    places = torch.tensor([3, 7, 300, 999])
    bits = [1, 1, 0, 1, 0, 0, 1]
    packed = sum(bit << i for i, bit in enumerate(bits))
    assert form_of(1000, 4) == 8
    assert write(places, 1000, 4).tolist() == [3, 7, 44, 231, packed]


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 511, 65_535, 65_536, 65_537, 700_000])
@pytest.mark.one_in(3)
def test_places_come_back_and_fill_what_was_declared(n: int) -> None:
    for k in sorted({1, min(2, n), math.ceil(n / 3000), math.ceil(n / 100), math.ceil(n / 7), n}):
        first, last = torch.arange(k), torch.arange(n - k, n)
        for places in (first, last, _some_places(n, k)):
            for slots in (k, min(n, k + 3), min(n, 2 * k)):
                section = write(places, n, slots)
                assert len(section) == bytes_of(n, slots)
                assert read(section, n, slots).tolist() == [*places.tolist(), *[0] * (slots - k)]


def test_nothing_takes_no_bytes() -> None:
    assert bytes_of(0, 0) == 0
    assert len(write(torch.empty(0, dtype=torch.int64), 0, 0)) == 0
    assert len(read(torch.empty(0, dtype=torch.uint8), 0, 0)) == 0


@pytest.mark.parametrize(
    ("share", "form", "bits_a_place"),
    [(0.3, BITMAP, 3.4), (0.1, 8, 9.1), (0.01, 8, 9.4), (0.001, 8, 13.0), (1e-4, 16, 17.2)],
)
def test_the_shortest_form_is_taken(share: float, form: int, bits_a_place: float) -> None:
    n = 10_000_000
    k = round(share * n)
    assert form_of(n, k) == form
    assert 8 * bytes_of(n, k) / k <= bits_a_place
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share
    assert 8 * bytes_of(n, k) / k >= entropy
