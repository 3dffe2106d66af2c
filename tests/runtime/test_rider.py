"""A digest rides on a collective of any type, kind and number of ranks, and leaves its values as they are."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fxcomp.runtime.buffers import Buffers
from fxcomp.runtime.rider import BITS, DIGEST_BYTES, ROOM, Rider
from fxcomp.runtime.transfers import Cut, Transfer
from fxcomp.runtime.transport import Launch

CPU = torch.device("cpu")


class Differs(Exception):
    """The digest was not the same on all ranks."""


class Done:
    def wait(self) -> None:
        return


class Others:
    """A network of ranks that bring ones, or payloads of sevens, and digests of their own."""

    def __init__(self, digests: list[int]) -> None:
        self._digests = digests

    def place(self, level: str) -> int:  # noqa: ARG002
        return 0

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Done:  # noqa: ARG002
        for digest in self._digests:
            bits = [digest >> place & 1 for place in BIT_ORDER]
            theirs = torch.cat([torch.ones(len(value) - ROOM), torch.tensor([*bits, *(1 - bit for bit in bits)])])
            theirs = theirs.to(value.dtype)
            value.copy_(torch.maximum(value, theirs) if how == "max" else value + theirs)
        return Done()

    def start(self, transfer: Transfer) -> Done:
        parts = transfer.parts(0)
        theirs = [transfer.value]
        for part, digest in zip(parts[1:], self._digests, strict=True):
            behind = torch.tensor(list(both(digest)), dtype=torch.uint8)
            theirs.append(torch.cat([torch.full((part - DIGEST_BYTES,), 7, dtype=torch.uint8), behind]))
        transfer.out.copy_(torch.cat(theirs))
        return Done()


def both(digest: int) -> bytes:
    return digest.to_bytes(4, "little") + (~digest & 0xFFFFFFFF).to_bytes(4, "little")


BIT_ORDER = [8 * byte + bit for byte in range(BITS // 8) for bit in range(7, -1, -1)]
"""The bytes from the lowest on, and in each the highest bit first."""


def riding(digest: int) -> Rider:
    def differs(level: str, late: int) -> None:
        raise Differs(level, late)

    rider = Rider(differs)
    rider.carry(digest)
    rider.begin(frozenset({"line"}))
    return rider


def ridden(rider: Rider, value: Tensor, others: list[int], kind: str, cut: Cut = 1, how: str = "sum") -> Tensor:
    buffers = Buffers()
    lent = buffers.take("value", value.numel(), value.dtype, CPU).copy_(value)
    launch = Launch("line", kind, cut, "world", how, "main")
    return rider.start(buffers, launch, lent, cast("Any", Others(others))).finish()


@pytest.mark.parametrize(
    ("dtype", "ranks", "how"),
    [
        (torch.float32, 2, "sum"),
        (torch.float64, 3, "max"),
        (torch.bfloat16, 300, "sum"),
        (torch.float16, 40, "sum"),
        (torch.int8, 100, "sum"),
    ],
    ids=str,
)
def test_an_all_reduce_tells_one_rank_of_any_number_that_differs_in_one_bit(dtype: torch.dtype, ranks: int, how: str):
    value, mine = torch.ones(5, dtype=dtype), 0xDEADBEEF
    alone = ridden(riding(mine), value, [mine] * (ranks - 1), "all_reduce", how=how)
    expected = torch.ones(5, dtype=dtype)
    for _ in range(ranks - 1):
        expected = torch.maximum(expected, value) if how == "max" else expected + value
    assert torch.equal(alone, expected)
    for place in (0, BITS - 1):
        for others in ([mine ^ 1 << place] * (ranks - 1), [mine] * (ranks - 2) + [mine ^ 1 << place]):
            with pytest.raises(Differs):
                ridden(riding(mine), value, others, "all_reduce", how=how)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cut", [3, (4, 0, 2), (4, 0, 0)], ids=str)
def test_a_gather_brings_its_parts_as_they_were_sent(dtype: torch.dtype, cut: Cut):
    value, mine, size = torch.arange(4).to(dtype), 12345, torch.empty(0, dtype=dtype).element_size()
    parts = cut if isinstance(cut, tuple) else (4,) * cut
    found = ridden(riding(mine), value, [mine, mine], "all_gather", cut)
    sevens = torch.full((size * sum(parts[1:]),), 7, dtype=torch.uint8)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), torch.cat([value.view(torch.uint8), sevens]))
    for others in ([mine + 1, mine], [mine, mine + 1], [mine + 1, mine + 1]):
        with pytest.raises(Differs):
            ridden(riding(mine), value, others, "all_gather", cut)


def test_a_digest_that_changes_on_all_ranks_is_no_difference():
    rider = riding(1)
    for digest in (1, 1, 2, 2, 3):
        rider.carry(digest)
        for kind in ("all_reduce", "all_gather"):
            ridden(rider, torch.ones(3), [digest], kind, 1 if kind == "all_reduce" else 2)


def test_what_lies_behind_a_part_of_a_buffer_is_left_alone():
    buffers, rider = Buffers(), riding(7)
    whole = buffers.take("value", 200, torch.float32, CPU).fill_(5.0)
    for part in (whole[:100], whole[50:150]):
        launch = Launch("line", "all_reduce", 1, "world", "sum", "main")
        rider.start(buffers, launch, part, cast("Any", Others([7]))).finish()
    assert torch.equal(whole, torch.full((200,), 5.0))


def test_what_comes_from_a_device_is_judged_two_steps_later():
    class Event:
        def synchronize(self) -> None:
            return

    rider = riding(1)
    launch = Launch("line", "all_reduce", 1, "world", "sum", "main")
    rider._late.append((rider._step, launch, torch.ones(ROOM), Event()))
    rider.begin(rider.carriers)
    with pytest.raises(Differs, match="2"):
        rider.begin(rider.carriers)
