"""Process groups: names, stores, timeouts and orderly ends; and the collectives that torch 2.13 renamed."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, cast
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import device_mesh

# torch 2.13 renamed these two and warns about the old names.
_dist = cast("Any", dist)
ProcessGroup = dist.ProcessGroup
DeviceMesh = device_mesh.DeviceMesh
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor

SECONDS_TO_CLOSE = 10.0
"""Python's end waits so long for groups that are being closed."""


def process_group(name: str) -> Any:
    """Find the living process group of a name."""
    return dist.distributed_c10d._resolve_process_group(cast("Any", name))


def group_name(boxed: Any) -> str:
    """Name a boxed process group; any rank finds it by that name as long as it lives."""
    return dist.ProcessGroup.unbox(boxed).group_name


def default_group() -> Any:
    """Give the default process group; another object each time that it is initialised."""
    return dist.distributed_c10d._get_default_group()


def world() -> Any:
    """Give the default process group; None where there is none."""
    return dist.GroupMember.WORLD


def default_store() -> dist.Store:
    """Give the store of the default process group, with keys of our own."""
    return dist.PrefixStore("fxcomp", dist.distributed_c10d._get_default_store())


def store_host() -> str | None:
    """Name the machine that the default process group's store is on; None where no machine serves it."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def is_store_gone(error: Exception) -> bool:
    """Ask if a store failed because whoever serves it has ended, and not because a key did not come."""
    text = str(error).lower()
    return isinstance(error, dist.DistNetworkError) or not ("timeout" in text or "timed out" in text)


def is_of_another_process(store: dist.Store) -> bool:
    """Return whether another process has been this rank in a store: its answers to all may still be there."""
    return set_once(store, f"process/{dist.get_rank()}", _this_process()) != _this_process()


@cache
def _this_process() -> str:
    return uuid4().hex


def outlives_restarts() -> str:
    """Name what lets torchrun start ranks again on the store that they had before; empty where nothing does."""
    environment = os.environ
    may_restart = int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    has_own = environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    return "torchrun --max-restarts" if may_restart and is_shared and not has_own else ""


def set_once(store: dist.Store, key: str, value: str) -> str:
    """Write a key unless another rank has; returns its value then, or the given one where no store can compare."""
    try:
        return store.compare_set(key, "", value).decode()
    except (RuntimeError, NotImplementedError):
        # Called by a rank that is about to raise: its own error must not give way to that of a store whose host has
        # died. One that cannot compare keeps the last value of ranks that write at once.
        with suppress(RuntimeError, NotImplementedError):
            if store.check([key]):
                return store.get(key).decode()
            store.set(key, value)
        return value


def group_timeout() -> timedelta:
    """Give the time that the default process group waits for a rank, as init_process_group was told."""
    group = default_group()
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def new_group(ranks: list[int], backend: str | None, timeout: timedelta, name: int | None) -> Any:
    """Make a process group, by another name than torch's count if one is given.

    Ranks that are no members need not call it for a name of its own, and are given none.
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
    """Let new groups connect by themselves.

    Where the default group is bound to a device, torch splits its communicator for each new group, which takes all
    ranks of the job. Those of other ranks' groups do so for a group of any backend, and members of a gloo group do not.
    """
    device = group.bound_device_id
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def backend_names(group: Any) -> dict[str, str]:
    """Name a group's backends by type of device; to `dist.get_backend` all have one name, which may be "undefined"."""
    return {device.type: group._get_backend(device).name() for device in group._device_types}


def destroy_groups(handles: list[Any]) -> None:
    """Close process groups' connections. The list must hold the only references, and is emptied."""
    for handle in handles:
        with suppress(ValueError, RuntimeError):  # the user may have destroyed all of them
            _abort(handle)
            dist.destroy_process_group(handle)
    handle = None
    # A group is gone with the last reference, which waits for what is under way; normally nothing is.
    last = threading.Thread(target=handles.clear, name="fxcomp-closing", daemon=True)
    with suppress(RuntimeError):  # while Python ends, no thread starts
        last.start()
        last.join(0.1)
        if last.is_alive():  # a thread that leaves torch after Python has ended aborts the process
            atexit.register(last.join, SECONDS_TO_CLOSE)


def _abort(group: Any) -> None:
    """Abort what is under way over NCCL: closing would wait for it."""
    for backend in {group._get_backend(device) for device in group._device_types}:
        if backend.name() == "nccl":
            backend.abort()


def is_lost_connection(error: RuntimeError) -> bool:
    """Ask if a collective failed because another rank is not there, as far as its backend tells."""
    lost = (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)
    text = str(error)
    # "Application timeout caused pair closure" is what gloo says of all that was under way beside what timed out.
    told = ("gloo/", "onnection", "pair closure")
    return isinstance(error, lost) or "timed out" in text.lower() or any(part in text for part in told)
