"""The enumerator of strategies: what it yields, and that it yields the published tree."""

import hashlib
from collections import Counter

import pytest
from helpers.strategy_space import INDIVISIBLE, Phase, Space, published_space, strategies_in, ways_through

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import BF16, Int4, Int8, PowerSGD, TopK
from fxcomp.plan.strategy import DENSE, FLAT, HOSTS, Compress, Device, Strategy

AT_ONCE = ((Phase(Level.WORLD),),)
PUBLISHED = "e3b27236354ceae4524a6bd8aedd618aa225fbd16ce084ea25d39b7fb5e31190"
"""Of the 174 paths of Espresso's decision tree (EuroSys 2023), in our steps, sorted, one a line."""


def texts_in(space: Space) -> list[str]:
    return list(map(str, strategies_in(space)))


def cluster(shape: str) -> Cluster:
    return Cluster.parse(f"{shape}, inter 1gbit, intra 10gbit")


@pytest.mark.parametrize("compressor", [TopK(0.01), Int8(), BF16()], ids=str)
def test_the_published_restrictions_leave_174_paths(compressor: TopK | Int8 | BF16):
    found = list(strategies_in(published_space(compressor)))
    assert len(found) == len(set(found)) == 174
    assert Counter(len(strategy.compressors) for strategy in found) == {0: 9, 1: 59, 2: 72, 3: 30, 4: 4}


def test_with_a_device_for_each_compression_and_decompression_they_are_4341():
    found = list(strategies_in(published_space(TopK(0.01), devices=tuple(Device))))
    assert len(found) == len(set(found)) == 4_341
    assert sum(len(strategy.devices) < 2 for strategy in found) == 9 + 2 * 165


def test_they_are_the_published_paths():
    found = "\n".join(sorted(texts_in(published_space(TopK(0.01)))))
    assert hashlib.sha256(found.encode()).hexdigest() == PUBLISHED


def test_a_flat_space_of_a_quantiser():
    assert texts_in(Space(ways=AT_ONCE, compressors=(Int8(),), most_compressions=1)) == [
        "all_reduce@world",
        "reduce_scatter@world > all_gather@world",
        "reduce_scatter@world > compress(int8)@gpu > all_gather@world > decompress@gpu",
        "reduce@world > broadcast@world",
        "reduce@world > compress(int8)@gpu > broadcast@world > decompress@gpu",
        "compress(int8)@gpu > all_gather@world > decompress@gpu",
        "compress(int8)@gpu > all_to_all@world > all_gather@world > decompress@gpu",
        "compress(int8)@gpu > all_to_all@world > decompress@gpu > all_gather@world",
        "compress(int8)@gpu > gather@world > broadcast@world > decompress@gpu",
        "compress(int8)@gpu > gather@world > decompress@gpu > broadcast@world",
    ]


def test_without_compressors_everything_is_dense():
    assert texts_in(Space(ways=((Phase(Level.WORLD, INDIVISIBLE),),))) == [str(DENSE)]


def test_the_network_adds_linear_payloads_up_where_it_may():
    linear = texts_in(Space(ways=AT_ONCE, compressors=(BF16(),)))
    gathered = texts_in(Space(ways=AT_ONCE, compressors=(BF16(),), adds_payloads=False))
    assert "compress(bf16)@gpu > all_reduce@world > decompress@gpu" in linear
    assert set(gathered) < set(linear)
    assert not any("gpu > all_reduce" in text or "gpu > reduce" in text for text in gathered)


def test_compressors_are_mixed_only_where_they_may_be():
    space = Space(ways=AT_ONCE, compressors=(Int4(), Int8()))
    mixing = Space(ways=AT_ONCE, compressors=(Int4(), Int8()), mixes_compressors=True)
    assert all(len(set(strategy.compressors)) < 2 for strategy in strategies_in(space))
    added = set(strategies_in(mixing)) - set(strategies_in(space))
    assert Strategy.two_shots(Int4(), Int8()) in added
    assert all(len(set(strategy.compressors)) == 2 for strategy in added)


def test_ranks_agree_once_before_they_compress_what_needs_it():
    found = texts_in(Space(ways=AT_ONCE, compressors=(PowerSGD(4),)))
    step = "powersgd(4)"
    assert (
        found[-1]
        == f"propose({step})@gpu > all_reduce@world > compress({step})@gpu > all_reduce@world > decompress@gpu"
    )
    assert len(found) == 3 + 1


def test_the_ways_through_a_cluster_start_inside():
    levels = {
        shape: [[phase.level.value for phase in way] for way in ways_through(cluster(shape))]
        for shape in ("4x1", "1x4", "2x2", "2x2x2", "2+1")
    }
    assert levels["4x1"] == levels["1x4"] == levels["2+1"] == [["world"]]
    assert levels["2x2"] == [["world"], ["intra", "inter"]]
    assert levels["2x2x2"] == [["world"], ["intra", "inter"], ["intra", "rack", "racks"]]


def test_a_space_with_racks_goes_rack_by_rack():
    found = texts_in(Space(ways=ways_through(cluster("2x2x2"))[2:], compressors=(Int8(),), most_compressions=1))
    assert "reduce_scatter@intra > all_reduce@rack > all_reduce@racks > all_gather@intra" in found
    assert all("inter" not in text and "world" not in text for text in found)


def test_strategies_built_by_hand_are_in_the_space_of_a_cluster():
    compressors = (Int4(), BF16())
    space = Space(ways=ways_through(cluster("2x2")), compressors=compressors, mixes_compressors=True)
    found = set(strategies_in(space))
    hand_made = [
        *(Strategy.flat(compressor) for compressor in (None, *compressors)),
        *(Strategy.hierarchical(compressor) for compressor in (None, *compressors)),
        *(Strategy.two_shots(*pair, by=by) for pair in PAIRS for by in (FLAT, HOSTS)),
    ]
    assert found >= set(hand_made)


PAIRS = [(Int4(), BF16()), (Int4(), None), (None, Int4()), (Int4(), Int4()), (None, None)]


def test_the_first_strategies_of_a_space_are_found_without_the_rest():
    """It is a generator: a space may be far larger than what anybody reads of it."""
    first = next(iter(strategies_in(published_space(Int8(), devices=tuple(Device)))))
    assert first == DENSE
    assert not any(isinstance(step, Compress) for step in first.steps)
