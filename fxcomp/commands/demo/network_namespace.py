"""Make network namespaces as root or as an ordinary user.

    switch = NetworkNamespace(Rights.USER_NAMESPACE)
    host = NetworkNamespace(Rights.USER_NAMESPACE, beside=switch)
    run(*host.command("ip", "link"))

An ordinary user may do this inside a user namespace, in which they count as root; namespaces beside the first share it.
A sleeping process holds each namespace, and ends when the pipe from this process closes. So nothing is left over,
however this process ends. Nothing is mounted and nothing has a name that others could meet.
"""

from __future__ import annotations

import enum
import os
import shutil
import subprocess

from fxcomp.errors import HostsUnavailable

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
        raise HostsUnavailable(f"{command[0]} does not start: {error.strerror}") from None
    if done.returncode != 0:
        raise HostsUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
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
        raise HostsUnavailable(f"{command[0]} does not start: {error.strerror}") from None
    assert holder.stdout is not None, "asked for a pipe"
    if holder.stdout.readline() == "ready\n":
        return holder
    _, errors = holder.communicate()
    raise HostsUnavailable(f"`{' '.join(command[: command.index('sh')])}` failed: {errors.strip()}")
