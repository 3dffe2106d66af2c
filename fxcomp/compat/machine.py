"""Names, processors and memory of the machine."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from fxcomp.compat.streams import streams_of

# Names


def machine_name() -> str:
    return socket.gethostname()


def host_name() -> str:
    """Return a name of this host. Network namespaces of one machine get different names."""
    return f"{machine_name()} {os.readlink('/proc/self/ns/net') if os.path.exists('/proc/self/ns/net') else ''}".strip()


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# Processors


def usable_processors() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def processors(root: Path = Path("/")) -> int:
    """Return the number of usable processors, limited by cgroup quotas."""
    return int(min(len(usable_processors()), processor_quota(root)))


def processor_quota(root: Path = Path("/")) -> float:
    """Return the smallest cgroup quota, in processors; infinite without quotas.

    Quotas are rounded down, but not below 1: `docker run --cpus 1.5` gives 1.
    """
    return max(1.0, min(map(math.floor, _quotas(root)), default=math.inf))


def _quotas(root: Path) -> Iterator[float]:
    """Yield each cgroup quota of this process, in processors (Linux, cgroups(7)).

    The group's path and all parents are read, because a container may see the process's group as the root.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        inside = Path(path.lstrip("/"))
        for folder in (mount / inside, *(mount / above for above in inside.parents)):
            if controllers:  # version 1
                quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
            else:
                quota, _, period = _text(folder / "cpu.max").partition(" ")
            try:
                us, of_us = int(quota), int(period)
            except ValueError:  # no file, or "max"
                continue
            if us > 0 and of_us > 0:
                yield us / of_us


# Devices and memory

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device runs kernels that the host launches."""
    return device.type not in ("cpu", "meta")


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished.

    Call the module of the device's type, because `torch.accelerator` may be of another type.
    """
    module = streams_of(device)
    if module is not None:
        module.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def return_freed_memory(*, of_cycles: bool) -> None:
    """Give freed memory of the host back to the system, where glibc keeps it in pieces.

    With `of_cycles`, objects such as graphs are collected first, which takes 0.1 s or more.
    """
    if of_cycles:
        gc.collect()
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def forget_freed_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def spare_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the bytes that remain free at this process's peak memory use; None if unknown.

    Host memory is divided equally among torchrun's local processes.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device)
        return free + kept - torch.cuda.max_memory_allocated(device)
    available = _kilobytes(root / "proc/meminfo", "MemAvailable")
    peak, now = (_kilobytes(root / "proc/self/status", key) for key in ("VmHWM", "VmRSS"))
    if device.type != "cpu" or available is None or peak is None or now is None:
        return None
    limit, used = (_text(root / "sys/fs/cgroup" / f"memory.{what}") for what in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    neighbours = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return available // int(neighbours if neighbours.isdigit() else 1) - (peak - now)


def _kilobytes(path: Path, key: str) -> int | None:
    """Return the value, in bytes, of a line `key:  123 kB` of a system file."""
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return 1024 * int(value.split()[0])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
