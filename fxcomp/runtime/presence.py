"""Let other ranks see that this process is alive, and where it is: a socket that closes when the process ends.

A rank that waits for another one's answer connects to it. The kernel of the other's machine refuses the connection once
that process has ended, however it ended, so there is no heartbeat that could be late and no alarm that could be false:
the kernel also accepts connections for a process that computes for an hour. A thread of the process answers each one
with its place, as soon as Python lets it.

    waits for rank 2's answer ── connects ──► rank 2's thread: {"doing": "capturing the step", "steps": {...}}
                              ◄── refused ─── rank 2's kernel, as its process has ended

There is one socket and one thread for each default process group, as long as that lives.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from fxcomp import compat

CONNECT_S, ANSWER_S = 1.0, 0.05
"""Time to wait for a connection, and for the answer of a process that may be busy."""

Address = tuple[str, int, str]
"""A host's address, a port, and the name of the machine."""

_REACHED = set[str]()
"""Other machines that have let a connection in: if one of them refuses, the process has ended."""


class Presence:
    """A socket that is open as long as this process lives."""

    def __init__(self, host: str) -> None:
        self.doing = ""
        self.steps: dict[str, int] = {}
        """The last step entered of each thing that was compiled, by the name of its first conversation."""
        self.seen: dict[int, str] = {}
        """Activities of the job's other ranks, by rank, as of the last look."""
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=4096)
        self._is_open = True
        self.address: Address = host, int(self._listener.getsockname()[1]), compat.host_name()
        self._thread = threading.Thread(target=self._serve, name="fxcomp-presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close the socket."""
        self._is_open = False
        with suppress(OSError):  # a last connection, so that the thread wakes
            socket.create_connection(self.address[:2], CONNECT_S).close()

    def forget(self) -> None:
        """Close a forked child's copy: the parent would seem to live as long as the child."""
        self._listener.close()

    def _serve(self) -> None:
        while self._is_open:
            with suppress(OSError), self._listener.accept()[0] as connection:
                self._answer(connection)
        self.forget()  # not after an exception: the others would take this process for dead

    def _answer(self, connection: socket.socket) -> None:
        connection.sendall(json.dumps({"doing": self.doing, "steps": dict(self.steps)}).encode())


def place_of(address: Address) -> dict[str, Any]:
    """Ask another process where it is; empty if it does not say. Raises ProcessLookupError if it has ended."""
    host, port, machine = address
    if host.startswith("127.") and machine != compat.host_name():
        return {}  # another machine's own address, which here is this one's
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            _REACHED.add(machine)
            connection.settimeout(ANSWER_S)
            return json.loads(connection.makefile().read())
    except ConnectionRefusedError:  # by the machine, as no process listens there any more; or by a firewall
        if machine in (compat.host_name(), *_REACHED):
            raise ProcessLookupError(f"no process listens at {host}:{port}") from None
        return {}
    except (OSError, ValueError):  # a busy process, or no way to its machine: neither says that the process has ended
        return {}


def address_of(rank: int) -> Address | None:
    """Look up the address of a rank of the job; None if it has none."""
    store, key = compat.default_store(), _key(rank)
    if not store.check([key]):
        return None
    host, port, machine = json.loads(store.get(key))
    return host, port, machine


def _key(rank: int) -> str:
    return f"presence/{rank}"


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
        if fresh is not None:
            with suppress(Exception):  # a store that has gone is reported by the next read
                compat.default_store().set(_key(dist.get_rank()), json.dumps(fresh.address))
        _current = weakref.ref(world), fresh
    return _current[1]


def _forget() -> None:
    global _current
    if _current is not None and _current[1] is not None:
        _current[1].forget()
    _current = None


os.register_at_fork(after_in_child=_forget)
