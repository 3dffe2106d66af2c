"""Compressors have random streams of their own, and states that only what made them takes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
from helpers.workloads import cluster
from torch import Tensor

from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.compressors.randomness import key_of
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.arena import Part
from fxcomp.runtime.compressor_states import CompressorStates, StateLayout
from fxcomp.state.gradient_state import state_layout

CPU = torch.device("cpu")
INT8 = parse_compressor("int8(stochastic=true)")
POWERSGD = parse_compressor("powersgd(1)").bound_to([(6, 4), (3,)], 2)


def states(*layouts: StateLayout, seed: int = 7) -> CompressorStates:
    return CompressorStates({(number, each.slot): each for number, each in enumerate(layouts)}, CPU, seed)


def layout(
    *names: str, compressor: Compressor = INT8, sizes: Sequence[int] = (), place: int = 0, slot: int = 0
) -> StateLayout:
    sizes = sizes or [8] * len(names)
    parts = [Part(name, 0, size, size, index) for index, (name, size) in enumerate(zip(names, sizes, strict=True))]
    return StateLayout(compressor, tuple((part, compressor.of_segment(part.index)) for part in parts), place, slot)


def pieces(start: int, *, compressor: Compressor = INT8, slot: int = 0) -> StateLayout:
    """Eight of sixteen elements of `a`."""
    return StateLayout(compressor, ((Part("a", start, 8, 16), compressor),), slot=slot)


def of_parameter(kept: CompressorStates, name: str) -> list[Tensor]:
    return [value for label, value in kept.shared().items() if label.startswith(f"{name}, ")]


def filled(kept: CompressorStates, *names: str) -> CompressorStates:
    for number, name in enumerate(names):
        for piece in of_parameter(kept, name):
            piece.copy_(100 * number + torch.arange(piece.numel()))
    return kept


def only(kept: CompressorStates, name: str) -> Tensor:
    (piece,) = of_parameter(kept, name)
    return piece


def load(kept: CompressorStates, state: Mapping[str, Any]) -> None:
    kept.tell(kept.take_back([state["compressors"]]))


def same(one: CompressorStates, other: CompressorStates, *names: str) -> bool:
    return all(torch.equal(only(one, name), only(other, name)) for name in names)


def test_a_bucket_has_its_parameters_states_in_order():
    kept = filled(states(layout("a", "b")), "a", "b")
    assert kept.of(0).tolist() == [0, 1, 100, 101]
    kept.of(0).add_(1)
    assert only(kept, "b").tolist() == [101, 102]


def test_streams_follow_from_seed_name_place_slot_and_start():
    def key(given: StateLayout, seed: int = 7) -> int:
        return int(only(states(given, seed=seed), given.parts[0][0].name)[0])

    others = [layout("b"), layout("a", place=1), pieces(0), pieces(8), pieces(0, slot=1), pieces(8, slot=1)]
    keys = [key(layout("a")), key(layout("a"), seed=8), *map(key, others)]
    assert len(set(keys)) == len(keys)
    assert key(layout("a")) == key_of(key_of(7, "a"), 0), "as before there were slots"


def test_ranks_that_must_draw_alike_do():
    randomk = parse_compressor("randomk(0.5)")
    first, other = (states(layout("a", compressor=randomk, place=place)).of(0) for place in (0, 1))
    assert torch.equal(first, other)


def test_each_segment_keeps_what_its_own_shape_asks_for():
    kept = states(layout("matrix", "vector", compressor=POWERSGD, sizes=(24, 3)))
    assert only(kept, "matrix").numel() == 4
    assert only(kept, "vector").tolist() == [0, 0, 0]
    assert kept.of(0).dtype is torch.float32


def test_an_empty_parameter_shifts_no_others_state():
    shapes: dict[str, tuple[int, ...]] = {"none": (0, 4), "vector": (3,), "matrix": (6, 4)}
    bucket = Bucket(tuple(shapes), (0, 3, 24), Strategy.flat(parse_compressor("powersgd(1)")))
    made = CompressorStates(state_layout(Plan((bucket,)), shapes, cluster(2, 1, "1gbit"), 0), CPU)
    assert {name: only(made, name).numel() for name in ("vector", "matrix")} == {"vector": 3, "matrix": 4}


def test_other_buckets_take_each_parameters_own_state():
    saved = filled(states(layout("a", "b"), layout("c")), "a", "b", "c")
    loaded = states(layout("c", "a"), layout("b"))
    load(loaded, saved.state_dict())
    assert same(saved, loaded, "a", "b", "c")


def test_a_saved_state_is_a_copy():
    kept = filled(states(layout("a")), "a")
    saved = kept.state_dict()
    kept.of(0).zero_()
    assert saved["compressors"]["a"][0]["state"].tolist() == [0, 1]


OTHERS = [
    layout("a", compressor=parse_compressor("int4(stochastic=true)")),
    layout("a", sizes=(9,)),
    layout("a", compressor=POWERSGD.bound_to([(8, 1)], 2)),
]


@pytest.mark.parametrize("other", OTHERS)
def test_what_another_compressor_or_size_made_starts_anew_with_a_warning(other: StateLayout):
    saved = filled(states(layout("a", "b")), "a", "b").state_dict()
    loaded = filled(states(other, layout("b")), "a", "b")
    with pytest.warns(
        UserWarning, match=r"of 1 of 2 parameters starts from nothing: 'a', saved by int8\(stochastic=true\), now"
    ):
        load(loaded, saved)
    assert torch.equal(only(loaded, "a"), only(states(other), "a"))
    assert only(loaded, "b").tolist() == [100, 101]


# Slots and pieces


def both_slots(*, first: Compressor = INT8) -> CompressorStates:
    whole, cut = layout("a", compressor=first, sizes=(16,)), pieces(8, slot=1)
    return CompressorStates({(0, 0): whole, (0, 1): cut}, CPU, 7)


def test_each_slot_takes_back_its_own():
    saved = both_slots()
    saved.of(0, 0).fill_(1)
    saved.of(0, 1).fill_(2)
    loaded, followed = both_slots(), both_slots()
    load(loaded, saved.state_dict())
    followed.take_over(saved)
    for kept in (loaded, followed):
        assert kept.of(0, 0).tolist() == [1, 1]
        assert kept.of(0, 1).tolist() == [2, 2]


def test_a_stream_goes_on_only_on_a_rank_that_draws_the_same():
    saved = filled(states(layout("a", place=1)), "a").state_dict()
    same_place, other_place = states(layout("a", place=1)), states(layout("a"))
    load(same_place, saved)
    assert only(same_place, "a").tolist() == [0, 1]
    with pytest.warns(UserWarning, match="starts from nothing"):
        load(other_place, saved)
    assert torch.equal(other_place.of(0), states(layout("a")).of(0))


def test_ranks_with_the_same_place_compare_what_they_remember_and_others_do_not():
    twin, other = states(layout("a")), states(layout("a", place=1))
    assert twin.shared().keys() == states(layout("a")).shared().keys()
    assert not twin.shared().keys() & other.shared().keys()


def test_another_place_of_a_parameter_starts_its_own_stream():
    """Two places that drew alike would round alike."""
    loaded = states(pieces(0))
    with pytest.warns(UserWarning, match=r"starts from nothing: 'a', saved by int8\(stochastic=true\), now int8"):
        load(loaded, filled(states(pieces(8)), "a").state_dict())
    assert torch.equal(loaded.of(0), states(pieces(0)).of(0))


def test_a_second_slot_is_no_loss_where_there_was_none():
    loaded = both_slots()
    load(loaded, filled(states(layout("a", sizes=(16,))), "a").state_dict())
    assert loaded.of(0, 0).tolist() == [0, 1]
    assert torch.equal(loaded.of(0, 1), both_slots().of(0, 1))
