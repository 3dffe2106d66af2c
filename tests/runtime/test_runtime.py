"""The lines of an emitted step, without a network."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadTensor
from fxcomp.runtime.host_pool import PoolThread
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import NullTransport


@pytest.fixture
def rt():
    runtime = Runtime(NullTransport(), torch.device("cpu"))
    yield runtime
    runtime.close()


def test_packing_flattens_scales_and_keeps_its_buffer(rt: Runtime):
    gradients = (torch.arange(4.0).view(2, 2), torch.tensor([10.0]))
    first = rt.pack("pack_0", ("a", "b"), gradients, 0.5)
    assert first.tolist() == [0.0, 0.5, 1.0, 1.5, 5.0]
    second = rt.pack("pack_0", ("a", "b"), gradients, 1.0)
    assert second.data_ptr() == first.data_ptr()
    assert second.tolist() == [0.0, 1.0, 2.0, 3.0, 10.0]


def test_packing_takes_gradients_in_any_memory_order(rt: Runtime):
    gradient = torch.arange(6.0).view(2, 3).t()
    assert rt.pack("p", ("a",), (gradient,), 1.0).tolist() == gradient.flatten().tolist()


def test_turning_puts_the_parts_of_all_rows_together(rt: Runtime):
    rows = torch.tensor([0, 1, 2, 10, 11, 12], dtype=torch.uint8)
    assert rt.turn("turned_0", rows, 2, (2, 1)).tolist() == [0, 1, 10, 11, 2, 12]
    assert rt.turn("turned_1", rows, 3, (0, 2)).tolist() == rows.tolist()


@pytest.mark.parametrize("name", ["int8", "sign", "topk(0.25)", "bf16"])
def test_compressing_on_the_pool_gives_what_compressing_here_gives(rt: Runtime, name: str):
    compressor = parse_compressor(name)
    value = torch.randn(40, generator=torch.Generator().manual_seed(0))
    residuals = [torch.zeros(40) if compressor.needs_error_feedback else None for _ in range(2)]
    here = rt.compress("here", compressor, value, residuals[0], (30, 10))
    there = rt.compress("there", compressor, rt.d2h("on_host", value), residuals[1], (30, 10))
    assert isinstance(there, Future)
    assert torch.equal(rt.h2d("back", there), here)
    if compressor.needs_error_feedback:
        assert torch.equal(residuals[0], residuals[1])
    ranks = 1
    means = [rt.decompress(f"mean_{k}", compressor, p, ranks, (30, 10)) for k, p in enumerate((here, there))]
    assert torch.equal(means[0], rt.h2d("mean_back", means[1]))


def test_a_compressor_draws_anew_for_every_bucket(rt: Runtime):
    compressor = parse_compressor("int8(stochastic=true)")
    state = compressor.fresh_state(40, 7, 0)
    payloads = [rt.compress("p", compressor, torch.arange(40.0), None, (40,), state=state).clone() for _ in range(2)]
    assert not torch.equal(*payloads)


class LateNetwork(NullTransport):
    """Delivers when somebody waits."""

    def all_reduce(self, value: torch.Tensor, *_: str) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: value.fill_(7.0))


def test_a_result_is_taken_when_its_collective_has_ended():
    rt = Runtime(LateNetwork(), torch.device("cpu"))
    flight = rt.launch("a", "all_reduce", torch.zeros(3), 2, "world")
    assert rt.wait(flight).tolist() == [7.0] * 3
    offloaded = rt.launch("b", "all_reduce", rt.d2h("on_host", torch.zeros(3)), 2, "world")
    assert rt.h2d("back", rt.wait(offloaded)).tolist() == [7.0] * 3
    rt.close()


def test_the_pool_sends_in_order_and_on_one_thread(rt: Runtime):
    seen: list[tuple[int, str]] = []
    numbers = itertools.count()

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        number = next(numbers)
        return lambda *given: (seen.append((number, threading.current_thread().name)), work(*given))[1]

    rt.pool.watch = watched
    values = [rt.d2h(f"on_host_{k}", torch.full((1,), float(k))) for k in range(50)]
    assert [rt.h2d("back", value).item() for value in values] == list(range(50))
    assert [number for number, _ in seen] == list(range(50))
    assert len({name for _, name in seen}) == 1


class HeldNetwork(NullTransport):
    """Delivers each result when it is let go."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, str]] = []
        self.let_go = threading.Event()

    def all_reduce(self, *given: Any) -> SimpleNamespace:
        lane = given[2]
        self.launched.append((lane, threading.current_thread().name))
        return SimpleNamespace(wait=lambda: self.let_go.wait(60.0))


def test_a_wait_on_the_pool_holds_up_no_bucket_that_is_sent_after_it():
    network = HeldNetwork()
    rt = Runtime(network, torch.device("cpu"))
    flights = [rt.launch(f"r_{k}", "all_reduce", rt.d2h(f"h_{k}", torch.ones(3)), 2, "world") for k in range(2)]
    first = rt.pool.after(torch.neg, rt.wait(flights[0]), on=PoolThread.ARRIVING)
    rt.launch("r_2", "all_reduce", rt.d2h("h_2", torch.ones(3)), 2, "world")
    sent_later = rt.d2h("h_3", torch.ones(3))
    assert isinstance(sent_later, Future)
    sent_later.result()
    assert [lane for lane, _ in network.launched] == ["pool"] * 3
    assert len({thread for _, thread in network.launched}) == 1
    assert not network.let_go.is_set()
    network.let_go.set()
    assert isinstance(first, Future)
    assert rt.h2d("back", first).tolist() == [-1.0] * 3
    rt.close()


def test_what_is_compressed_again_waits_for_what_arrives():
    """Two collectives in a row: the second payload is made of the first one's mean."""
    network = HeldNetwork()
    rt, bf16 = Runtime(network, torch.device("cpu")), parse_compressor("bf16")
    payload = rt.compress("p_0", bf16, rt.d2h("h", torch.full((4,), 2.0)), None, (4,))
    mean = rt.decompress("m_0", bf16, rt.wait(rt.launch("r_0", "all_reduce", payload, 1, "world")), 1, (4,))
    again = rt.compress("p_1", bf16, mean, None, (4,))
    last = rt.decompress("m_1", bf16, rt.wait(rt.launch("r_1", "all_reduce", again, 1, "world")), 1, (4,))
    network.let_go.set()
    assert isinstance(last, Future)
    assert rt.h2d("back", last).tolist() == [2.0] * 4
    rt.close()


def test_what_two_threads_need_is_waited_for_once():
    waited: list[str] = []

    class Network(NullTransport):
        def all_reduce(self, *_: Any) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda: waited.append(threading.current_thread().name))

    rt = Runtime(Network(), torch.device("cpu"))
    agreed = rt.wait(rt.launch("agree", "all_reduce", rt.d2h("h", torch.ones(2)), 1, "world"))
    sent = rt.pool.after(torch.neg, agreed)
    arrived = rt.pool.after(torch.add, agreed, sent, on=PoolThread.ARRIVING)
    assert isinstance(arrived, Future)
    assert rt.h2d("back", arrived).tolist() == [0.0] * 2
    rt.close()
    assert len(waited) == 1


def test_time_on_the_pool_begins_when_work_has_what_it_takes(rt: Runtime):
    begun: list[bool] = []
    slow = rt.pool.submit(lambda: threading.Event().wait(0.05), on=PoolThread.ARRIVING)
    rt.pool.watch = lambda work: lambda *given: (begun.append(slow.done()), work(*given))[1]
    rt.pool.after(torch.neg, rt.pool.submit(torch.ones, 2, on=PoolThread.ARRIVING))
    rt.finish()
    assert begun == [True, True]


def test_an_error_on_the_pool_is_raised_where_its_result_is_taken(rt: Runtime):
    int8 = parse_compressor("int8")
    payload = rt.compress("payload", int8, rt.d2h("on_host", torch.zeros(3)), None, (4,))
    with pytest.raises(BadTensor, match="the bucket must have 4 elements, not 3"):
        rt.h2d("back", payload)


def test_bytes_are_counted_by_kind_and_level_and_then_forgotten(rt: Runtime):
    for name in ("a", "b"):
        rt.wait(rt.launch(name, "all_reduce", torch.zeros(10), 1, "world"))
    gathered = rt.wait(rt.launch("c", "all_gather", torch.ones(2, dtype=torch.uint8), 3, "inter"))
    assert gathered.tolist() == [1] * 6
    counters = rt.take_counters()
    assert counters.payload_bytes == {("all_reduce", "world"): 80, ("all_gather", "inter"): 2}
    assert len(counters.waits.for_network) == 3
    assert rt.take_counters().payload_bytes == {}


def test_whoever_checks_gradients_sees_each_with_its_name(rt: Runtime):
    seen: dict[str, float] = {}
    rt.gradients.on_gradient = lambda name, gradient, _: seen.update({name: float(gradient.sum())})
    rt.pack("p", ("a", "b"), (torch.ones(2), torch.ones(3)), 0.5)
    rt.pack("buffers", (), (torch.ones(7),), 1.0)
    (alone,) = rt.complete(("c",), (torch.ones(4),))
    assert seen == {"a": 2.0, "b": 3.0, "c": 4.0}
    assert torch.equal(alone, torch.ones(4))


def test_what_waits_for_a_gradient_is_added_but_not_shown(rt: Runtime):
    seen: dict[str, float] = {}
    rt.gradients.on_gradient = lambda name, gradient, _: seen.update({name: float(gradient.sum())})
    rt.gradients.owed = {"a": torch.full((2,), 3.0), "c": torch.full((4,), 5.0)}
    packed = rt.pack("p", ("a", "b"), (torch.ones(2), torch.ones(1)), 0.5)
    broadcast = torch.ones(1).expand(2, 2)  # gradients may overlap in memory: they are not added to in place
    alone, other = rt.complete(("c", "d"), (broadcast, broadcast))
    assert packed.tolist() == [2.0, 2.0, 0.5]
    assert alone.tolist() == [[6.0] * 2] * 2
    assert other.tolist() == [[1.0] * 2] * 2
    assert seen == {"a": 2.0, "b": 1.0, "c": 4.0, "d": 4.0}


def test_what_waits_for_a_gradient_is_added_to_each_part_of_it(rt: Runtime):
    seen: list[tuple[str, int]] = []
    rt.gradients.on_gradient = lambda name, _, start: seen.append((name, start))
    rt.gradients.owed = {"a": torch.arange(6.0)}
    first = rt.pack("p", ("a",), (torch.ones(2, 2),), 1.0)
    second = rt.pack("q", ("b", "a"), (torch.ones(1), torch.ones(1, 2)), 0.5, (0, 4))
    assert first.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert second.tolist() == [0.5, 2.5, 3.0]
    assert seen == [("a", 0), ("b", 0), ("a", 4)]


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_nothing_is_taken_back_while_the_pool_still_changes_it(value: float):
    runtime = Runtime(NullTransport(), torch.device("cpu"))
    held, changed = threading.Event(), threading.Event()
    runtime.pool.submit(lambda: (held.wait(0.2), changed.set()))
    assert runtime.all_finite([torch.tensor([value])]) is math.isfinite(value)
    assert changed.is_set() is not math.isfinite(value), "a step that counts waits for nothing"
    held.set()
    runtime.finish()
    runtime.close()
