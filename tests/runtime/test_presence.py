"""A process that ends closes its socket, and nothing else does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from unittest.mock import patch

from helpers.ranks import run_alone

from fxcomp import compat
from fxcomp.runtime import presence as room
from fxcomp.runtime.presence import Presence, Sight

SPAWNED = multiprocessing.get_context("spawn")


def is_soon(asked: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not asked() and time.monotonic() < until:
        time.sleep(0.01)
    return asked()


def lives(told: Connection) -> None:
    """Fork a child that stays, and be killed: the child must not seem to be this process."""
    mine = Presence("127.0.0.1")
    mine.place.doing = "forking"
    room._current = (lambda: None), mine  # type: ignore[assignment]
    told.send(mine.address)
    told.recv()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    told.send(child)
    told.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_seen_to_go_though_a_child_of_it_lives():
    here, there = SPAWNED.Pipe()
    process = SPAWNED.Process(target=lives, args=(there,), daemon=True)
    process.start()
    there.close()
    early, child = Sight(here.recv()), 0
    try:
        assert not early.has_gone()
        assert is_soon(lambda: not early.has_gone() and early.place.doing == "forking")
        here.send("fork")
        child = here.recv()
        here.send("end")
        assert is_soon(early.has_gone)
        late = Sight((early._host, early._port, early._host_name))
        assert is_soon(late.has_gone)
    finally:
        early.close()
        if child:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.join()


def test_a_process_that_does_not_answer_is_not_taken_for_gone():
    with patch.object(Presence, "_answers", return_value=True):
        busy = Presence("127.0.0.1")
        sight = Sight(busy.address)
        assert not any(sight.has_gone() for _ in range(20))
        sight.close()
        busy.close()


def test_an_address_that_is_another_machines_own_tells_nothing():
    gone = Presence("127.0.0.1")
    gone.close()
    gone._thread.join(10)
    host, port, _ = gone.address
    assert Sight((host, port, compat.host_name())).has_gone()
    assert not Sight((host, port, "elsewhere")).has_gone()


def test_a_machine_that_refuses_and_never_let_anybody_in_tells_nothing():
    one, gone = Presence("127.0.0.1"), Presence("127.0.0.1")
    gone.close()
    gone._thread.join(10)
    with patch.object(room, "_REACHED", set[str]()):
        late = Sight(("0.0.0.0", gone.address[1], "elsewhere"))
        assert not late.has_gone(), "a firewall may refuse, too"
        early = Sight(("0.0.0.0", one.address[1], "elsewhere"))
        assert not early.has_gone()
        early.close()
        assert late.has_gone()
    one.close()


def opens_and_closes() -> tuple[tuple[int, int], ...]:
    def opened() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = opened()
    one = Presence("127.0.0.1")
    sight = Sight(one.address)
    sight.has_gone()
    meanwhile = opened()
    sight.close()
    one.close()
    one._thread.join(10)
    return before, meanwhile, opened()


def test_closing_leaves_no_thread_and_no_file_open():
    before, meanwhile, after = run_alone(opens_and_closes)
    assert before < meanwhile
    assert before == after
