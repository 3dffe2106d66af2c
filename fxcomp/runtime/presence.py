"""Let other ranks see that this process is alive, and where it is: a socket that closes when the process ends.

A rank that waits for another one's answer connects to it. The kernel of the other's machine closes the connection when
that process ends, however it ends, so there is no heartbeat that could be late and no alarm that could be false: a
process that computes for an hour holds its connection open. Each time that it is asked, a thread here says where the
process is, as soon as Python lets it, and so whether it can still come.

    waits for rank 2's answer ── connects ──► rank 2's thread: {"doing": "capturing the step", "steps": {...}}
                              ◄── closed ──── rank 2's kernel, as its process has ended

There is one socket and one thread for each default process group, as long as that lives.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fxcomp import compat

ASK = b"?"
END = b"\n"

_REACHED = set[str]()
"""Other machines that have let a connection in: where one of them refuses, the process has ended."""


@dataclass(slots=True)
class Whereabouts:
    """Where this process is, for whoever asks."""

    doing: str = ""
    steps: dict[str, int] = field(default_factory=dict[str, int])
    """The step that it has entered last, of each thing that was compiled; by its ranks' name."""

    def to_json(self) -> bytes:
        return json.dumps({"doing": self.doing, "steps": dict(self.steps)}).encode() + END


class Presence:
    """A socket that is open as long as this process lives."""

    def __init__(self, host: str) -> None:
        self.place = Whereabouts()
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=4096)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._asking = set[socket.socket]()
        self._is_open = True
        self.address = host, int(self._listener.getsockname()[1]), compat.host_name()
        self._thread = threading.Thread(target=self._serve, name="fxcomp-presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and with it all connections."""
        self._is_open = False
        with suppress(OSError):
            self._wake.send(ASK)

    def forget(self) -> None:
        """Close a forked child's copies: it would seem that the parent lives on."""
        for each in (self._listener, self._wake, self._woken, *self._asking):
            each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as waiting:
            for each in (self._listener, self._woken):
                waiting.register(each, selectors.EVENT_READ)
            while self._is_open:
                for key, _ in waiting.select():
                    self._serve_one(key.fileobj, waiting)
        self.forget()  # not where something was raised: the others would take this process for dead

    def _serve_one(self, ready: Any, waiting: selectors.BaseSelector) -> None:
        if ready is self._listener:
            with suppress(OSError):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._asking.add(connection)
                waiting.register(connection, selectors.EVENT_READ)
        elif ready is not self._woken and not self._answers(ready):
            waiting.unregister(ready)
            self._asking.discard(ready)
            ready.close()

    def _answers(self, asking: socket.socket) -> bool:
        """Say where this process is; False for a connection that has ended."""
        try:
            asked = asking.recv(64)
            return bool(asked) and asking.send(self.place.to_json()) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False


class Sight:
    """A connection to another rank's process, made while it is waited for."""

    def __init__(self, address: tuple[str, int, str]) -> None:
        self.place = Whereabouts()
        """Where it was when it last said so."""
        self._host, self._port, self._host_name = address
        self._socket: socket.socket | None = None
        self._said = b""

    def has_gone(self) -> bool:
        """Return whether the process has ended, as far as this machine can see; asks where it is if it has not."""
        try:
            self._socket = self._socket or self._connected()
            if self._socket is None:
                return False
            while part := self._socket.recv(4096):
                self._said += part
            return True
        except BlockingIOError:
            self._hear()
            return self._ask()
        except ConnectionRefusedError:  # by the machine, as nobody listens there any more; or by a firewall
            return self._host_name in (compat.host_name(), *_REACHED)
        except ConnectionError:
            return True
        except OSError:  # nobody answers at that address: that tells nothing of the process
            self.close()
            return False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket | None:
        if self._host.startswith("127.") and self._host_name != compat.host_name():
            return None  # another machine's own address, which here is this one's
        made = socket.create_connection((self._host, self._port), timeout=1.0)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):  # a machine may go, too
            if hasattr(socket, option):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        made.setblocking(False)
        _REACHED.add(self._host_name)
        return made

    def _ask(self) -> bool:
        try:
            assert self._socket is not None
            self._socket.send(ASK)
        except BlockingIOError:
            pass
        except ConnectionError:
            return True
        return False

    def _hear(self) -> None:
        *lines, self._said = self._said.split(END)
        if lines:
            with suppress(ValueError, TypeError):
                self.place = Whereabouts(**json.loads(lines[-1]))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(host: str | None) -> str:
    """Find this machine's address as seen from the store's machine, which every rank can reach."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host or "127.0.0.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


_current: tuple[weakref.ref[Any], Presence | None] | None = None


def presence() -> Presence | None:
    """Return the presence of this process in the default process group; None where no socket can be had."""
    global _current
    world = compat.default_group()
    if _current is None or _current[0]() is not world:
        if _current is not None and _current[1] is not None:
            _current[1].close()
        fresh: Presence | None = None
        with suppress(OSError):
            fresh = Presence(_own_address(compat.store_host()))
            # Not at the end of a job: the kernel closes it, and the others learn of it then.
            weakref.finalize(world, fresh.close).atexit = False
        _current = weakref.ref(world), fresh
    return _current[1]


def _forget() -> None:
    global _current
    if _current is not None and _current[1] is not None:
        _current[1].forget()
    _current = None


os.register_at_fork(after_in_child=_forget)

WATCHED = 32
"""The number of missing ranks that each waiting rank looks for. Other ranks look for the others, and tell all."""


class Peers:
    """The other ranks of one thing that was compiled, as processes.

    `name` is what all ranks call it; `numbers` are the job's, of the ranks.
    """

    def __init__(self, name: str, numbers: Sequence[int], mine: Presence | None) -> None:
        self.name, self._numbers, self._mine = name, numbers, mine
        self._store = compat.default_store()

    @classmethod
    def of(cls, name: str, numbers: Sequence[int]) -> Peers:
        """Let the others find this process, and find them."""
        mine = presence()
        found = cls(name, numbers, mine)
        if mine is not None:
            with suppress(Exception):  # a store that has gone is told by whoever reads it
                found._store.set(_key(compat.rank_in_job()), json.dumps(mine.address))
        return found

    @property
    def place(self) -> Whereabouts:
        """The place of this process, told to those who ask."""
        return self._mine.place if self._mine is not None else Whereabouts()

    def at(self, doing: str) -> None:
        """Say what this process does."""
        self.place.doing = doing

    def at_step(self, step: int | None) -> None:
        """Say which step this rank is in; None where it has left one by an error."""
        if step is None:
            self.place.steps.pop(self.name, None)
        else:
            self.place.steps[self.name] = step

    def inquire(self) -> Inquiry:
        """Begin to ask after some of them."""
        return Inquiry(self._address, self._why_never)

    def _address(self, rank: int) -> tuple[str, int, str] | None:
        key = _key(self._numbers[rank])
        if not self._store.check([key]):
            return None
        host, port, name = json.loads(self._store.get(key))
        return host, port, name

    def _why_never(self, rank: int, theirs: Whereabouts) -> str | None:
        """Say why a rank that lives will not come: it waits for this one inside a later step."""
        mine, step = self.place.steps.get(self.name), theirs.steps.get(self.name)
        if step is None or mine is None or step <= mine:
            return None
        return f"rank {self._numbers[rank]} is in step {step}, where it waits for the others"


class Inquiry:
    """Asks after missing ranks for as long as one wait lasts."""

    def __init__(
        self, address: Callable[[int], tuple[str, int, str] | None], why_never: Callable[[int, Whereabouts], str | None]
    ) -> None:
        self._address, self._why_never = address, why_never
        self._sights: dict[int, Sight] = {}

    def gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """List those whose processes have ended, with what they did when they were seen last."""
        return {rank: sight.place.doing for rank, sight in self._seen(ranks) if sight.has_gone()}

    def never(self, ranks: Iterable[int]) -> dict[int, str]:
        """List those that live and cannot come, with the reason; `gone` has asked them."""
        whys = {rank: self._why_never(rank, sight.place) for rank, sight in self._seen(ranks)}
        return {rank: why for rank, why in whys.items() if why is not None}

    def close(self) -> None:
        for sight in self._sights.values():
            sight.close()
        self._sights.clear()

    def _seen(self, ranks: Iterable[int]) -> Iterable[tuple[int, Sight]]:
        for rank in list(ranks)[:WATCHED]:
            if rank not in self._sights and (address := self._address(rank)) is not None:
                self._sights[rank] = Sight(address)
            if rank in self._sights:
                yield rank, self._sights[rank]


def _key(number: int) -> str:
    return f"presence/{number}"
