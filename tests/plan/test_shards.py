"""Cutting a bucket into shards."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import parse_compressor
from fxcomp.plan.legs import Decode, Encode, Send, cut_points, row_shards
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.arena import Arena
from fxcomp.state.gradient_state import residual_layout

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


SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4)


@given(SHAPES, st.integers(1, 5))
def test_rows_are_cut_as_fully_shard_cuts_them(shapes: list[list[int]], ranks: int):
    wholes = [torch.arange(math.prod(shape)).view(shape) for shape in shapes]
    found = row_shards(shapes, ranks)
    assert [number for number, _ in found] == list(range(len(shapes))) * ranks
    for k, (number, extent) in enumerate(found):
        whole, rank = wholes[number], k // len(shapes)
        chunks = whole.chunk(ranks)
        mine = chunks[rank] if rank < len(chunks) else whole[:0]
        assert len(extent) == chunks[0].numel()
        assert whole.flatten()[extent.start : extent.stop].tolist() == mine.flatten().tolist()


@given(SHAPES, st.integers(2, 5), st.sampled_from(["int4", "topk(0.1)", "sign"]))
def test_a_strategy_that_ends_as_shards_is_cut_where_a_ranks_rows_end(shapes: list[list[int]], ranks: int, name: str):
    sizes = [len(extent) for _, extent in row_shards(shapes, ranks)]
    part = sum(sizes) // ranks
    for rank in range(ranks):
        strategy = Strategy.scattered(parse_compressor(name))
        route = route_of(
            strategy, [(size,) for size in sizes], Cluster.parse(f"{ranks}x1, inter 1gbit, intra 10gbit"), rank
        )
        encode, send, decode = route.legs
        assert isinstance(encode, Encode)
        assert isinstance(send, Send)
        assert [piece.start for piece in encode.pieces] == list(range(0, ranks * part, part))
        assert len(set(send.parts)) == 1
        assert isinstance(decode, Decode)
        assert [piece.start for piece in decode.pieces] == [rank * part]
        assert route.scale == 1


@given(SHAPES, st.integers(2, 5))
def test_residuals_of_rows_have_room_for_padding_and_are_known_without_it(shapes: list[list[int]], ranks: int):
    names, named = [f"w{k}" for k in range(len(shapes))], {f"w{k}": shape for k, shape in enumerate(shapes)}
    sizes = tuple(map(math.prod, shapes))
    plan = Plan((Bucket(tuple(names), sizes, Strategy.scattered(parse_compressor("int4"))),))
    layout = residual_layout(plan, Cluster.parse(f"{ranks}x1, inter 1gbit, intra 10gbit"), 0, shapes=named)
    kept = Arena(layout, torch.device("cpu"))
    assert kept.of(0).numel() == sum(len(extent) for _, extent in row_shards(shapes, ranks))
    for name, size in zip(names, sizes, strict=True):
        places = [place for piece in kept.slices[name] for place in piece.extent]
        assert places == list(range(size))
        assert [place for extent in kept.covered[name] for place in extent] == list(range(size))
