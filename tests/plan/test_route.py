"""A strategy bound to sizes: pieces partition the bucket, cuts add up, bytes and weights are the formulas'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import parse_compressor
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.legs import Decode, Encode, Route, Send, Turn
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Device, Strategy

FLAT = "compress(A)@gpu > all_to_all@world > decompress@gpu > compress(B)@gpu > all_gather@world > decompress@gpu"
BY_LEVEL = (
    "reduce_scatter@intra > compress(A)@gpu > all_to_all@inter > decompress@gpu > compress(B)@gpu > all_gather@inter"
    " > all_gather@intra > decompress@gpu"
)
ENCODED_INSIDE = (
    "compress(A)@gpu > all_to_all@intra > decompress@gpu > compress(A)@gpu > all_to_all@inter > decompress@gpu"
    " > compress(B)@gpu > all_gather@inter > all_gather@intra > decompress@gpu"
)
PASSED_ON = (
    "compress(A)@gpu > all_to_all@intra > all_to_all@inter > all_gather@inter > all_gather@intra > decompress@gpu"
)
ROOTED = (
    "reduce@intra > compress(A)@gpu > gather@inter > decompress@gpu > compress(B)@gpu > broadcast@inter"
    " > decompress@gpu > broadcast@intra"
)
ONE_SHOT = "compress(A)@gpu > all_gather@world > decompress@gpu"
SHARDED = "reduce_scatter@intra > compress(A)@gpu > all_gather@inter > decompress@gpu > all_gather@intra"
DENSE = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"
TEXTS = (FLAT, BY_LEVEL, ENCODED_INSIDE, PASSED_ON, ROOTED, ONE_SHOT, SHARDED, DENSE)
SHAPES = ("2x1", "4x1", "8x1", "1x3", "2x4", "3x2")


def strategy(text: str, first: str = "int4", second: str = "int8") -> Strategy:
    return Strategy.parse(text.replace("(A)", f"({first})").replace("(B)", f"({second})"))


def cluster(shape: str) -> Cluster:
    return Cluster.parse(f"{shape}, inter 1gbit, intra 10gbit")


def routes(made: Strategy, sizes: Sequence[int], on: Cluster) -> list[Route]:
    return [route_of(made, [(size,) for size in sizes], on, rank) for rank in range(on.world_size)]


SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=5)


@settings(max_examples=60)
@given(st.sampled_from(TEXTS), st.sampled_from(SHAPES), SIZES, st.sampled_from(["int4(block=8)", "topk(0.1)", "sign"]))
def test_every_rank_cuts_alike_and_holds_what_was_sent_to_it(text: str, shape: str, sizes: list[int], first: str):
    """Legs fit each other: the bytes that one leaves are those that the next one takes, and its group's cuts agree."""
    on = cluster(shape)
    found = routes(strategy(text, first), sizes, on)
    for rank, route in enumerate(found):
        held = 4 * sum(sizes)
        for number, leg in enumerate(route.legs):
            if isinstance(leg, Send):
                group = on.group(leg.level, rank)
                assert (leg.ranks, group[leg.place]) == (len(group), rank)
                others = [each for k in group if isinstance(each := found[k].legs[number], Send)]
                assert len({each.cut for each in others}) == 1
                assert is_brought(leg, held), (rank, leg, held)
                held = leg.leaves(held)
            elif isinstance(leg, Encode):
                assert held == 4 * leg.elements
                held = leg.payload_elements * leg.compressor.payload_dtype.itemsize
            else:
                payloads = sum(map(leg.compressor.payload_elements, leg.segments)) * leg.payloads
                assert held == payloads * leg.compressor.payload_dtype.itemsize
                held = 4 * leg.elements
        assert held == 4 * sum(sizes), "every rank ends with the whole bucket"


def is_brought(leg: Send, held: int) -> bool:
    """Return whether a rank holds what its part in the collective takes."""
    if not leg.parts:
        return True
    brings = (
        leg.parts[leg.place] if leg.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST) else sum(leg.parts)
    )
    turned = leg.turned is None or leg.turned.outer * sum(leg.turned.sizes) == sum(leg.parts)
    return held == brings * leg.itemsize and turned


@settings(max_examples=60)
@given(st.sampled_from(TEXTS), st.sampled_from(SHAPES), SIZES)
def test_pieces_partition_the_bucket_between_the_ranks_that_split_it(text: str, shape: str, sizes: list[int]):
    on = cluster(shape)
    found = routes(strategy(text), sizes, on)
    whole = sum(sizes)
    for legs in zip(*(route.legs for route in found), strict=True):
        if isinstance(legs[0], Send):
            continue
        covered = [0] * whole
        for leg in legs:
            assert not isinstance(leg, Send)
            assert [sum(segments) for segments in leg.segments] == list(map(len, leg.pieces))
            for piece in leg.pieces:
                for place in piece:
                    covered[place] += 1
            ends = [0, *(end for piece in leg.pieces if piece for end in (piece.start, piece.stop))]
            assert ends == sorted(ends), "pieces lie in the bucket's order"
        assert len(set(covered)) == 1, "each value is compressed and decoded on equally many ranks"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", [*SHAPES, "2x2x2", "3+2"])
def test_weights_say_what_a_residual_lacks_in_the_mean(text: str, shape: str):
    """Put 1 into every residual: together they must lack 1 everywhere in the mean, in every slot."""
    on, made = cluster(shape), strategy(text)
    if not on.is_even and text not in (FLAT, ONE_SHOT, ROOTED):
        return
    found = routes(made, (40, 7, 300), on)
    for slots in zip(*(route.slots for route in found), strict=True):
        lacks = [Fraction(0)] * 347
        for slot in slots:
            for piece in slot.pieces:
                for place in piece:
                    lacks[place] += slot.unit.weight
        assert len(set(lacks)) == 1
        assert lacks[0] == slots[0].unit.total


def test_the_owner_of_a_mean_has_weight_one_and_a_worker_one_of_p():
    for shape, text, weights in (
        ("4x1", FLAT, [Fraction(1, 4), Fraction(1)]),
        ("2x4", BY_LEVEL, [Fraction(1, 2), Fraction(1)]),  # gradients are scaled to a host's mean
        ("2x4", ENCODED_INSIDE, [Fraction(1, 8), Fraction(1, 2), Fraction(1)]),
        ("2x4", ONE_SHOT, [Fraction(1, 8)]),
    ):
        (route, *_) = routes(strategy(text), (64,), cluster(shape))
        assert [slot.unit.weight for slot in route.slots] == weights, text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", ["2x4", "3x2", "3+2"])
def test_packing_divides_by_what_decoding_does_not(text: str, shape: str):
    on, made = cluster(shape), strategy(text)
    if not on.is_even and text not in (FLAT, ONE_SHOT, ROOTED):
        return
    (route, *_) = routes(made, (64,), on)
    decoded = math.prod(leg.payloads for leg in route.legs if isinstance(leg, Decode))
    assert route.scale == Fraction(decoded, on.world_size)


# Bytes on the wire


def wire_bytes(route: Route, level: Level | None = None) -> int:
    """Count what this rank sends by direct sends, at all levels or one: what is its own stays with it."""
    sent = 0
    held = 4 * len(route.whole)
    for leg in route.legs:
        if isinstance(leg, Send):
            if level in (None, leg.level):
                sent += _sent(leg, held)
            held = leg.leaves(held)
        elif isinstance(leg, Encode):
            held = leg.payload_elements * leg.compressor.payload_dtype.itemsize
        else:
            held = 4 * leg.elements
    return sent


def _sent(leg: Send, held: int) -> int:
    if leg.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST):
        return (leg.ranks - 1) * held
    assert leg.kind is not CollectiveKind.ALL_REDUCE
    return held - leg.parts[leg.place] * leg.itemsize


N = 8 * 512 * 16
"""Values of the bucket: whole blocks of int8 for up to eight ranks."""
BYTES = {"int4": 0.5 + 4 / 128, "int8": 1 + 4 / 512}
"""Bytes a value: codes and a fp32 scale a block."""


@pytest.mark.parametrize("second", ["int4", "int8"])
@pytest.mark.parametrize("shape", ["2x1", "4x1", "8x1", "2x4"])
def test_flat_two_shots_send_a_share_of_each_payload_to_each_rank(shape: str, second: str):
    """(p − 1)/p · (b1 + b2) · n bytes a rank."""
    on = cluster(shape)
    p = on.world_size
    for route in routes(strategy(FLAT, "int4", second), (N,), on):
        assert wire_bytes(route) == (p - 1) * (BYTES["int4"] + BYTES[second]) * N / p


@pytest.mark.parametrize("shape", ["2x1", "4x1", "8x1", "2x4"])
def test_one_shot_sends_its_payload_to_every_rank(shape: str):
    """(p − 1) · b · n bytes a rank; as much as two shots at p = 2."""
    on = cluster(shape)
    for route in routes(strategy(ONE_SHOT), (N,), on):
        assert wire_bytes(route) == (on.world_size - 1) * BYTES["int4"] * N
    if on.world_size == 2:
        (two_shots, *_) = routes(strategy(FLAT, "int4", "int4"), (N,), on)
        assert wire_bytes(two_shots) == wire_bytes(route_of(strategy(ONE_SHOT), [(N,)], on))


def test_two_shots_between_hosts_send_a_share_of_the_bucket_over_each_link():
    """(k − 1)/k · 4n inside, (N − 1)/N · (b1 + b2) · n/k between hosts, (k − 1)/k · b2 · n inside, passed on."""
    hosts, k = 2, 4
    for route in routes(strategy(BY_LEVEL), (N,), cluster("2x4")):
        assert wire_bytes(route, Level.INTER) == (hosts - 1) * (BYTES["int4"] + BYTES["int8"]) * N / (hosts * k)
        assert wire_bytes(route, Level.INTRA) == (k - 1) * (4 + BYTES["int8"]) * N / k


def test_encoded_inside_too_the_dense_share_is_a_payloads():
    """(k − 1)/k · b0 · n instead of (k − 1)/k · 4n."""
    k = 4
    for route in routes(strategy(ENCODED_INSIDE), (N,), cluster("2x4")):
        assert wire_bytes(route, Level.INTRA) == (k - 1) * (BYTES["int4"] + BYTES["int8"]) * N / k


@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_root_sends_all_payloads_and_the_others_one(p: int):
    """b1 · n to the root; from it (p − 1) · b2 · n."""
    text = "compress(A)@gpu > gather@world > decompress@gpu > compress(B)@gpu > broadcast@world > decompress@gpu"
    root, *others = routes(strategy(text), (N,), cluster(f"{p}x1"))
    assert wire_bytes(root) == (p - 1) * BYTES["int8"] * N
    assert {wire_bytes(other) for other in others} == {BYTES["int4"] * N}


def test_uneven_shards_have_no_padding():
    """Three ranks, blocks of 8, 37 values: what all ranks send is what the values' blocks need, not one byte more."""
    on, made = cluster("3x1"), strategy(FLAT, "int8(block=8)", "int8(block=8)")
    found = routes(made, (37,), on)
    lengths = [len(route.slots[1].pieces[0]) for route in found]
    assert sorted(lengths) == [8, 13, 16]
    int8 = parse_compressor("int8(block=8)")
    sent = sum(wire_bytes(route) for route in found)
    assert sent == 2 * 2 * sum(int8.payload_bytes((length,)) for length in lengths)


def test_a_bucket_smaller_than_its_ranks_leaves_shards_empty():
    found = routes(strategy(FLAT), (1, 1), cluster("4x1"))
    assert sum(len(route.slots[1].pieces[0]) for route in found) == 2
    empty = [route for route in found if not route.slots[1].elements]
    assert len(empty) == 2
    assert all(route.slots[1].payload_elements == 0 for route in empty)


def test_blocks_never_lie_across_a_cut():
    on = cluster("4x1")
    (route, *_) = routes(strategy(FLAT, "int4(block=8)", "int8(block=12)"), (100,), on)
    assert {piece.start % 24 for piece in route.slots[0].pieces} == {0}, "a grain of both compressors"


def test_payloads_of_several_ranks_are_turned_into_the_order_of_the_parts():
    """After the ranks of a host have exchanged, one host's payloads for all owners lie rank by rank."""
    (route, *_) = routes(strategy(PASSED_ON, "int8(block=4)"), (32,), cluster("2x2"))
    inside, between, *_ = [leg for leg in route.legs if isinstance(leg, Send)]
    assert inside.turned is None
    assert between.turned == Turn(2, (16, 16))
    assert between.parts == (32, 32)
    assert [list(piece)[:1] for piece in route.slots[0].pieces] == [[0], [8], [16], [24]]


def test_rooted_ranks_but_the_first_hold_nothing_between():
    found = routes(strategy(ROOTED), (40,), cluster("3+2"))
    assert [[slot.elements for slot in route.slots] for route in found] == [[40, 40], [0, 0], [0, 0], [40, 0], [0, 0]]


def test_a_slot_is_numbered_by_its_compression_and_shared_by_its_agreement():
    text = "propose(powersgd(1))@gpu > all_reduce@world > compress(powersgd(1))@cpu > all_reduce@world > decompress@gpu"
    route = route_of(Strategy.parse(text), [(8, 5)], cluster("2x1"))
    assert [(type(leg).__name__, leg.slot) for leg in route.legs] == [
        *(("Encode", 0), ("Send", 0), ("Encode", 0), ("Send", 0), ("Decode", 0)),
    ]
    assert [leg.device for leg in route.legs if isinstance(leg, Encode)] == [Device.GPU, Device.CPU]
    assert len(route.slots) == 1


def test_levels_of_a_shared_scale_count_the_ranks_that_add_up():
    """Hosts sum three ranks inside, and two of those payloads meet between hosts."""
    text = (
        "reduce_scatter@intra > propose(shared_int8)@gpu > all_reduce@inter > compress(shared_int8)@gpu"
        " > all_reduce@inter > decompress@gpu > all_gather@intra"
    )
    shared = parse_compressor("shared_int8")
    (slot,) = route_of(Strategy.parse(text), [(4, 6)], cluster("2x3")).slots
    assert slot.compressor == shared.bound_to([(8,)], 2)
