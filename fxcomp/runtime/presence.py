"""Show other ranks that this process is alive: its socket closes when the process ends.

A waiting rank connects to the socket. The kernel refuses the connection once the process has ended, but accepts it
while the process is busy. A thread answers with the process's activity.

    waits for rank 2's answer ── connects ──► rank 2's thread: {"doing": "capturing the step", "steps": {...}}
                              ◄── refused ─── rank 2's kernel, if its process has ended

Each default process group has one socket and one thread.
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
"""Timeouts, in s, for connecting and for the answer."""

Address = tuple[str, int, str]
"""IP address, port, and machine name."""

_REACHED = set[str]()
"""Names of machines that accepted a connection before. If one refuses now, its process has ended."""


class Presence:
    def __init__(self, host: str) -> None:
        self.doing = ""
        self.steps: dict[str, int] = {}
        """Last step that each compiled function entered, by its conversation's `root` (`agree.py`)."""
        self.seen: dict[int, str] = {}
        """Activity in the last answer of other ranks, by job rank."""
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=4096)
        self._is_open = True
        self.address: Address = host, int(self._listener.getsockname()[1]), compat.host_name()
        self._thread = threading.Thread(target=self._serve, name="fxcomp-presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_open = False
        with suppress(OSError):  # a last connection wakes the thread
            socket.create_connection(self.address[:2], CONNECT_S).close()

    def forget(self) -> None:
        """Close the socket in a forked child, which would keep the parent's socket open."""
        self._listener.close()

    def _serve(self) -> None:
        while self._is_open:
            with suppress(OSError), self._listener.accept()[0] as connection:
                self._answer(connection)
        self.forget()  # not after an exception: other ranks would take this process for dead

    def _answer(self, connection: socket.socket) -> None:
        connection.sendall(json.dumps({"doing": self.doing, "steps": dict(self.steps)}).encode())


def place_of(address: Address) -> dict[str, Any]:
    """Return another process's answer, or {} without one. Raises ProcessLookupError if the process has ended."""
    host, port, machine = address
    if host.startswith("127.") and machine != compat.host_name():
        return {}  # the other machine's loopback address
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            _REACHED.add(machine)
            connection.settimeout(ANSWER_S)
            found = json.loads(connection.makefile().read(1_000_000))  # characters
            return {"doing": str(found["doing"]), "steps": {root: int(step) for root, step in found["steps"].items()}}
    except ConnectionRefusedError:  # no process listens there, or a firewall refuses
        if machine in (compat.host_name(), *_REACHED):
            raise ProcessLookupError(f"no process listens at {host}:{port}") from None
        return {}
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
    ):  # busy, or not a rank's port
        return {}


def address_of(rank: int, store: Any) -> Address | None:
    key = _key(rank)
    if not store.check([key]):
        return None
    host, port, machine = json.loads(store.get(key))
    return host, port, machine


def _key(rank: int) -> str:
    return f"presence/{rank}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(host: str | None) -> str:
    """Return the IP address from which this machine reaches the store's machine."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host or "127.0.0.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


_current: tuple[weakref.ref[Any], Presence | None] | None = None


def presence() -> Presence | None:
    """Return the default process group's Presence, created on first use; None if no socket opens."""
    global _current
    world = compat.default_group()
    if _current is None or _current[0]() is not world:
        if _current is not None and _current[1] is not None:
            _current[1].close()
        fresh: Presence | None = None
        with suppress(OSError):
            fresh = Presence(_own_address(compat.store_host()))
            # Not at exit: the kernel closes the socket then, which other ranks notice.
            weakref.finalize(world, fresh.close).atexit = False
        if fresh is not None:
            with suppress(Exception):  # if the store is gone, the next read reports it
                compat.default_store().set(_key(dist.get_rank()), json.dumps(fresh.address))
        _current = weakref.ref(world), fresh
    return _current[1]


def _forget() -> None:
    global _current
    if _current is not None and _current[1] is not None:
        _current[1].forget()
    _current = None


os.register_at_fork(after_in_child=_forget)
