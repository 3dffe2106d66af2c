"""Cutting a bucket into shards."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxcomp.plan.legs import cut_points

SIZES = st.lists(st.integers(0, 3000), max_size=12)
PARTS = st.integers(1, 9)
GRAINS = st.sampled_from([1, 2, 8, 128, 512, 65536])


def allowed_places(sizes: list[int], grain: int) -> list[int]:
    edges = [0, *accumulate(sizes)]
    return sorted({*edges, *(place for start, end in pairwise(edges) for place in range(start, end, grain))})


@given(SIZES, PARTS, GRAINS)
def test_each_border_is_the_allowed_place_nearest_to_equal_shards(sizes: list[int], parts: int, grain: int):
    places, whole = allowed_places(sizes, grain), sum(sizes)
    borders = cut_points(sizes, parts, grain)
    assert len(borders) == parts + 1
    for index, border in enumerate(borders):
        assert border == min(places, key=lambda place: (abs(parts * place - index * whole), place))


@pytest.mark.parametrize(
    ("sizes", "parts", "grain", "borders"),
    [
        ((6, 3, 7), 3, 2, (0, 6, 11, 16)),
        ((), 3, 8, (0, 0, 0, 0)),
        ((0, 0), 2, 8, (0, 0, 0)),
        ((5,), 1, 8, (0, 5)),
        ((5,), 4, 8, (0, 0, 0, 5, 5)),  # smaller than a grain: one shard holds all
        ((1, 1, 1), 5, 128, (0, 1, 1, 2, 2, 3)),
        ((129,), 2, 128, (0, 128, 129)),
        ((2**31, 2**31 + 5), 2, 512, (0, 2**31, 2**32 + 5)),
    ],
)
def test_examples(sizes: tuple[int, ...], parts: int, grain: int, borders: tuple[int, ...]):
    assert cut_points(sizes, parts, grain) == borders


@pytest.mark.parametrize(("parts", "grain"), [(0, 1), (1, 0)])
def test_nothing_is_cut_into_no_parts_or_without_a_grain(parts: int, grain: int):
    with pytest.raises(AssertionError):
        cut_points((4,), parts, grain)
