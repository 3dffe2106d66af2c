"""A process that ends closes its socket, and nothing else does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from unittest.mock import patch

import pytest
from helpers.ranks import run_alone

from fxcomp import compat
from fxcomp.runtime import presence as room
from fxcomp.runtime.presence import Address, Presence, place_of

SPAWNED = multiprocessing.get_context("spawn")


def has_gone(address: Address) -> bool:
    try:
        place_of(address)
    except ProcessLookupError:
        return True
    return False


def is_soon(asked: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not asked() and time.monotonic() < until:
        time.sleep(0.01)
    return asked()


def closed() -> Presence:
    gone = Presence("127.0.0.1")
    gone.close()
    gone._thread.join(10)
    return gone


def lives(told: Connection) -> None:
    """Fork a child that stays, and be killed: the child must not seem to be this process."""
    mine = Presence("127.0.0.1")
    mine.doing, mine.steps = "forking", {"a step": 3}
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
    address, child = here.recv(), 0
    try:
        assert is_soon(lambda: place_of(address) == {"doing": "forking", "steps": {"a step": 3}})
        here.send("fork")
        child = here.recv()
        here.send("end")
        assert is_soon(lambda: has_gone(address))
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.join()


def test_a_process_that_does_not_answer_is_not_taken_for_gone():
    asked, ends = threading.Event(), threading.Event()

    def computes(*_: object) -> None:
        asked.set()
        ends.wait(60)

    with patch.object(Presence, "_answer", computes):
        busy = Presence("127.0.0.1")
        assert [place_of(busy.address) for _ in range(20)] == [{}] * 20
        assert asked.is_set()
        ends.set()
        busy.close()


def test_an_address_that_is_another_machines_own_tells_nothing():
    host, port, _ = closed().address
    assert has_gone((host, port, compat.host_name()))
    assert not has_gone((host, port, "elsewhere"))


def test_a_machine_that_refuses_and_never_let_anybody_in_tells_nothing():
    one, gone = Presence("127.0.0.1"), closed()
    late = "0.0.0.0", gone.address[1], "elsewhere"
    with patch.object(room, "_REACHED", set[str]()):
        assert not has_gone(late), "a firewall may refuse, too"
        assert not has_gone(("0.0.0.0", one.address[1], "elsewhere"))
        assert has_gone(late)
    one.close()


def opens_and_closes() -> tuple[tuple[int, int], ...]:
    def opened() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = opened()
    one = Presence("127.0.0.1")
    place_of(one.address)
    meanwhile = opened()
    one.close()
    one._thread.join(10)
    return before, meanwhile, opened()


def test_closing_leaves_no_thread_and_no_file_open():
    before, meanwhile, after = run_alone(opens_and_closes)
    assert before < meanwhile
    assert before == after


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[1]", b"HTTP/1.1 400", b"\xff", b'{"doing": "", "steps": 3}', b'{"doing": "", "steps": {"a": []}}'],
)
def test_another_program_that_listens_on_the_port_is_not_taken_for_a_rank(answer: bytes):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=lambda: _answered(listener, answer))
        answering.start()
        assert place_of(("127.0.0.1", listener.getsockname()[1], compat.host_name())) == {}
        answering.join()


def _answered(listener: socket.socket, answer: bytes) -> None:
    with listener.accept()[0] as connection:
        connection.sendall(answer)


def test_a_process_that_answers_endlessly_is_not_read_to_its_end():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=lambda: _answered_until_closed(listener))
        answering.start()
        assert place_of(("127.0.0.1", listener.getsockname()[1], compat.host_name())) == {}
        answering.join()


def _answered_until_closed(listener: socket.socket) -> None:
    with listener.accept()[0] as connection, suppress(OSError):
        while True:
            connection.sendall(bytes(10_000))
