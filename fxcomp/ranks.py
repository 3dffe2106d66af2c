"""Coordination of ranks: agreement during compilation, process groups, and equal initial values."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level, check_is_cluster
from fxcomp.cluster.link import Link
from fxcomp.errors import BadCall, BadOption, FxcompError, PeerFailed, RanksApart
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Device
from fxcomp.runtime.agree import Conversation, check_store
from fxcomp.runtime.members import Levels, Members
from fxcomp.runtime.presence import presence
from fxcomp.runtime.transport import Groups, NullTransport, Transport, given_back

T = TypeVar("T")

LOCAL_LINK = Link(alpha_us=30.0, gb_per_s=5.0)  # assumed: loopback; measurements replace it

WHAT_TO_DO = (
    "  Load a saved state on every rank (the model's, the optimizer's, and step.load_state_dict), or compile again on\n"
    "  every rank, for torch.compile after torch._dynamo.reset(): all then start from rank 0's parameters and buffers."
)

_met: dict[str, int] = defaultdict(int)
"""Number of meetings (compilations) so far, by name."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Place where a rank stopped after an error on any rank."""

    what: str
    cause: str
    """First error and its place."""
    step: int | None = None
    has_begun: bool = True
    """True if emitted code has run in `step`."""


def _next(what: str) -> str:
    number = _met[what]
    _met[what] += 1
    return f"{what}_{number}"


class Ranks:
    """Ranks of one compilation and of the compiled step. A single rank does not communicate."""

    def __init__(self, members: Members | None, root: Conversation | None, fits_links: bool):
        self.members = members
        """None on a single rank."""
        self.rank, self.world_size = (members.place, len(members)) if members else (0, 1)
        self.fits_links = fits_links
        self.stopped: Stop | None = None
        """Set while ranks may be at different steps or lines. No collective starts until they have reconnected."""
        self._root = root
        self._talk = root
        """Current or last exchange through the store."""
        self._talks = 0
        self._meetings = 0
        self._cluster: Cluster | None = None
        self._groups = Groups({})
        self._stops: Conversation | None = None
        weakref.finalize(self, self._groups.give_back).atexit = False

    @classmethod
    def join(cls, cluster: Cluster | None, what: str, group: Any = None) -> Ranks:
        """Connect the ranks of a process group (default: all). All ranks make the same number of calls per `what`.

        Raises BadCall and BadOption.
        """
        if not (dist.is_available() and dist.is_initialized()):
            _check_alone(cluster, group)
            _tell_who_trains_alone(what)
            return ALONE
        members = Members.of(group)
        if len(members) == 1:
            _check_size(cluster, 1)
            return cls(None, None, False)

        check_store(compat.default_store())
        what = members.key + what
        root = _conversation(what, members)
        _be_at(root, f"beginning {what}")
        while _talk(root, 1).was_missed:  # this rank failed earlier, and the others continued
            root = _conversation(what, members)
        return cls(members, root, cluster is None)

    @classmethod
    @contextmanager
    def meeting(cls, cluster: Cluster | None, what: str, group: Any = None) -> Generator[Ranks]:
        """Connect ranks, and run a block as `together` does. Release the process groups if the block fails."""
        ranks = cls.join(cluster, what, group)
        try:
            with ranks.together(what):
                ranks.attempt("checking the cluster", lambda: _check_size(cluster, ranks.world_size))
                yield ranks
        except BaseException:
            ranks.release()
            raise

    @classmethod
    def stay_away(cls, what: str, group: Any, error: BaseException) -> None:
        """Replace this rank's next `join`: report `error` to ranks that wait in the meeting `what`, now or later.

        Raises no FxcompError.
        """
        with suppress(FxcompError):
            root = cls.join(None, what, group)._root if dist.is_initialized() else None
            if root is not None:
                _talk(root, 1).give_up(what, error, lingers=True)

    @property
    def name(self) -> str:
        """Name of this compilation in the store, such as `compile_step_0`; empty for a single rank."""
        return "" if self._root is None else self._root.name

    @staticmethod
    def meetings() -> int:
        """Return the number of calls of `join` and `stay_away`."""
        return sum(_met.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """A note if other ranks of the job do not take part, else empty."""
        if self.members is None or self.members.is_whole_job:
            return ()
        return (f"gradients are averaged over {self.members}; the other ranks are left alone",)

    @property
    def numbers(self) -> Sequence[int]:
        return (0,) if self.members is None else self.members.numbers

    # Failure

    @contextmanager
    def together(self, what: str, *, after_a_stop: bool = False) -> Generator[None]:
        """Run a block on all ranks. An error on one rank is raised on all, with the first cause.

        After an error in an `attempt`, all ranks may continue. After any other error the failing rank stops: it writes
        the cause to the store and closes its connections, so that no rank waits for it in a collective. `after_a_stop`
        lets stopped ranks reconnect.
        """
        if self._root is None:
            yield
            return
        self._talks += 1
        talk, has_met_again = None, False
        try:
            talk = self._talk = _talk(self._root, self._talks)
            while talk.was_missed:
                self._talks += 1
                talk = self._talk = _talk(self._root, self._talks)
            has_met_again = self._meet(what, after_a_stop)
            yield
            talk.attempt(f"the end of {what}", lambda: None)
            talk.forget()
            _be_at(self._root, f"after {what}")
        except BaseException as error:
            if talk is not None and talk.knows(error) and not after_a_stop:
                raise
            (talk or _talk(self._root, self._talks)).give_up(what, error)
            if has_met_again:
                self.stopped = None  # stop here, not at the earlier place
            self.stop(what, error)
            if isinstance(error, PeerFailed) and self.stopped is not None:
                raise PeerFailed(self.stopped.cause) from None
            raise
        if has_met_again:
            self.stopped = None

    def stop(self, what: str, error: BaseException, *, step: int | None = None, has_begun: bool = True) -> None:
        """Stop this rank and publish the cause."""
        if self._root is None or self.stopped is not None:
            return
        root = self._root
        mine = root.described(what, error)
        first = compat.set_once(root.store, f"{root.name}/cause/{self._meetings}", mine)
        self.stopped = Stop(what, first, step, has_begun)
        self._stops = root.named(f"{root.name}/stopped/{self._meetings}")
        with suppress(Exception):  # the store may be gone
            self._stops.say("stopping", asdict(self.stopped))
        self._groups.give_up()

    def all_stops(self) -> list[Stop]:
        """Return the stops of all ranks, in rank order. Waits until all have stopped."""
        assert self._stops is not None, "this rank has not stopped"
        return [Stop(**stop) for stop in self._stops.hear("stopping", range(self.world_size))]

    def knows(self, error: BaseException) -> bool:
        """Return True if all ranks raise at the topic where this error was raised."""
        return self._talk is not None and self._talk.knows(error)

    def at_step(self, step: int | None) -> None:
        if self._root is None or self._root.presence is None:
            return
        if step is None:
            self._root.presence.steps.pop(self.name, None)
        else:
            self._root.presence.steps[self.name] = step

    def release(self) -> None:
        self._groups.give_back()

    def _meet(self, what: str, after_a_stop: bool) -> bool:
        """Return False if no rank has stopped. Otherwise reconnect and return True, or raise RanksApart."""
        everyone = self.gather(what, (self.stopped is not None, self._meetings, self._groups.lanes))
        stopped = [rank for rank, (has_stopped, _, _) in enumerate(everyone) if has_stopped]
        if not stopped:
            return False
        if not after_a_stop:
            raise RanksApart(f"{what} was called, but rank {stopped[0]} has stopped.\n{WHAT_TO_DO}")
        self.stopped = self.stopped or Stop(what, f"rank {stopped[0]} has stopped")
        self._groups.give_up()
        self._meetings = max(meetings for _, meetings, _ in everyone) + 1
        for lane in dict.fromkeys(lane for _, _, lanes in everyone for lane in lanes):
            self._make_groups(lane)
        return True

    # Agreement

    def attempt(self, topic: str, work: Callable[[], T]) -> T:
        """Run work, and report a failure to all ranks."""
        if self._talk is None:
            return work()
        done: list[T] = []
        self._talk.attempt(topic, lambda: done.append(work()))
        return done[0]

    def gather(self, topic: str, value: T) -> list[T]:
        """Return every rank's value (plain data), in rank order."""
        return [value] if self._talk is None else self._talk.attempt(topic, lambda: value)

    def from_rank_0(self, topic: str, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0, and return the result (plain data) on all ranks."""
        return work() if self._talk is None else self._talk.from_rank_0(topic, work)

    def check_same(self, topic: str, facts: dict[str, Any]) -> None:
        """Raise ReplicasDiffer unless all ranks pass the same facts."""
        if self._talk is not None:
            self._talk.check_same(topic, facts)

    def tell(self, what: str, value: T, members: Sequence[int], place: str) -> dict[int, T]:
        """Exchange plain data between `members`, which all call it. Returns values by global rank.

        `place` identifies the exchange. It must be equal on these ranks, and unique until ranks reconnect.
        """
        assert self._root is not None, "a rank that is alone has no other rank to reach"
        numbers = tuple(self.numbers[rank] for rank in members)
        some = Members(numbers, list(members).index(self.rank), self._root.members.job_ranks)
        talk = self._root.named(f"{self._root.name}/said/{self._meetings}/{place}/{numbers[0]}", some)
        return dict(zip(numbers, talk.attempt(what, lambda: value), strict=True))

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values to all ranks, as DistributedDataParallel does. Call after `transport`."""
        if self._root is None:
            return
        with torch.no_grad():
            for tensor in tensors:
                own = tensor.data[tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())]  # once each
                sent = own.resolve_conj().resolve_neg().contiguous()
                # Not in the user's default group, which stays open if a rank fails.
                self._groups.broadcast(sent.view(-1).view(torch.uint8), 0, Level.WORLD.value, "main").wait()
                if sent is not own:
                    own.copy_(sent)

    # Network

    def cluster_of(self, given: Cluster | None) -> Cluster:
        """Return the given cluster, or derive one from host names, with links that are assumed until measured."""
        if given is not None:
            return given
        if self._talk is None:
            return Cluster(1, 1, intra=LOCAL_LINK, inter=LOCAL_LINK)
        names = self._talk.attempt("naming hosts", compat.host_name)
        return Cluster.placed(_places(names), intra=LOCAL_LINK, inter=LOCAL_LINK)

    def transport(self, cluster: Cluster) -> Transport:
        """Create process groups, for measurements before planning."""
        if self._root is None:
            return NullTransport()
        self._cluster = cluster
        self._make_groups("main")
        return self._groups

    def extend(self, transport: Transport, plan: Plan) -> Transport:
        """Add the CPU pool's process groups, if a plan needs them."""
        offloads = any(Device.CPU in bucket.strategy.devices for bucket in plan.buckets)
        if offloads and transport is self._groups and "pool" not in self._groups.lanes:
            self._make_groups("pool")
        return transport

    def _make_groups(self, lane: str) -> None:
        assert self._cluster is not None, "groups are of a cluster"
        assert self.members is not None, "a rank that is alone needs no groups"
        assert self._talk is not None, "groups are made in a conversation"
        members = self.members
        levels, direct = members.levels(_levels(self._cluster)), _direct(self._cluster)
        name = members.group_names(f"{self._talk.name} {lane}")
        made: list[Groups] = []
        for close in self.attempt(f"process groups, {lane}", lambda: given_back(members)):
            close()
        self.attempt(
            f"making process groups, {lane}",
            lambda: made.append(Groups.create(levels, [lane], direct, members, name)),
        )
        self._groups.add(made[0])


def cluster_of_group(group: Any = None, *, intra: Link = LOCAL_LINK, inter: Link = LOCAL_LINK) -> Cluster:
    """Return the cluster of a live process group, with the ranks of `group` (default: all) in group order.

    Every rank of the group calls it. Ranks exchange host names through the store. `intra` and `inter` are the links
    inside and between hosts, assumed by default; `compile_step` without `cluster=` measures links. The topology of a
    group that shares links with others is
    `cluster_of_group().topology_of(torch.distributed.get_process_group_ranks(group))`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise BadCall(
            "torch.distributed is not initialised in this process, so there is no group to describe.\n"
            "  Call torch.distributed.init_process_group first, or write the cluster: fxcomp.Cluster.parse('8x4', ...)."
        )
    members = Members.of(group)
    talk = _conversation(f"hosts of {','.join(map(str, members.numbers))}", members)
    return Cluster.placed(_places(talk.attempt("naming hosts", compat.host_name)), intra=intra, inter=inter)


ALONE = Ranks(None, None, False)


def _conversation(what: str, members: Members) -> Conversation:
    return Conversation(compat.default_store(), _next(what), members, compat.group_timeout(), presence())


def _be_at(root: Conversation, place: str) -> None:
    if root.presence is not None:
        root.presence.doing = place


def _talk(root: Conversation, number: int) -> Conversation:
    return root.named(f"{root.name}/{number}")


def _places(names: Sequence[str]) -> list[int]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def _check_alone(cluster: Cluster | None, group: Any) -> None:
    """Raise BadCall if the cluster has several ranks or a group is given."""
    check_is_cluster(cluster)
    if cluster is not None and cluster.world_size > 1:
        raise BadCall(
            f"the cluster has {cluster.world_size} ranks, but torch.distributed is not initialised in this"
            " process.\n  Call torch.distributed.init_process_group first (torchrun sets its variables), or use"
            " fxcomp explain to ask about a cluster that is not here."
        )
    if group is not None:
        raise BadCall(
            "process_group= was given, but torch.distributed is not initialised in this process.\n"
            "  Call torch.distributed.init_process_group first."
        )


def _tell_who_trains_alone(what: str) -> None:
    """Warn if a launcher started several processes, because each would train alone."""
    started = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if started not in ("0", "1"):
        text = f"fxcomp: a launcher has started {started} processes, but torch.distributed is not initialised:"
        warnings.warn(f"{text} this one works for itself. Call init_process_group before {what}.", stacklevel=4)


def _check_size(cluster: Cluster | None, world_size: int) -> None:
    check_is_cluster(cluster)
    if cluster is not None and cluster.world_size != world_size:
        raise BadOption(
            f"the cluster {cluster.shape} has {cluster.world_size} ranks, the process group has {world_size}"
        )


def _direct(cluster: Cluster) -> list[str]:
    """Return the levels whose ranks do not share a link."""
    alone = cluster.hosts == 1 or cluster.ranks_per_host == 1
    return [level.value for level in Level if level is not Level.WORLD or alone]


def _levels(cluster: Cluster) -> Levels:
    """Return the groups of each level with several ranks, in the same order on every rank."""
    flat = (Level.INTRA, Level.INTER, Level.WORLD)
    levels = list(Level) if cluster.has_racks and cluster.is_even else flat
    return {level.value: list(cluster.groups(level)) for level in levels if cluster.ranks_at(level) > 1}
