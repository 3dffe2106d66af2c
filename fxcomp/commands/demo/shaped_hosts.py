"""Imitate several hosts on one machine: a network namespace each, joined by links of a chosen bandwidth.

    with ShapedHosts(2, "300mbit") as hosts:
        run_ranks(["train.py"], hosts=hosts)      # launch_ranks.py: one process a host
                                                  # a rank changes its host's rate with shape_this_host("1gbit")

    host 0 [eth0 10.77.0.1] ── tbf ──┐
                                      switch (a bridge in a namespace of its own)
    host 1 [eth0 10.77.0.2] ── tbf ──┘

Only sending is shaped. Each host has processors of its own if there are enough. This needs root, `ip`, `tc` and
`taskset`; `why_not` says what is missing. All namespaces are named after this process, and nothing else of the machine
is touched.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.errors import HostsUnavailable

INTERFACE = "eth0"  # a host's only way out
_BURST_S = 0.25e-3  # what may pass at full speed: short, so that short messages see the rate too
_LEAST_BURST = 32_000  # bytes; below one segmented packet train tbf no longer reaches its rate
_LONGEST_TRAIN = 65_536  # bytes; the kernel's own
_QUEUE = 64_000_000  # bytes; long enough that nothing is dropped, TCP holds itself back
_PREFIX = "fxcomp-"
_counter = itertools.count()


class ShapedHosts:
    """Hosts joined by links of one bandwidth, while the `with` block lasts. With `rate=None` links are unshaped."""

    def __init__(self, count: int, rate: str | None = None) -> None:
        if count < 1:
            raise HostsUnavailable(f"a network needs at least one host, not {count}")
        if rate is not None:
            parse_gb_per_s(rate)
        self.count = count
        self.rate = rate
        stem = f"{_PREFIX}{os.getpid()}-{next(_counter)}"
        self._switch = f"{stem}-switch"
        self.namespaces = tuple(f"{stem}-host{host}" for host in range(count))

    def __enter__(self) -> ShapedHosts:
        _remove_leftovers()
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def wire_bytes(self) -> list[int]:
        """Count the bytes that each host has sent, headers included."""
        return [
            _sent_bytes(_run("ip", "netns", "exec", namespace, "cat", "/proc/net/dev"), INTERFACE)
            for namespace in self.namespaces
        ]

    def address(self, host: int) -> str:
        return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"

    def processors(self, host: int) -> list[int]:
        """Number a host's processors: its share of those that this process may use, or one shared with others."""
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < self.count:
            return [usable[host % len(usable)]]
        first, after = (len(usable) * k // self.count for k in (host, host + 1))
        return usable[first:after]

    def command_on(self, host: int) -> list[str]:
        """Give the words with which a command begins to run on a host."""
        numbers = ",".join(map(str, self.processors(host)))
        return ["taskset", "--cpu-list", numbers, "ip", "netns", "exec", self.namespaces[host]]

    def _create(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for host, namespace in enumerate(self.namespaces):
            port = f"port{host}"
            _run("ip", "netns", "add", namespace)
            _run(
                *("ip", "link", "add", INTERFACE, "netns", namespace, "type", "veth"),
                *("peer", "name", port, "netns", self._switch),
            )
            _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "addrgenmode", "none")  # no IPv6 to choose by mistake
            _run("ip", "-n", namespace, "addr", "add", f"{self.address(host)}/16", "dev", INTERFACE)
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            for command in _shaping_commands(self.rate):
                _run("ip", "netns", "exec", namespace, *command)

    def _remove(self) -> None:
        # Both ends of a link go with their namespaces. One that was never made is no fault here.
        for namespace in (*self.namespaces, self._switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def why_not() -> str | None:
    """Say what is missing for shaped hosts; None if they work."""
    if not sys.platform.startswith("linux"):
        return "shaped hosts need Linux network namespaces"
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        return f"shaped hosts need {' and '.join(missing)} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "shaped hosts need root, to create network namespaces"
    try:
        with ShapedHosts(1, "1gbit"):
            return None
    except HostsUnavailable as error:
        return str(error)


def shape_this_host(rate: str | None) -> None:
    """Change the bandwidth of the calling rank's host; connections stay open. One rank a host is enough."""
    for command in _shaping_commands(rate):
        _run(*command)


def sent_by_this_host(interface: str = INTERFACE) -> int:
    """Count the bytes that the calling rank's host has sent, headers included."""
    return _sent_bytes(Path("/proc/self/net/dev").read_text(), interface)


def _shaping_commands(rate: str | None) -> list[tuple[str, ...]]:
    """Make the commands that limit a host's rate. Packets leave in trains, as from a network card that segments them.

    A train longer than the burst would be cut by the kernel, packet by packet: 6 to 12 ms of processor time for each MB
    instead of 2 to 3, and 70 MB/s instead of 104 over 1 Gbit/s, both ways at once (measured, 2026-11).
    """
    replace = ("tc", "qdisc", "replace", "dev", INTERFACE, "root")
    if rate is None:
        return [(*replace, "pfifo", "limit", "10000"), _trains_of(_LONGEST_TRAIN)]
    bytes_per_s = parse_gb_per_s(rate) * 1e9
    burst = max(round(bytes_per_s * _BURST_S), _LEAST_BURST)
    bits = f"{round(bytes_per_s * 8)}bit"
    shape = (*replace, "tbf", "rate", bits, "burst", f"{burst}", "limit", f"{_QUEUE + burst}")
    return [_trains_of(min(burst // 2, _LONGEST_TRAIN)), shape]


def _trains_of(size: int) -> tuple[str, ...]:
    return ("ip", "link", "set", "dev", INTERFACE, "gso_max_size", f"{size}")


def _sent_bytes(table: str, interface: str) -> int:
    for line in table.splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            return int(counters.split()[8])
    raise HostsUnavailable(f"no network interface is called {interface!r} here")


def _remove_leftovers() -> None:
    """Delete the namespaces of earlier processes that were killed."""
    for name in _run("ip", "netns", "list").split():
        match = re.fullmatch(rf"{_PREFIX}(\d+)-\d+-\w+", name)
        if match and not Path("/proc", match[1]).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise HostsUnavailable(f"shaped hosts need {command[0]} (package iproute2)") from None
    if done.returncode != 0:
        raise HostsUnavailable(f"shaped hosts: `{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
