"""Imitate several hosts on one machine: a network namespace each, joined by links of a chosen bandwidth.

    with ShapedHosts(2, "300mbit") as hosts:
        run_ranks(["train.py"], hosts=hosts)      # launch_ranks.py: one process a host
                                                  # a rank changes its host's rate with shape_this_host("1gbit")

    host 0 [eth0 10.77.0.1] ── tbf ──┐
                                      switch (a bridge in a namespace of its own)
    host 1 [eth0 10.77.0.2] ── tbf ──┘

Only sending is shaped. Each host has processors of its own if there are enough. This needs Linux, `ip`, `tc`,
`taskset`, `unshare` and `nsenter`, and either root or the kernel's leave to make user namespaces; `why_not` says what
is missing. A sleeping process holds each namespace and ends when the pipe from this process closes, however that ends:
nothing is left over, and nothing else of the machine is touched.
"""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.errors import Unsupported

_SLEEP = "echo ready; read _"
_WHERE_ROOTS_TOOLS_ARE = ("/usr/sbin", "/sbin")  # not on every user's PATH: Debian's users lack `ip` and `tc`


class Rights(enum.Enum):
    """By what right namespaces are made."""

    ROOT = "as root"
    USER_NAMESPACE = "in a user namespace"


class NetworkNamespace:
    """A network namespace, and the process that holds it."""

    def __init__(self, rights: Rights, beside: NetworkNamespace | None = None) -> None:
        self._enters_user = rights is Rights.USER_NAMESPACE
        own_user = ["--user", "--map-root-user"] if self._enters_user and beside is None else []
        words = ["unshare", *own_user, "--net", "sh", "-c", _SLEEP]
        self._holder = _start(beside.command(*words) if beside else words)
        self.pid = self._holder.pid

    def command(self, *words: str) -> list[str]:
        """Give the command that runs these words inside, without changing folder or user outside."""
        user = ["--preserve-credentials", "--user"] if self._enters_user else []
        return [tool_path("nsenter"), "--target", f"{self.pid}", *user, "--net", *words]

    def close(self) -> None:
        """Let the holder end, and the namespace with it unless others still run there."""
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if pipe:
                pipe.close()
        try:
            self._holder.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


def tool_path(name: str) -> str:
    """Find a tool, also where only root looks; its bare name if it is nowhere."""
    return _find(name) or name


def missing_tools(*names: str) -> list[str]:
    return [name for name in names if _find(name) is None]


def run_tool(command: list[str]) -> str:
    """Run a command and return its output."""
    try:
        done = subprocess.run([tool_path(command[0]), *command[1:]], capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unsupported(f"{command[0]} does not start: {error.strerror}") from None
    if done.returncode != 0:
        raise Unsupported(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_WHERE_ROOTS_TOOLS_ARE))


def _start(command: list[str]) -> subprocess.Popen[str]:
    """Start a holder, and return when it is inside."""
    try:
        holder = subprocess.Popen(
            [tool_path(command[0]), *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # deaf to Ctrl-C in the terminal: its namespace is needed until ranks have ended
        )
    except OSError as error:
        raise Unsupported(f"{command[0]} does not start: {error.strerror}") from None
    assert holder.stdout is not None, "asked for a pipe"
    if holder.stdout.readline() == "ready\n":
        return holder
    _, errors = holder.communicate()
    raise Unsupported(f"`{' '.join(command[: command.index('sh')])}` failed: {errors.strip()}")


INTERFACE = "eth0"  # a host's only way out
_BURST_S = 0.25e-3  # what may pass at full speed: short, so that short messages see the rate too
_LEAST_BURST = 32_000  # bytes; below one segmented packet train tbf no longer reaches its rate
_LONGEST_TRAIN = 65_536  # bytes; the kernel's own
_QUEUE = 64_000_000  # bytes; long enough that nothing is dropped, TCP holds itself back
_TOOLS = ("ip", "tc", "taskset", "unshare", "nsenter")


class ShapedHosts:
    """Hosts joined by links of one bandwidth, while the `with` block lasts. With `rate=None` links are unshaped.

    `rights` are those found here by `rights_here` if none are given.
    """

    def __init__(self, count: int, rate: str | None = None, rights: Rights | None = None) -> None:
        if count < 1:
            raise Unsupported(f"a network needs at least one host, not {count}")
        if rate is not None:
            parse_gb_per_s(rate)
        self.count = count
        self.rate = rate
        self._rights = rights
        self._namespaces: list[NetworkNamespace] = []  # one a host, and last the switch's

    def __enter__(self) -> ShapedHosts:
        try:
            self._create(self._rights or rights_here())
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
            _sent_bytes(run_tool(self._namespaces[host].command("cat", "/proc/net/dev")), INTERFACE)
            for host in range(self.count)
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
        return [tool_path("taskset"), "--cpu-list", numbers, *self._namespaces[host].command()]

    def _create(self, rights: Rights) -> None:
        switch = NetworkNamespace(rights)
        self._namespaces.append(switch)
        ip = tool_path("ip")
        run_tool(switch.command(ip, "link", "add", "switch", "type", "bridge"))
        run_tool(switch.command(ip, "link", "set", "switch", "up"))
        for host in range(self.count):
            namespace = NetworkNamespace(rights, beside=switch)
            self._namespaces.insert(host, namespace)
            port, theirs = f"port{host}", ("peer", "name", INTERFACE, "netns", f"{namespace.pid}")
            run_tool(switch.command(ip, "link", "add", port, "type", "veth", *theirs))
            run_tool(switch.command(ip, "link", "set", port, "master", "switch", "up"))
            for words in (
                ("link", "set", INTERFACE, "addrgenmode", "none"),  # no IPv6 to choose by mistake
                ("addr", "add", f"{self.address(host)}/16", "dev", INTERFACE),
                ("link", "set", INTERFACE, "up"),
                ("link", "set", "lo", "up"),
            ):
                run_tool(namespace.command(ip, *words))
            for tool, *words in _shaping_commands(self.rate):
                run_tool(namespace.command(tool_path(tool), *words))

    def _remove(self) -> None:
        # Both ends of a link go with their namespaces.
        while self._namespaces:
            self._namespaces.pop().close()


def rights_here(attempt: Callable[[Rights], str | None] | None = None) -> Rights:
    """Find by what right links can be shaped here, or raise `Unsupported` with the reasons why by none.

    `attempt` says what is in the way of one right; it makes a network if it is not given.
    """
    if not sys.platform.startswith("linux"):
        raise Unsupported("shaped hosts need Linux network namespaces")
    missing = missing_tools(*_TOOLS)
    if missing:
        raise Unsupported(f"shaped hosts need {' and '.join(missing)} (packages iproute2 and util-linux)")
    attempt = attempt or _attempt
    reasons: list[str] = []
    for rights in (Rights.ROOT, Rights.USER_NAMESPACE) if os.geteuid() == 0 else (Rights.USER_NAMESPACE,):
        reason = attempt(rights)
        if reason is None:
            return rights
        reasons.append(f"{rights.value}: {reason}")
    raise Unsupported(f"shaped hosts cannot be made here: {'; '.join(reasons)}")


def why_not() -> str | None:
    """Say what is missing for shaped hosts; None if they work."""
    try:
        rights_here()
    except Unsupported as error:
        return str(error)
    return None


def _attempt(rights: Rights) -> str | None:
    try:
        with ShapedHosts(1, "1gbit", rights):
            return None
    except Unsupported as error:
        return str(error)


def shape_this_host(rate: str | None) -> None:
    """Change the bandwidth of the calling rank's host; connections stay open. One rank a host is enough."""
    for command in _shaping_commands(rate):
        run_tool([*command])


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
    raise Unsupported(f"no network interface is called {interface!r} here")
