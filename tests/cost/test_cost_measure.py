"""Measuring: a fit finds the link again, decisions follow the returned numbers, kernels give plausible points."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import Link
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.compressors.examples import examples
from fxcomp.cost import collectives as formulas
from fxcomp.cost import measure
from fxcomp.cost.collectives import Library
from fxcomp.cost.measure import (
    MOST_RECEIVED,
    fitted_collective,
    measure_collectives,
    measure_compressors,
    measure_copy,
    measure_memory,
)
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device
from fxcomp.planning import measure_machine

FLAT = Cluster(4, 1, intra=Link(1, 10), inter=Link(10, 1))


class Network:
    """Times collectives by the formulas, with noise, and counts what was spent."""

    def __init__(self, alpha_us: float, gb_per_s: float, cluster: Cluster, noise: float = 0.05) -> None:
        self.alpha_us, self.gb_per_s, self.cluster, self.noise = alpha_us, gb_per_s, cluster, noise
        self.calls: list[tuple[CollectiveKind, Level, int]] = []
        self.spent_s = 0.0
        self.random = random.Random(0)

    def __call__(self, kind: CollectiveKind, level: Level, size: int) -> float:
        self.calls.append((kind, level, size))
        us = formulas.time_us(kind, self.cluster.ranks_at(level), size, self.alpha_us, self.gb_per_s)
        us *= 1 + self.noise * self.random.random()
        if self.random.random() < self.noise:
            us *= 4  # somebody else's traffic
        self.spent_s += us * 1e-6
        return us * 1e-6


@pytest.mark.parametrize("gbit", [0.1, 1.0, 25.0])
def test_a_fit_finds_the_link_again_within_the_budget(gbit: float):
    network = Network(50.0, gbit / 8, FLAT)
    fits = measure_collectives(network, FLAT, budget_s=3.0, library=Library.GLOO)
    assert list(fits) == [(CollectiveKind.ALL_REDUCE, "4x1"), (CollectiveKind.ALL_GATHER, "4x1")]
    for (kind, _), fit in fits.items():
        assert fit.gb_per_s(kind) == pytest.approx(gbit / 8, rel=0.1)
        assert fit.alpha_us(kind) == pytest.approx(50.0, rel=0.3)
        assert fit.spread < 0.1
        assert fit.source.startswith("measured")
    assert network.spent_s < 4.0


def test_every_level_of_a_cluster_with_levels_is_measured():
    cluster = Cluster(2, 2, intra=Link(1, 10), inter=Link(10, 1))
    fits = measure_collectives(Network(10.0, 1.0, cluster), cluster)
    assert {reach for _, reach in fits} == {"1x2", "2x1*2", "2x2"}
    assert measure_collectives(Network(10.0, 1.0, cluster), Cluster(1, 1, Link(1, 1), Link(1, 1))) == {}


def test_the_same_numbers_lead_to_the_same_measurements():
    one, other = Network(30.0, 0.2, FLAT), Network(30.0, 0.2, FLAT)
    assert measure_collectives(one, FLAT) == measure_collectives(other, FLAT)
    assert one.calls == other.calls


PAIR = Cluster(2, 1, intra=Link(1, 10), inter=Link(10, 1))


@pytest.mark.parametrize(
    ("cluster", "library", "where"),
    [
        (FLAT, Library.GLOO, []),
        (PAIR, Library.NCCL, []),
        (FLAT, Library.NCCL, ["4x1"]),
        (Cluster(2, 3, intra=Link(1, 10), inter=Link(10, 1)), Library.GLOO, ["2x3"]),
    ],
    ids=["sent like a gather", "two ranks", "beside rings", "ranks share a link"],
)
def test_an_all_to_all_is_measured_where_no_gather_tells_its_time(cluster: Cluster, library: Library, where: list[str]):
    fits = measure_collectives(Network(10.0, 1.0, cluster), cluster, library=library)
    assert [reach for kind, reach in fits if kind is CollectiveKind.ALL_TO_ALL] == where


def test_the_longest_transfer_uses_up_the_budget_and_tells_the_rate_of_longer_ones():
    """A byte of a long transfer takes longer than one of a short transfer, as over TCP."""

    def us(size: float) -> float:
        return 500 + size / 12.5 * (1.0 + 0.03 * max(0.0, math.log10(size / 2e5)))

    asked: list[int] = []

    def link(_: CollectiveKind, __: Level, size: int) -> float:
        asked.append(size)
        return 1e-6 * us(size)

    kind = CollectiveKind.ALL_REDUCE
    found = measure_collectives(link, PAIR, budget_s=1.5, kinds=[kind])[kind, "2x1"]
    assert max(asked) > 8 << 20
    assert sum(map(us, asked)) < 1.5e6
    assert found.us(24e6) == pytest.approx(us(24e6), rel=0.015)


def test_a_disturbed_last_sample_is_not_taken_for_the_links_rate():
    kind = CollectiveKind.ALL_REDUCE
    samples = [(1 << k, 1e-6 * (100 + (1 << k) / 12.5)) for k in range(10, 24, 2)]
    disturbed = fitted_collective(2, [*samples[:-1], (samples[-1][0], 3 * samples[-1][1])])
    assert disturbed.gb_per_s(kind) == pytest.approx(fitted_collective(2, samples).gb_per_s(kind), rel=0.1)


def test_bursts_of_a_shaped_link_do_not_hide_its_rate():
    def shaped(kind: CollectiveKind, level: Level, size: int) -> float:
        wire = formulas.wire_bytes(kind, 4, size)
        assert level is Level.WORLD
        return 1e-6 * (formulas.steps(kind, 4) * 20 + min(wire, 32_768) / 1000 + max(0.0, wire - 32_768) / 12.5)

    kind = CollectiveKind.ALL_REDUCE
    found = measure_collectives(shaped, FLAT, rounds=2)[kind, "4x1"]
    assert found.gb_per_s(kind) == pytest.approx(0.0125, rel=0.1)
    for size in (3_000, 10_000, 100_000, 10_000_000):
        assert found.fit.at(size) == pytest.approx(1e6 * shaped(kind, Level.WORLD, size), rel=0.15)


def test_a_fit_never_gives_a_negative_latency_or_an_infinite_bandwidth():
    kind = CollectiveKind.ALL_REDUCE
    falling = fitted_collective(2, [(1024, 3e-3), (4096, 2e-3), (16384, 1e-3)])
    assert falling.alpha_us(kind) >= 0
    assert 0 < falling.gb_per_s(kind) < 1001
    curved = fitted_collective(2, [(size, 1e-12 * size**1.5) for size in (1024, 4096, 16384, 65536)])
    assert curved.alpha_us(kind) == 0.0


def test_more_rounds_take_the_sizes_between_and_stay_within_the_budget():
    network = Network(50.0, 0.125, FLAT)
    kinds = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.BROADCAST)
    fits = measure_collectives(network, FLAT, budget_s=10.0, kinds=kinds, largest=64 << 20, rounds=3)
    assert [kind for kind, _ in fits] == list(kinds)
    sizes = {size for _, _, size in network.calls}
    assert {1024, 2048, 4096, 32 << 20, 64 << 20} <= sizes
    assert network.spent_s < 10.5


def test_a_slow_link_stops_at_the_sizes_that_the_budget_allows():
    network = Network(50.0, 0.00125, FLAT)
    measure_collectives(network, FLAT, budget_s=1.0, rounds=3)
    assert max(size for _, _, size in network.calls) < 1 << 20
    assert network.spent_s < 1.5


@pytest.mark.parametrize("ranks", [8, 24, 64])
def test_a_gather_among_many_ranks_is_measured_with_less_each(ranks: int):
    many = Cluster(ranks, 1, intra=Link(1, 10), inter=Link(10, 10))
    network = Network(5.0, 10.0, many)
    measure_collectives(network, many, budget_s=100.0, largest=64 << 20)
    largest = {kind: max(size for other, _, size in network.calls if other is kind) for kind, *_ in network.calls}
    assert MOST_RECEIVED / 2 < largest[CollectiveKind.ALL_GATHER] * ranks <= MOST_RECEIVED
    assert largest[CollectiveKind.ALL_REDUCE] == 64 << 20


@pytest.mark.one_in(4)
@pytest.mark.parametrize("compressor", examples(), ids=str)
def test_every_compressor_is_measured_at_growing_sizes(compressor: Compressor):
    key = f"{compressor}@gpu*{torch.get_num_threads()}"
    points = measure_compressors([compressor], sizes=(1024, 4096), each_s=10.0)[key].points
    assert [point.elements for point in points] == [1024, 4096]
    assert all(point.encode_us > 0 and point.decode_us > 0 for point in points)
    assert all((point.propose_us > 0) == (compressor.facts.agreement is not None) for point in points)


def test_decoding_one_payload_and_several_tells_what_each_adds(monkeypatch: pytest.MonkeyPatch):
    int8 = parse_compressor("int8")
    decoded: list[int] = []

    def decode(_: Compressor, payloads: torch.Tensor, ranks: int, *__: object) -> None:
        decoded.append(ranks)
        assert payloads.numel() == ranks * int8.payload_elements((1024,))

    def median_us(run: Callable[[], object], **_: object) -> float:
        decoded.clear()
        run()
        return 30.0 + 2.0 * decoded[0] if decoded else 7.0

    monkeypatch.setattr(type(int8), "decode", decode)
    monkeypatch.setattr(measure, "median_us", median_us)
    (cost,) = measure_compressors([int8], sizes=(1024,)).values()
    assert [cost.decode_us(1024, payloads) for payloads in (1, 2, 4, 8, 16)] == pytest.approx([32, 34, 38, 46, 62])


def test_a_compressor_that_takes_too_long_stops_after_two_sizes():
    (cost,) = measure_compressors([parse_compressor("int8")], sizes=(1024, 4096, 1 << 20), each_s=0.0).values()
    assert [point.elements for point in cost.points] == [1024, 4096]
    (cost,) = measure_compressors([parse_compressor("int8")], sizes=(4096, 1024, 8192), each_s=10.0).values()
    assert [point.elements for point in cost.points] == [1024, 4096, 8192]


class Passed(TorchDispatchMode):
    """Counts the bytes that sums read and copies move."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.sum.default, torch.ops.aten.copy_.default):
            self.bytes += sum(tensor.nbytes for tensor in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["int8", "bf16", "powersgd(2)"])
def test_every_timing_begins_with_caches_that_hold_something_else(name: str, monkeypatch: pytest.MonkeyPatch):
    def median_us(_: Callable[[], object], *, before: Callable[[], object], **__: object) -> float:
        with Passed() as passed:
            before()
        assert passed.bytes >= measure.CPU_CACHES
        return 1.0

    monkeypatch.setattr(measure, "median_us", median_us)
    (cost,) = measure_compressors([parse_compressor(name)], sizes=(1024, 1 << 20, 9 << 20)).values()
    assert len(cost.points) == 3


def test_compressors_that_a_cached_table_lacks_are_measured_and_only_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[list[str]] = []

    def points(compressors: Sequence[Compressor], *, device: Device = Device.GPU, **_: object) -> object:
        asked.append([str(c) for c in compressors])
        return {f"{c}@{device.value}": CompressorCost.of(CompressorPoint(1000, 1.0, 1.0)) for c in compressors}

    monkeypatch.setattr(measure_machine, "measure_compressors", points)
    int8, sidco = parse_compressor("int8"), parse_compressor("sidco(0.01)")
    here = torch.device("cpu")
    measure_machine.machine_costs([int8], here)
    table = measure_machine.machine_costs([int8, sidco, sidco], here)
    assert asked == [["int8"], ["sidco(0.01)"]], "once for both places: the pool is the device"
    assert {"int8@gpu", "int8@cpu", "sidco(0.01)@gpu", "sidco(0.01)@cpu"} == set(table.compressors)
    assert table.compressor_source(sidco) == table.compressor_source(int8) == "measured"
    assert measure_machine.machine_costs([sidco], here) == table
    assert len(asked) == 2


def test_memory_and_matrix_products_are_measured():
    pack_gb_per_s, roofline = measure_memory()
    assert pack_gb_per_s > 0
    assert roofline.gb_per_s == pytest.approx(2 * pack_gb_per_s)
    assert roofline.gflops > 0
    assert measure_copy(torch.device("cpu")) is None
