"""Emulate several hosts on one machine: network namespaces, joined by links of a given bandwidth.

    with ShapedHosts(2, "300mbit") as hosts:
        run_ranks(["train.py"], hosts=hosts)      # launch_ranks.py: one process per host

    host 0 [eth0 10.77.0.1] ── tbf ──┐
                                      switch (a bridge in its own namespace)
    host 1 [eth0 10.77.0.2] ── tbf ──┘

Only sending is shaped. Needs Linux, `ip`, `tc`, `taskset`, `unshare` and `nsenter`, and root or permission for user
namespaces. A sleeping process keeps each namespace open, and exits when the pipe from this process closes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.errors import Unsupported

INTERFACE = "eth0"  # the only interface of a host
_BURST_S = 0.25e-3  # short, so that short messages are limited too
_LEAST_BURST = 32_000  # bytes; tbf is slower with less than one segmented packet train
_LONGEST_TRAIN = 65_536  # bytes; the kernel's limit
_QUEUE = 64_000_000  # bytes; nothing is dropped
_TOOLS = ("ip", "tc", "taskset", "unshare", "nsenter")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # Debian users lack `ip` and `tc`


class ShapedHosts:
    """Hosts joined by links of one bandwidth. `rate=None` leaves links unshaped."""

    def __init__(self, count: int, rate: str | None = None) -> None:
        if count < 1:
            raise Unsupported(f"a network needs at least one host, not {count}")
        self.count = count
        self._shaping = _shaping_commands(rate)
        self._user: Sequence[str] = ()
        self._holders: list[subprocess.Popen[str]] = []  # one per namespace: the switch, then each host

    def __enter__(self) -> ShapedHosts:
        try:
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._holders:
            holder = self._holders.pop()
            holder.terminate()
            holder.communicate()

    def address(self, host: int) -> str:
        return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"

    def processors(self, host: int) -> list[int]:
        """Return the processors of a host. If there are more hosts than processors, hosts share processors."""
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < self.count:
            return [usable[host % len(usable)]]
        first, after = (len(usable) * k // self.count for k in (host, host + 1))
        return usable[first:after]

    def command_on(self, host: int) -> list[str]:
        """Return the command-line prefix that runs a program on a host."""
        numbers = ",".join(map(str, self.processors(host)))
        return [_found("taskset"), "--cpu-list", numbers, *self._inside(host + 1)]

    def _create(self) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
        if missing:
            raise Unsupported(f"shaped hosts need Linux and {' and '.join(missing)} (iproute2 and util-linux)")
        if not _may_make_namespaces():
            self._user = ("--user", "--map-root-user")
        self._hold("unshare", *self._user, "--net")
        _run([*self._inside(0)], "ip link add switch type bridge", "ip link set switch up")
        for host in range(self.count):
            self._hold(*self._inside(0), "unshare", "--net")
            peer = f"peer name {INTERFACE} netns {self._holders[-1].pid}"
            _run(
                self._inside(0),
                f"ip link add port{host} type veth {peer}",
                f"ip link set port{host} master switch up",
            )
            _run(
                self._inside(host + 1),
                f"ip link set {INTERFACE} addrgenmode none",  # prevents accidental IPv6
                f"ip addr add {self.address(host)}/16 dev {INTERFACE}",
                f"ip link set {INTERFACE} up",
                "ip link set lo up",
                *self._shaping,
            )

    def _hold(self, *command: str) -> None:
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo ready; read _"],
            env={**os.environ, "PATH": _PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ignores Ctrl-C: ranks need its namespace until they end
        )
        self._holders.append(holder)
        if holder.stdout is None or holder.stdout.readline() != "ready\n":
            raise Unsupported(f"`{' '.join(command)}` failed: {holder.communicate()[1].strip()}")

    def _inside(self, number: int) -> list[str]:
        """Return the prefix that runs a command in a namespace as the same user. 0 is the switch, 1 the first host."""
        user = ("--preserve-credentials", "--user") if self._user else ()
        return [_found("nsenter"), "--target", f"{self._holders[number].pid}", *user, "--net"]


def why_not() -> str | None:
    """Return the reason why hosts cannot be shaped here, if any."""
    try:
        with ShapedHosts(1, "1gbit"):
            return None
    except Unsupported as error:
        return str(error)


def shape_this_host(rate: str | None) -> None:
    """Change the bandwidth of the calling rank's host; connections stay open."""
    _run((), *_shaping_commands(rate))


def sent_by_this_host(interface: str = INTERFACE) -> int:
    """Return the bytes that this rank's host has sent, including headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            return int(counters.split()[8])
    raise Unsupported(f"no network interface is called {interface!r} here")


def _may_make_namespaces() -> bool:
    """Return True if this process may make network namespaces without a user namespace."""
    return subprocess.run([_found("unshare"), "--net", "true"], capture_output=True, check=False).returncode == 0


def _shaping_commands(rate: str | None) -> list[str]:
    """Return the commands that limit a host's rate and the length of packet trains (segmentation offload).

    The kernel would cut trains longer than tbf's burst into packets, which takes 6 to 12 ms of processor time per MB
    instead of 2 to 3 (measured, 2026-11).
    """
    trains, replace = f"ip link set dev {INTERFACE} gso_max_size", f"tc qdisc replace dev {INTERFACE} root"
    if rate is None:
        return [f"{replace} pfifo limit 10000", f"{trains} {_LONGEST_TRAIN}"]
    bytes_per_s = parse_gb_per_s(rate) * 1e9
    burst = max(round(bytes_per_s * _BURST_S), _LEAST_BURST)
    shape = f"tbf rate {round(bytes_per_s * 8)}bit burst {burst} limit {_QUEUE + burst}"
    return [f"{trains} {min(burst // 2, _LONGEST_TRAIN)}", f"{replace} {shape}"]


def _run(where: Sequence[str], *commands: str) -> None:
    words = [*where, "sh", "-c", " && ".join(commands)]
    done = subprocess.run(words, env={**os.environ, "PATH": _PATH}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unsupported(f"`{words[-1]}` failed: {done.stderr.strip()}")


def _found(tool: str) -> str:
    return shutil.which(tool, path=_PATH) or tool
