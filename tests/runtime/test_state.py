"""What compressors remember: streams of their own, and states that only what made them takes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.compressors.randomness import key_of
from fxcomp.errors import BadState
from fxcomp.runtime.compressor_states import CompressorStates, StateLayout

CPU = torch.device("cpu")
INT8 = parse_compressor("int8(stochastic=true)")
POWERSGD = parse_compressor("powersgd(1)").bound_to([(6, 4), (3,)], 2)


def states(*layouts: StateLayout, seed: int = 7) -> CompressorStates:
    return CompressorStates(dict(enumerate(layouts)), CPU, seed)


def layout(
    *names: str, compressor: Compressor = INT8, sizes: Sequence[int] = (), rank: int = 0, shard: int = 0
) -> StateLayout:
    sizes = sizes or [8] * len(names)
    return StateLayout(compressor, tuple(zip(names, sizes, strict=True)), rank, shard)


def filled(kept: CompressorStates, *names: str) -> CompressorStates:
    for number, name in enumerate(names):
        piece = kept.of_parameter(name)
        piece.copy_(100 * number + torch.arange(piece.numel()))
    return kept


def load(kept: CompressorStates, state: Mapping[str, Any]) -> None:
    kept.tell(kept.take_back([state]))


def same(one: CompressorStates, other: CompressorStates, *names: str) -> bool:
    return all(torch.equal(one.of_parameter(name), other.of_parameter(name)) for name in names)


def test_a_bucket_has_its_parameters_states_in_order():
    kept = filled(states(layout("a", "b")), "a", "b")
    assert kept.of_bucket(0).tolist() == [0, 1, 100, 101]
    kept.of_bucket(0).add_(1)
    assert kept.of_parameter("b").tolist() == [101, 102]


def test_streams_follow_from_seed_name_rank_and_shard():
    def key(**changes: object) -> int:
        name = changes.pop("name", "a")
        seed = changes.pop("seed", 7)
        return int(states(layout(name, **changes), seed=seed).of_parameter(name)[0])

    keys = [key(), key(name="b"), key(seed=8), key(rank=1), key(shard=1)]
    assert len(set(keys)) == len(keys)
    assert key() == key_of(key_of(7, "a"), 0)


def test_ranks_that_must_draw_alike_do():
    randomk = parse_compressor("randomk(0.5)")
    first, other = (states(layout("a", compressor=randomk, rank=rank)).of_bucket(0) for rank in (0, 1))
    assert torch.equal(first, other)


def test_each_segment_keeps_what_its_own_shape_asks_for():
    kept = states(layout("matrix", "vector", compressor=POWERSGD, sizes=(24, 3)))
    assert kept.of_parameter("matrix").numel() == 4
    assert kept.of_parameter("vector").tolist() == [0, 0, 0]
    assert kept.of_bucket(0).dtype is torch.float32


def test_other_buckets_take_each_parameters_own_state():
    saved = filled(states(layout("a", "b"), layout("c")), "a", "b", "c")
    loaded = states(layout("c", "a"), layout("b"))
    load(loaded, saved.state_dict())
    assert same(saved, loaded, "a", "b", "c")


def test_a_saved_state_is_a_copy():
    kept = filled(states(layout("a")), "a")
    saved = kept.state_dict()
    kept.of_bucket(0).zero_()
    assert saved["compressors"]["a"]["state"].tolist() == [0, 1]


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
        UserWarning, match=r"of 1 of 2 parameters starts anew: 'a', saved by int8\(stochastic=true\), now"
    ):
        load(loaded, saved)
    assert torch.equal(loaded.of_parameter("a"), states(other).of_parameter("a"))
    assert loaded.of_parameter("b").tolist() == [100, 101]


def test_a_state_from_before_there_were_compressors_starts_all_anew():
    loaded = filled(states(layout("a", "b")), "a", "b")
    with pytest.warns(UserWarning, match="2 of 2 parameters starts anew: 'a', saved by nothing, .* and others"):
        load(loaded, {})
    assert same(loaded, states(layout("a", "b")), "a", "b")


def _without_b(saved: dict[str, dict[str, object]]) -> None:
    del saved["b"]


def _shorter(saved: dict[str, dict[str, Tensor]]) -> None:
    saved["b"]["state"] = saved["b"]["state"][:1]


def _another_size(saved: dict[str, dict[str, int]]) -> None:
    saved["b"]["size"] = 9


@pytest.mark.parametrize("change", [_without_b, _shorter, _another_size])
def test_a_state_that_is_not_whole_is_refused_and_changes_nothing(change):
    state = filled(states(layout("a", "b")), "a", "b").state_dict()
    change(state["compressors"])
    kept = states(layout("a", "b"))
    before = kept.of_bucket(0).clone()
    with pytest.raises(BadState, match=r"does not match its own layout.*\n.*as state_dict\(\) returned it"):
        load(kept, state)
    assert torch.equal(kept.of_bucket(0), before)
