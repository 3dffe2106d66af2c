"""Collectives over process groups. `Launch` starts the collective of an emitted line, `Flight` waits for it."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.errors import LostTouch
from fxcomp.runtime.group import Done, Group, Work, raise_if_lost
from fxcomp.runtime.members import Levels, Members
from fxcomp.runtime.transfers import Cut, Pattern, Transfer, pattern_of

_dist = cast("Any", dist)  # partly untyped


class Transport(Protocol):
    """The runtime's network. `level` is intra, inter or world; `lane` is the launching thread, main or pool."""

    def place(self, level: str) -> int:
        """Return this rank's index in its group of `level`."""
        ...

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:
        """Reduce `value` over the ranks in place; `how` is "sum", "avg" or "max"."""
        ...

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:
        """Broadcast `value` from rank `source`, in place."""
        ...

    def start(self, transfer: Transfer) -> Work:
        """Start a transfer. A reduce_scatter adds in rank order on the CPU, and in the backend's order elsewhere."""
        ...

    def settle(self) -> None:
        """Wait for every collective in flight. All ranks must have launched them."""
        ...


class Groups:
    """Collectives over torch.distributed process groups, one for each level and lane.

    Lanes need separate groups, because the two threads launch collectives in no fixed order.
    """

    def __init__(self, groups: Mapping[tuple[str, str], Group], numbers: Sequence[int] = ()):
        self._groups = dict(groups)
        self.numbers = numbers
        if groups:
            _open.add(self)

    @classmethod
    def create(
        cls,
        levels: Levels,
        lanes: Sequence[str],
        direct: Collection[str],
        members: Members | None = None,
        name: int | None = None,
    ) -> Groups:
        """Create the groups. Every rank in `members` calls `create` with the same arguments.

        `levels` lists each level's groups, as ranks of the job. Groups are named by consecutive numbers from `name`.
        At the levels in `direct`, an all_gather may send directly between all pairs of ranks. At the other levels,
        ranks share a link, over which a ring sends fewer bytes.
        """
        mine: dict[tuple[str, str], Group] = {}
        members = members or Members.of()
        me, timeout = members.numbers[members.place], compat.group_timeout()
        for lane in lanes:
            for level, lists in levels.items():
                for ranks in lists:
                    backend = "gloo" if lane == "pool" else None
                    try:
                        handle = compat.new_group(list(ranks), backend, timeout, name)
                    except RuntimeError as error:
                        raise_if_lost(error, "another rank")
                        raise
                    name = None if name is None else name + 1
                    if me in ranks:
                        backends = compat.backend_names(handle)
                        is_direct = level in direct and backends.get("cpu") == "gloo"
                        mine[level, lane] = Group(handle, tuple(ranks), ranks.index(me), is_direct, backends)
        return cls(mine, members.numbers)

    def place(self, level: str) -> int:
        return self._groups[level, self.lanes[0]].place

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:
        group = self._groups[level, lane]
        op = {"avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}.get(how, dist.ReduceOp.SUM)
        if how == "avg" and not group.is_over_nccl(value.device):
            value.mul_(1 / len(group.ranks))
            op = dist.ReduceOp.SUM
        return group.start(_dist.all_reduce, value, op)

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:
        group = self._groups[level, lane]
        return group.start(dist.broadcast, value, self.numbers[source])

    def start(self, transfer: Transfer) -> Work:
        group = self._groups[transfer.level, transfer.lane]
        parts = transfer.parts(group.place, len(group.ranks))
        match transfer.pattern:
            case Pattern.ALL_GATHER:
                return _gathered(group, transfer, parts)
            case Pattern.ALL_TO_ALL:
                return _exchanged(group, transfer, parts)
            case Pattern.REDUCE_SCATTER:
                return _scattered(group, transfer, parts)

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lane for _, lane in self._groups))

    def group(self, level: str, lane: str) -> tuple[Any, tuple[int, ...]]:
        """Return the process group and its ranks, for collectives outside any step."""
        found = self._groups[level, lane]
        return found.live, found.ranks

    def add(self, other: Groups) -> None:
        _open.add(self)
        self._groups.update(other._groups)
        self.numbers = other.numbers

    @property
    def nccl_devices(self) -> set[str]:
        backends = [group.backends for group in self._groups.values()]
        return {device for each in backends for device, name in each.items() if name == "nccl"}

    @property
    def is_idle(self) -> bool:
        return not any(group.under_way for group in self._groups.values())

    def settle(self) -> None:
        for group in self._groups.values():
            for flying in list(group.under_way):
                flying.wait()

    def give_up(self) -> None:
        """Close the groups' connections, so that other ranks in a collective get an error at once."""
        _open.discard(self)
        handles = [group.give_up() for group in self._groups.values() if group.handle is not None]
        compat.destroy_groups(handles)

    def give_back(self) -> None:
        """Close busy groups at once. Close idle groups in `given_back`, because a device or another rank may still run
        their last collective.
        """
        world = compat.world()
        if world is None or not self.is_idle:
            self.give_up()
        elif self in _open and self not in _given_back:
            _given_back[self] = weakref.finalize(world, self.give_up)
            # Not at exit: connections end with the process, and modules needed to close them may be gone.
            _given_back[self].atexit = False


_open = weakref.WeakSet[Groups]()
_given_back: dict[Groups, weakref.finalize[..., Any]] = {}
"""Finalizers that close groups when the same ranks create new ones, or when the default process group is destroyed."""


def given_back(members: Members) -> list[Callable[[], object]]:
    """Return functions that close the unused groups of `members`.

    Call the functions after all members have called `given_back`, because no device then runs a collective of these
    groups.
    """
    if _open:
        gc.collect()  # an unused step in a reference cycle may still hold its groups
    taken = [groups for groups in list(_given_back) if set(groups.numbers) <= set(members.numbers)]
    for device in {device for groups in taken for device in groups.nccl_devices}:
        compat.synchronize(torch.device(device))
    return [_given_back.pop(groups) for groups in taken]


def _gathered(group: Group, transfer: Transfer, parts: tuple[int, ...]) -> Work:
    value, out = _as_bytes(transfer.value), _as_bytes(transfer.out)
    is_even = len(set(parts)) == 1
    root = None if is_even else _root(group, value, parts)
    if root is not None:
        if group.place == root:
            out.copy_(value)
        return group.start(dist.broadcast, out, group.ranks[root])
    if value.device.type != "cpu":
        if not is_even:
            return _dealt(group, value.repeat(len(parts)), out, (len(parts) * (value.numel(),), parts))
    elif group.is_direct or not is_even:
        received = torch.split_with_sizes(out, parts)
        received[group.place].copy_(value)
        return group.exchange([value] * len(parts), received)
    return group.start(compat.all_gather, out, value)


def _exchanged(group: Group, transfer: Transfer, parts: tuple[int, ...]) -> Work:
    value, out, own = _as_bytes(transfer.value), _as_bytes(transfer.out), parts[group.place]
    if value.device.type != "cpu":
        return _dealt(group, value, out, (parts, (own,) * len(parts)))
    sent, received = torch.split_with_sizes(value, parts), out.view(len(parts), own).unbind()
    received[group.place].copy_(sent[group.place])
    return group.exchange(sent, received)


def _scattered(group: Group, transfer: Transfer, parts: tuple[int, ...]) -> Work:
    """Sum each part on its owner: on a device by reduce_scatter or reduce if possible, otherwise in rank order.

    Only one rank sums a part, so all ranks get the same bits. gloo's own reduce_scatter is an all_reduce, which takes
    2.4 times as long (2026-11).
    """
    value, out = transfer.value.view(-1), transfer.out.view(-1)
    is_even, is_summed = len(set(parts)) == 1, not _is_float8(value)
    root = None if is_even or not is_summed else _root(group, value, parts)
    if root is not None:
        if group.place == root:
            value = out.copy_(value)  # NCCL leaves the other ranks' inputs unchanged
        return group.start(_dist.reduce, value, group.ranks[root])
    if value.device.type != "cpu" and is_even and is_summed:
        return group.start(compat.reduce_scatter, out, value)
    elements = len(parts) * out.numel()
    arrived = out.new_empty(elements) if transfer.memory is None else transfer.memory(elements)
    terms = list(arrived.view(len(parts), out.numel()).unbind())

    def finish() -> None:
        add_in_order(terms, out)

    if value.device.type != "cpu":
        return _dealt(group, _as_bytes(value), _as_bytes(arrived), (parts, (out.numel(),) * len(parts)), finish)
    sent = torch.split_with_sizes(value, parts)
    terms[group.place] = sent[group.place]  # the local part needs no copy
    return group.exchange([*map(_as_bytes, sent)], [*map(_as_bytes, terms)], finish)


def _root(group: Group, value: Tensor, parts: Sequence[int]) -> int | None:
    """Return the index of the only rank that owns elements, if the backend is NCCL; else None.

    With NCCL's reduce and broadcast, ranks forward bytes, so the root's link transfers each byte once. gloo's reduce
    is not used, because it overwrites inputs.
    """
    owners = [place for place, own in enumerate(parts) if own]
    return owners[0] if len(owners) == 1 and group.is_over_nccl(value.device) else None


def add_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sum the ranks' parts into `out`, in rank order. Floats narrower than fp32 accumulate in fp32."""
    first, *others = parts
    if out.is_floating_point() and out.element_size() < 4:
        total = first.to(torch.float32, copy=True)
        for part in others:
            total.add_(part.float())
        out.copy_(total)
    elif others:
        torch.add(first, others[0], out=out)
        for part in others[1:]:
            out.add_(part)
    else:
        out.copy_(first)


def _dealt(
    group: Group,
    value: Tensor,
    out: Tensor,
    sizes: tuple[Sequence[int], Sequence[int]],
    finish: Callable[[], object] | None = None,
) -> Work:
    """Run all_to_all; `sizes` holds the elements sent to, and received from, each rank."""
    going, coming = map(list, sizes)
    return group.start(_dist.all_to_all_single, out, value, coming, going, finish=finish)


def _as_bytes(value: Tensor) -> Tensor:
    """Flatten a tensor, and view float8, which gloo lacks, as bytes."""
    flat = value.view(-1)
    return flat.view(torch.uint8) if _is_float8(flat) else flat


def _is_float8(value: Tensor) -> bool:
    return value.is_floating_point() and value.element_size() == 1


class NullTransport:
    """Transport without a network, for timing: collectives finish at once with this rank's own values.

    `place` returns this rank's index in `network`, or 0 if `network` is None.
    """

    def __init__(self, network: Transport | None = None) -> None:
        self._network = network

    def place(self, level: str) -> int:
        return 0 if self._network is None else self._network.place(level)

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:  # noqa: ARG002
        return Done()

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:  # noqa: ARG002
        return Done()

    def start(self, transfer: Transfer) -> Work:
        """Copy this rank's part to all output parts of the same size.

        Output parts of another size keep the payloads of an earlier step. Run a step over the network first: in a new
        buffer these parts are zero, and some decoders reject zeros (top-k needs distinct indices).
        """
        place = self.place(transfer.level)
        parts = transfer.parts(place)
        value, out = transfer.value.view(-1), transfer.out.view(-1)
        if transfer.pattern is Pattern.ALL_GATHER:
            own, taken = value, torch.split_with_sizes(out, parts)
        else:
            own, taken = torch.split_with_sizes(value, parts)[place], out.view(-1, parts[place] or 1).unbind()
        for part in taken:
            if part.numel() == own.numel():
                part.copy_(own)
        return Done()

    def settle(self) -> None:
        return


Take = Callable[[str, int, torch.dtype, torch.device], Tensor]


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    """Name of the line, with the bucket's number: `all_gather_3_int4`."""
    kind: str
    cut: Cut
    level: str
    how: str
    lane: str
    rides: Callable[[Launch, Tensor, Transport], Flight] | None = None
    """Starts the collective with a digest attached (`runtime/rider.py`); None to send no digest."""

    def start(self, value: Tensor, transport: Transport, take: Take) -> Flight:
        try:
            if self.rides is not None:
                return self.rides(self, value, transport)
            output, work = self._started(value, transport, take)
        except LostTouch as lost:
            raise self.told(lost) from None
        return Flight(self, output, work)

    def _started(self, value: Tensor, transport: Transport, take: Take) -> tuple[Tensor, Work]:
        if self.kind == "all_reduce":
            return value, transport.all_reduce(value, self.level, self.lane, self.how)
        if self.kind == "broadcast" and self.cut == 1:
            return value, transport.broadcast(value, 0, self.level, self.lane)
        pattern = pattern_of(self.kind)
        parts = pattern.parts(self.cut, value.numel())
        _, elements = pattern.elements(parts, transport.place(self.level))
        out = take(self.name, elements, value.dtype, value.device)

        def memory(elements: int) -> Tensor:
            return take(f"{self.name}_parts", elements, value.dtype, value.device)

        return out, transport.start(Transfer(pattern, value, out, self.cut, self.level, self.lane, memory))

    def told(self, lost: LostTouch) -> LostTouch:
        number = re.search(r"_(\d+)", self.name.removeprefix(self.kind))
        bucket = f" of bucket {number[1]}" if number else ""
        return LostTouch(f"{self.kind}@{self.level}{bucket} did not end (line {self.name}): {lost}")


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective in flight. `output` is valid after waiting for `work` and calling `arrived`, if set."""

    launch: Launch
    output: Tensor
    work: Work
    arrived: Callable[[], None] | None = None

    def finish(self) -> Tensor:
        try:
            self.work.wait()
        except LostTouch as lost:
            raise self.launch.told(lost) from None
        if self.arrived is not None:
            self.arrived()
        return self.output
