"""Ranks in shaped namespaces: they meet, they are ended, and the link is as fast as asked."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fxcomp.commands.demo import shaped_hosts
from fxcomp.commands.demo.launch_ranks import run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, why_not
from fxcomp.errors import HostsUnavailable, PeerFailed

MEET = """
    import os
    import torch, torch.distributed as dist
    from fxcomp.commands.demo.launch_ranks import join
    from fxcomp.commands.demo.shaped_hosts import sent_by_this_host
    join()
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    print(os.environ["LOCAL_RANK"], int(total.item()), sent_by_this_host(os.environ["GLOO_SOCKET_IFNAME"]) > 0)
    dist.destroy_process_group()
"""

# No torch here, so that the failure is the rank's own and comes at once.
RAISE_ON_RANK_1 = """
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError("rank one gives up")
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def shaping():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def write(text: str) -> str:
        path = tmp_path / "rank.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def held_namespaces() -> set[int]:
    """The processes that hold namespaces for this one."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            words = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid() and b"echo ready" in words:
            found.add(int(process.name))
    return found


def is_running(pid: int) -> bool:
    # A process that has ended but that nobody has collected yet is a zombie, and runs no more.
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("shaping")
@pytest.mark.parametrize("as_root", [True, False])
def test_ranks_on_shaped_hosts_meet_and_everything_is_removed_afterwards(
    script, monkeypatch: pytest.MonkeyPatch, as_root: bool
):
    """Where namespaces may not be made as root they are made in a user namespace, as those of any user are."""
    if as_root and not shaped_hosts._may_make_namespaces():
        pytest.skip("not root")
    monkeypatch.setattr(shaped_hosts, "_may_make_namespaces", lambda: as_root)
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with ShapedHosts(2, "1gbit") as hosts:
        outputs = run_ranks([script(MEET)], hosts=hosts, ranks_per_host=1, timeout_s=300)
        assert len(held_namespaces()) == 3  # two hosts and the switch
        assert ("--user" in hosts.command_on(0)) is not as_root
    assert outputs == ["0 3 True\n", "0 3 True\n"]
    assert held_namespaces() == set()


@pytest.mark.parametrize(
    ("usable", "hosts", "theirs"),
    [({4, 6}, 2, [[4], [6]]), ({0, 1, 2}, 2, [[0], [1, 2]]), ({0, 1}, 4, [[0], [1], [0], [1]])],
)
def test_hosts_have_processors_of_their_own(monkeypatch: pytest.MonkeyPatch, usable, hosts: int, theirs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    assert [ShapedHosts(hosts).processors(host) for host in range(hosts)] == theirs


@pytest.mark.usefixtures("shaping")
def test_a_rank_runs_on_its_hosts_processors(script):
    with ShapedHosts(2) as hosts:
        outputs = run_ranks([script("import os; print(sorted(os.sched_getaffinity(0)))")], hosts=hosts, timeout_s=300)
        assert outputs == [f"{hosts.processors(host)}\n" for host in range(2)]


@pytest.mark.slow
def test_ranks_without_hosts_meet_on_loopback(script):
    assert run_ranks([script(MEET)], ranks_per_host=2, timeout_s=300) == ["0 3 True\n", "1 3 True\n"]


@pytest.mark.usefixtures("shaping")
def test_a_rank_that_raises_ends_the_others_and_the_hosts(script):
    with pytest.raises(PeerFailed, match=r"rank 1 failed(.|\n)*rank one gives up"), ShapedHosts(2) as hosts:
        run_ranks([script(RAISE_ON_RANK_1)], hosts=hosts, timeout_s=300)
    assert held_namespaces() == set()


@pytest.mark.slow
def test_a_rank_that_does_not_finish_is_ended(script):
    pids: list[int] = []
    with pytest.raises(PeerFailed, match=r"rank 0 did not finish within 5 s"):
        run_ranks(
            [script("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")],
            ranks_per_host=2,
            timeout_s=5,
            on_line=lambda _rank, line: pids.append(int(line)),
        )
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_ranks_end_when_the_process_that_started_them_is_killed(script):
    rank = script("""
        import os, threading, time
        from fxcomp.commands.demo.launch_ranks import exit_with_parent
        threading.Thread(target=exit_with_parent, daemon=True).start()
        print(os.getpid(), flush=True)
        time.sleep(60)
    """)
    starts = f"run_ranks([{rank!r}], on_line=lambda r, line: print(line, flush=True))"
    parent = f"from fxcomp.commands.demo.launch_ranks import run_ranks\n{starts}"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


@pytest.mark.slow
@pytest.mark.usefixtures("shaping")
def test_namespaces_end_with_a_process_that_is_killed():
    kills_itself = """
        import os, signal
        from fxcomp.commands.demo.shaped_hosts import ShapedHosts
        hosts = ShapedHosts(1).__enter__()
        print(hosts.command_on(0)[5], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(kills_itself)]
    pid = int(subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stdout)
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


@pytest.mark.usefixtures("shaping")
@pytest.mark.slow
def test_a_link_carries_no_more_than_the_rate_asked_for_and_the_rate_can_change(script):
    # One host sends 4 MB at 400 Mbit/s (0.08 s), then, after a change of rate, 4 MB at 100 Mbit/s (0.32 s).
    send = script("""
        import os, socket, time
        from fxcomp.commands.demo.shaped_hosts import shape_this_host
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if os.environ["RANK"] == "0":
            with socket.create_server(address) as server:
                peer, _ = server.accept()
            for _ in range(2):
                left = 4_000_000
                while left:
                    left -= len(peer.recv(min(left, 1 << 20)))
                peer.sendall(b"!")
        else:
            for _ in range(200):
                try:
                    peer = socket.create_connection(address)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            for rate in ("400mbit", "100mbit"):
                shape_this_host(rate)
                start = time.perf_counter()
                peer.sendall(bytes(4_000_000))
                peer.recv(1)
                print(32 / (time.perf_counter() - start))  # Mbit/s
    """)
    with ShapedHosts(2, "100mbit") as hosts:
        fast, slow = (float(line) for line in run_ranks([send], hosts=hosts, timeout_s=300)[1].split())
    assert fast < 500
    assert slow < 125


def test_a_network_without_hosts_is_refused():
    with pytest.raises(HostsUnavailable, match="at least one host"):
        ShapedHosts(0)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name, **_: None if name in ("ip", "tc") else f"/bin/{name}")
    assert why_not() == "shaped hosts need Linux and ip and tc (iproute2 and util-linux)"


def test_the_reason_is_told_where_no_namespace_can_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for tool in ("ip", "tc", "taskset", "nsenter", "unshare"):
        (tmp_path / tool).write_text("#!/bin/sh\necho forbidden >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(shaped_hosts, "_PATH", str(tmp_path))
    assert why_not() == "`unshare --user --map-root-user --net` failed: forbidden"
    with pytest.raises(HostsUnavailable, match="failed: forbidden"), ShapedHosts(2):
        pass
