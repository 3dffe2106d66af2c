"""Collectives over parts of any size: what arrives on real ranks, in memory alone, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import nccl
from helpers.ranks import run_ranks
from torch import Tensor

from fxcomp.cluster.cluster import Level
from fxcomp.errors import BadTensor
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning.measure_links import TimedCollectives
from fxcomp.runtime.group import Work
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transfers import Cut, Pattern, Transfer, from_first
from fxcomp.runtime.transport import Groups, NullTransport, add_in_order

CPU = torch.device("cpu")

TYPES = (torch.uint8, torch.int8, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def groups(*, direct: bool = True) -> Groups:
    everyone = [list(range(dist.get_world_size()))]
    return Groups.create({"world": everyone}, ["main", "pool"], ["world"] if direct else [])


def brought(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's contribution: other numbers on each, small enough for every type."""
    return ((torch.arange(elements) * 3 + rank) % 7).to(dtype)


def expected(kind: str, cut: tuple[int, ...], me: int, dtype: torch.dtype) -> Tensor:
    ranks, whole, own = range(len(cut)), sum(cut), slice(sum(cut[:me]), sum(cut[: me + 1]))
    if kind in ("all_gather", "broadcast"):
        return torch.cat([brought(rank, cut[rank], dtype).view(-1) for rank in ranks])
    parts = [brought(rank, whole, dtype)[own] for rank in ranks]
    return torch.cat(parts) if kind in ("all_to_all", "gather") else sum(part.float() for part in parts).to(dtype)


def given(kind: str, cut: tuple[int, ...], me: int, dtype: torch.dtype) -> Tensor:
    return brought(me, cut[me] if kind in ("all_gather", "broadcast") else sum(cut), dtype)


def cuts(ranks: int) -> dict[str, list[tuple[int, ...]]]:
    uneven = tuple(range(5, 5 + ranks))
    first_empty, last_empty = (0, *uneven[1:]), (*uneven[:-1], 0)
    any_kind = [uneven, first_empty, last_empty, (4,) * ranks, (0,) * (ranks - 1) + (9,), (0,) * ranks]
    rooted = [from_first(6, ranks)]
    kinds = ("all_gather", "all_to_all", "reduce_scatter")
    return dict.fromkeys(kinds, any_kind) | dict.fromkeys(("gather", "reduce", "broadcast"), rooted)


def every_kind_cut_and_type() -> list[str]:
    """Launch everything, on both lanes, then wait in reverse; the launches whose results are wrong."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    for direct in (True, False):
        network = groups(direct=direct)
        rt = Runtime(network, CPU)
        for dtype in TYPES:
            flights: list[tuple[str, Any, Tensor]] = []
            for kind, of_kind in cuts(ranks).items():
                for number, cut in enumerate(of_kind):
                    value, name = given(kind, cut, me, dtype), f"{kind}_{number}"
                    right = expected(kind, cut, me, dtype)
                    flights.append((f"{name} {dtype}", rt.launch(name, kind, value, cut, "world"), right))
                    there = rt.d2h(f"{name}_host", value)
                    flights.append(
                        (f"{name} {dtype} pool", rt.launch(f"{name}_pool", kind, there, cut, "world"), right)
                    )
            for name, flight, right in reversed(flights):
                found = rt.wait(flight)
                found = found if isinstance(found, Tensor) else rt.h2d("back", found)
                if not torch.equal(found.float(), right.float()):
                    wrong.append(f"{name}: {found.tolist()} instead of {right.tolist()}")
            rt.forget_buffers()
        rt.finish()
        rt.close()
        assert network.is_idle
        network.give_up()
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_its_parts_whatever_their_sizes_and_type(ranks: int):
    assert run_ranks(ranks, every_kind_cut_and_type) == [[]] * ranks


def over_nccl() -> list[str]:
    with nccl.job_over("nccl", processor_is_accelerator=True):
        return every_kind_cut_and_type()


def test_every_rank_gets_its_parts_over_nccl():
    assert run_ranks(3, over_nccl) == [[]] * 3


def rooted_over_nccl() -> list[tuple[list[str], bool, list[float]]]:
    """For a broadcast and a reduce: torch's collectives that ran, if the input has stayed, and what has arrived."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    found: list[tuple[list[str], bool, list[float]]] = []
    with nccl.job_over("nccl", processor_is_accelerator=True):
        rt = Runtime(groups(), CPU)
        for kind in ("broadcast", "reduce"):
            cut = from_first(6, ranks)
            value, called = given(kind, cut, me, torch.float32), list[str]()
            before = value.clone()
            with ExitStack() as stack:
                for name in ("broadcast", "reduce", "all_to_all_single", "isend", "irecv"):
                    stack.enter_context(patch.object(dist, name, _counting(name, getattr(dist, name), called)))
                result = rt.wait(rt.launch(kind, kind, value, cut, "world"))
            assert isinstance(result, Tensor)
            found.append((called, torch.equal(value, before), result.tolist()))
    return found


def _counting(name: str, plain: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def counted(*arguments: Any, **keywords: Any) -> Any:
        called.append(name)
        return plain(*arguments, **keywords)

    return counted


def test_a_root_sends_and_gets_once_over_nccl():
    root, other = run_ranks(2, rooted_over_nccl)
    values = [0.0, 3.0, 6.0, 2.0, 5.0, 1.0]
    sums = [1.0, 7.0, 6.0, 5.0, 11.0, 3.0]
    assert root == [(["broadcast"], True, values), (["reduce"], True, sums)]
    assert other == [(["broadcast"], True, values), (["reduce"], True, [])]


def two_by_two() -> list[list[float]]:
    """Among two hosts of two ranks: this one's places, and what it gets at each level. Then every kind is timed."""
    levels = {"intra": [[0, 1], [2, 3]], "inter": [[0, 2], [1, 3]], "world": [[0, 1, 2, 3]]}
    network = Groups.create(levels, ["main"], ["intra", "inter"])
    rt, me = Runtime(network, CPU), dist.get_rank()
    found: list[list[float]] = [[network.place(level) for level in levels]]
    for level in ("intra", "inter"):
        value = torch.tensor([10.0 * me, 10.0 * me + 1, 10.0 * me + 2])
        for kind, cut, brought_here in (
            ("all_to_all", (1, 2), value),
            ("all_gather", (1, 2), value[: network.place(level) + 1]),
            ("reduce", (3, 0), value),
        ):
            result = rt.wait(rt.launch(f"{kind}_{level}", kind, brought_here, cut, level))
            assert isinstance(result, Tensor)
            found.append(result.tolist())
    timed = TimedCollectives(network, CPU)
    for kind in CollectiveKind:
        for level in (Level.INTER, Level.WORLD):
            assert timed(kind, level, 1000) > 0.0
            assert timed.trouble(kind) is None
    assert network.is_idle
    return found


def test_a_group_of_some_ranks_hands_over_by_its_own_places_and_every_kind_can_be_timed():
    found = run_ranks(4, two_by_two)
    assert [places for places, *_ in found] == [[0, 0, 0], [1, 0, 1], [0, 1, 2], [1, 1, 3]]
    assert found[0][1:] == [[0, 10], [0, 10, 11], [10, 12, 14], [0, 20], [0, 20, 21], [20, 22, 24]]
    assert found[3][1:] == [[21, 22, 31, 32], [20, 30, 31], [], [11, 12, 31, 32], [10, 30, 31], []]


def test_narrow_floats_are_added_in_fp32_and_rounded_once():
    parts = [torch.tensor([256.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])]
    out = torch.empty(2, dtype=torch.bfloat16)
    add_in_order([part.bfloat16() for part in parts], out)
    assert out.tolist() == [258.0, 6.0], "256 + 1 is 256 in bfloat16"
    wraps = torch.empty(1, dtype=torch.int8)
    add_in_order([torch.tensor([100], dtype=torch.int8)] * 2, wraps)
    assert wraps.tolist() == [-56]


# Without a network


class At(NullTransport):
    """No network, at a place of every group."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.own = place

    def place(self, level: str) -> int:  # noqa: ARG002
        return self.own


def launched(kind: str, value: Tensor, cut: Cut, place: int) -> list[float]:
    rt = Runtime(NullTransport(At(place)), CPU)
    result = rt.wait(rt.launch("a", kind, value, cut, "world"))
    assert isinstance(result, Tensor)
    return result.tolist()


def test_no_network_gives_own_values_in_the_shapes_of_a_real_one():
    three = torch.arange(1.0, 7.0)
    assert launched("all_gather", three[:2], 3, 1) == [1.0, 2.0] * 3
    assert launched("all_to_all", three, 3, 1) == [3.0, 4.0] * 3
    assert launched("reduce_scatter", three, 3, 1) == [3.0, 4.0]
    cut = (3, 1, 2)
    assert launched("all_gather", three[:2], cut, 2) == [0.0] * 4 + [1.0, 2.0]
    assert launched("all_to_all", three, cut, 2) == [5.0, 6.0] * 3
    assert launched("reduce_scatter", three, cut, 1) == [4.0]
    for place, root in enumerate([True, False, False]):
        assert launched("gather", three, from_first(6, 3), place) == three.tolist() * (3 * root)
        assert launched("reduce", three, from_first(6, 3), place) == three.tolist() * root
        brought_here = three if root else three[:0]
        assert launched("broadcast", brought_here, from_first(6, 3), place) == (three.tolist() if root else [0.0] * 6)


class Answering(At):
    """A network on which every rank brings sevens."""

    def start(self, transfer: Transfer) -> Work:
        transfer.out.fill_(7.0)
        return super().start(transfer)


def test_parts_of_other_sizes_stay_what_the_network_brought():
    """A decoder may refuse what no encoder made."""
    rt = Runtime(Answering(2), CPU)
    for network in (Answering(2), At(2)):
        rt.transport = network
        result = rt.wait(rt.launch("a", "all_gather", torch.tensor([1.0, 2.0]), (3, 1, 2), "world"))
        assert isinstance(result, Tensor)
        assert result.tolist() == [7.0] * 4 + [1.0, 2.0]


def test_a_broadcast_of_one_part_overwrites_it():
    rt = Runtime(NullTransport(), CPU)
    value = torch.ones(3)
    assert rt.wait(rt.launch("broadcast_buffers", "broadcast", value, 1, "world")) is value


# Refused


def test_what_does_not_fit_is_refused():
    rt = Runtime(NullTransport(), CPU)
    with pytest.raises(BadTensor, match="7 elements do not make 3 equal parts of all_to_all"):
        rt.launch("a", "all_to_all", torch.ones(7), 3, "world")
    with pytest.raises(BadTensor, match=r"all_to_all@world cut into \(3, 5\) has 7 elements going in and 6 coming out"):
        rt.launch("b", "all_to_all", torch.ones(7), (3, 5), "world")
    with pytest.raises(AssertionError, match="unknown collective 'all_to_some': there are all_reduce, all_gather"):
        rt.launch("c", "all_to_some", torch.ones(7), (3, 5), "world")
    whole = torch.ones(8)
    with pytest.raises(BadTensor, match="input and output of all_to_all@world share their storage"):
        NullTransport().start(Transfer(Pattern.ALL_TO_ALL, whole[:4], whole[4:], 2, "world"))
    with pytest.raises(BadTensor, match=r"all_gather@world has torch.float32 going in and torch.int8 coming out"):
        NullTransport().start(Transfer(Pattern.ALL_GATHER, whole, whole.to(torch.int8), 1, "world"))
    with pytest.raises(BadTensor, match="reduce_scatter@world is cut into 2 parts, for 3 ranks"):
        Transfer(Pattern.REDUCE_SCATTER, whole, torch.empty(4), 2, "world").parts(0, ranks=3)
