"""Top-k where few values are not zero, as in embeddings and in experts that nothing was routed to."""

from unittest.mock import patch

import pytest
import torch
from helpers.compressor_cases import WITH_KERNELS
from torch import Tensor

from fxcomp.compressors import TopK
from fxcomp.testing.kernel_checks import assert_same_bits, plain_torch
from fxcomp.testing.samples import gaussian

SIZE = 400_000  # two parts, so that a cut goes through the segment
RATIO = 0.01


def _rows(elements: int, share: float) -> Tensor:
    """Whole rows of 64 values that are not zero; a sample may miss them."""
    values = gaussian(elements).view(-1, 64)
    values[torch.rand(len(values), generator=torch.Generator().manual_seed(2)) >= share] = 0.0
    return values.flatten()


def _scattered(elements: int, share: float) -> Tensor:
    values = gaussian(elements)
    values[torch.rand(elements, generator=torch.Generator().manual_seed(2)) >= share] = 0.0
    return values


def _hidden(elements: int) -> Tensor:
    """So large where the sample looks that fewer than k reach the guess."""
    values = gaussian(elements)
    values[::33] += torch.linspace(100, 200, len(values[::33]))
    values[torch.arange(elements) % 33 * 7 % 5 == 0] *= 1e-30
    return values


BUCKETS = {
    "nothing": torch.zeros(SIZE),
    "negative zeros": -torch.zeros(SIZE),
    "zeros of either sign": gaussian(SIZE) * 0.0,
    "some": _scattered(SIZE, RATIO / 10),
    "about k": _scattered(SIZE, RATIO),
    "rows": _rows(SIZE, RATIO / 3),
    "about k in rows": _rows(SIZE, RATIO),
    "the first": torch.cat([gaussian(100), torch.zeros(SIZE - 100)]),
    "the last": torch.cat([torch.zeros(SIZE - 100), gaussian(100)]),
    "denormal": _scattered(SIZE, RATIO) * 1e-44,
    "hidden": _hidden(SIZE),
}


@WITH_KERNELS
@pytest.mark.parametrize("name", BUCKETS)
@pytest.mark.parametrize("bad", [None, torch.nan])
@pytest.mark.one_in(4)
def test_topk_of_a_sparse_bucket_is_the_reference_s(name: str, bad: float | None) -> None:
    bucket = BUCKETS[name].clone()
    if bad is not None:
        bucket[[3, 70_000, SIZE - 1]] = bad
    for ratio in (RATIO, 0.2):
        compressor = TopK(ratio)
        for old in (None, _scattered(SIZE, RATIO / 2)):
            with plain_torch():
                expected = _encoded(compressor, bucket, old)
            for threads in (1, 2):
                with patch.object(torch, "get_num_threads", return_value=threads):
                    actual = _encoded(compressor, bucket, old)
                for one, other in zip(actual, expected, strict=True):
                    assert_same_bits(one, other, f"{ratio}, feedback {old is not None}, {threads} threads")


def _encoded(compressor: TopK, bucket: Tensor, old: Tensor | None) -> list[Tensor]:
    segments = (SIZE - 3000, 3000)
    residual = None if old is None else old.clone()
    payload = torch.full((compressor.payload_elements(segments),), 77, dtype=torch.uint8)
    compressor.encode(bucket, residual, payload, segments)
    return [payload] if residual is None else [payload, residual]


def test_the_size_of_a_payload_is_worked_out_once() -> None:
    asked: list[tuple[int, ...]] = []

    class Counting(TopK):
        def payload_elements(self, segments: tuple[int, ...]) -> int:
            asked.append(segments)
            return TopK.payload_elements(self, segments)

    compressor, segments = Counting(0.5), (9, 4)
    payload = torch.zeros(TopK(0.5).payload_elements(segments), dtype=torch.uint8)
    for _ in range(3):
        compressor.encode(gaussian(13), None, payload, segments)
        compressor.decode(payload, 1, segments, torch.empty(13))
    assert asked == [segments]
