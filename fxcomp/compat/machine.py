"""Read the machine as the system describes it (names, processors, memory), and write files whole."""

from __future__ import annotations

import fcntl
import math
import os
import platform
import socket
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from fxcomp.compat.streams import streams_of


def cache_directory() -> Path:
    """Give the directory for what fxcomp can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fxcomp"


@contextmanager
def alone_on_this_machine(path: Path | None) -> Generator[None]:
    """Hold an exclusive lock on a file; do nothing without a path, or where the file cannot be made or locked.

    The lock of a process that dies is released.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # forked processes have the file open, too
        yield


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing; another process may write the same one. Links are followed."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # a temporary file is its owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    """Read the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Names


def machine_name() -> str:
    """Name this machine apart from others."""
    return socket.gethostname()


def host_name() -> str:
    """Name this host apart from others. Namespaces of one machine share a name, but not their network."""
    return f"{machine_name()} {os.readlink('/proc/self/ns/net') if os.path.exists('/proc/self/ns/net') else ''}".strip()


def processor_name() -> str:
    """Name the processor as the system does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# Processors


def usable_processors() -> list[int]:
    """Number the processors that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def processors(root: Path = Path("/")) -> int:
    """Count the processors that this process may run on, at most its control groups' quota."""
    return int(min(len(usable_processors()), processor_quota(root)))


def processor_quota(root: Path = Path("/")) -> float:
    """Give the tightest quota of the control groups around this process, in processors; infinite without one.

    A quota is rounded down: `docker run --cpus 1.5` gives one processor to count on, half a one still is one.
    """
    return max(1.0, min(map(math.floor, _quotas(root)), default=math.inf))


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time that each control group around this process may use (Linux, cgroups(7)).

    A group's path is as the host sees it; a container may see its own group as the top. Both are looked at, and all
    that lie between.
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
            except ValueError:  # no such file, or "max"
                continue
            if us > 0 and of_us > 0:
                yield us / of_us


# Devices and memory

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def is_accelerator(device: torch.device) -> bool:
    """Tell a device that is handed its work by the host, and starts operators at a price."""
    return device.type not in ("cpu", "meta")


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; the CPU always has.

    Its own module is asked: `torch.accelerator` is the one that a build was made for, which another may stand beside.
    """
    module = streams_of(device)
    if module is not None:
        module.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def forget_freed_memory(device: torch.device) -> None:
    """Give the memory that a device's allocator keeps for later back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def spare_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Give the memory left beside this process's peak so far; None where nobody knows.

    Of a host's memory, processes that torchrun has started there leave each other an equal share.
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
    """Read a line `key:  123 kB` of a system file, in bytes."""
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return 1024 * int(value.split()[0])
    return None


def _text(path: Path) -> str:
    """Read a system file; empty if there is none."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
