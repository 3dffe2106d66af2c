"""Process groups: names, stores, timeouts and shutdown; the collectives that torch 2.13 renamed."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import atexit
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, cast
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import device_mesh

# torch 2.13 deprecates the old names.
_dist = cast("Any", dist)
ProcessGroup = dist.ProcessGroup
DeviceMesh = device_mesh.DeviceMesh
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor

SECONDS_TO_CLOSE = 10.0
"""Maximum wait at exit, in s, for groups that are being closed."""


def process_group(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(cast("Any", name))


def group_name(boxed: Any) -> str:
    """Return the name of a process group wrapped as a ScriptObject."""
    return dist.ProcessGroup.unbox(boxed).group_name


def default_group() -> Any:
    """Return the default process group, a new object after each initialization."""
    return dist.distributed_c10d._get_default_group()


def world() -> Any:
    return dist.GroupMember.WORLD


def default_store() -> dist.Store:
    """Return the default process group's store with a key prefix. Its calls raise after the group's timeout.

    torch waits for an answer without a limit: for ever if the process that hosts the store is stopped, and for a
    quarter of an hour if its host cannot be reached.
    """
    seconds, part = divmod(group_timeout().total_seconds(), 1.0)
    store = dist.distributed_c10d._get_default_store()
    for connection in _store_connections(store):
        limit = struct.pack("ll", int(seconds), int(1e6 * part))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return dist.PrefixStore("fxcomp", store)


def leave_store(store: dist.Store) -> None:
    """Close the connection to a store after a call without an answer: the next would read a late one."""
    for connection in _store_connections(store):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


_AS_IT_IS = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
"""Type with which Python leaves a descriptor's flags. By default, socket.setdefaulttimeout() changes them."""


def _store_connections(store: dist.Store) -> Generator[socket.socket]:
    """Yield this process's connections to a store's server."""
    innermost = _innermost(store)
    host, port = (getattr(innermost, name, None) for name in ("host", "port"))
    if host is None or port is None:
        return
    with suppress(OSError):
        addresses = {info[4][0] for info in socket.getaddrinfo(host, port)}
        for number in os.listdir("/dev/fd"):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                    with socket.socket(type=_AS_IT_IS, fileno=os.dup(int(number))) as found:
                        peer = found.getpeername()
                        if peer[1:2] == (port,) and peer[0].removeprefix("::ffff:") in addresses:
                            yield found


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def store_host() -> str | None:
    return getattr(_innermost(dist.distributed_c10d._get_default_store()), "host", None)


def is_store_gone(error: Exception) -> bool:
    """Return whether a store's error means a lost server, not a timeout."""
    text = str(error).lower()
    return isinstance(error, dist.DistNetworkError) or not ("timeout" in text or "timed out" in text)


def is_of_another_process(store: dist.Store) -> bool:
    """Return whether an earlier process of this rank used a store and may have left keys."""
    return set_once(store, f"process/{dist.get_rank()}", _this_process()) != _this_process()


@cache
def _this_process() -> str:
    return uuid4().hex


def outlives_restarts() -> str:
    """Return torchrun's restart option if torchrun may restart ranks with the same store, else an empty string."""
    environment = os.environ
    may_restart = int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    has_own = environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    return "torchrun --max-restarts" if may_restart and is_shared and not has_own else ""


def set_once(store: dist.Store, key: str, value: str) -> str:
    """Write `value` unless the key exists, and return the key's value. If the store fails, return `value`."""
    value = value.encode(errors="replace").decode()  # a text from a file may hold halves of characters
    try:
        return store.compare_set(key, "", value).decode()
    except dist.DistNetworkError:
        leave_store(store)
        return value
    except (RuntimeError, NotImplementedError):
        # The caller's error is more important than the store's. Stores without compare_set keep the last of
        # simultaneous writes.
        with suppress(RuntimeError, NotImplementedError):
            if store.check([key]):
                return store.get(key).decode()
            store.set(key, value)
        return value


def group_timeout() -> timedelta:
    group = default_group()
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def new_group(ranks: list[int], backend: str | None, timeout: timedelta, name: int | None) -> Any:
    """Make a process group. An integer `name` replaces torch's group count in the group's name.

    With `name`, only ranks of the group need to call this.
    """
    world = dist.distributed_c10d._world
    counted = world.group_count
    if name is not None:
        world.group_count = name
    try:
        with _unbound(default_group()):
            return _dist.new_group(ranks, timeout=timeout, backend=backend)
    finally:
        if name is not None:
            world.group_count = counted


@contextmanager
def _unbound(group: Any) -> Generator[None]:
    """Make new groups without splitting the default group's communicator.

    torch splits the communicator if the default group is bound to a device. All ranks must join the split, but ranks
    that make a gloo group do not.
    """
    device = group.bound_device_id
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def backend_names(group: Any) -> dict[str, str]:
    """Map device types to backend names; `dist.get_backend` returns one name, which may be "undefined"."""
    return {device.type: group._get_backend(device).name() for device in group._device_types}


def destroy_groups(handles: list[Any]) -> None:
    """Close process groups. The list must hold the only references, and is emptied."""
    for handle in handles:
        with suppress(ValueError, RuntimeError):  # the user may have destroyed all of them
            _abort(handle)
            dist.destroy_process_group(handle)
    handle = None
    # Dropping the last reference waits for running work.
    last = threading.Thread(target=handles.clear, name="fxcomp-closing", daemon=True)
    with suppress(RuntimeError):  # no thread starts while Python exits
        last.start()
        last.join(0.1)
        if last.is_alive():  # a thread that returns from torch after Python's exit aborts the process
            atexit.register(last.join, SECONDS_TO_CLOSE)


def _abort(group: Any) -> None:
    # Closing waits for NCCL's work.
    for backend in {group._get_backend(device) for device in group._device_types}:
        if backend.name() == "nccl":
            backend.abort()


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether a collective's error indicates a lost rank."""
    lost = (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)
    text = str(error)
    # gloo reports "Application timeout caused pair closure" for all work during a timeout.
    told = ("gloo/", "onnection", "pair closure")
    return isinstance(error, lost) or "timed out" in text.lower() or any(part in text for part in told)
