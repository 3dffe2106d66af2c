"""The cost table: estimates that never fail, and a cache that loses nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from fxcomp.cluster.cluster import Cluster, Level, Processors
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.measured import FASTEST_GB_PER_S, CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.piecewise import Fit, Piece
from fxcomp.cost.roofline import Measured, Roofline
from fxcomp.cost.table import CostTable, collective_source
from fxcomp.cost.table_cache import cache_path, cached_table, load_table
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device

CLUSTER = Cluster(2, 2, intra=Link(1, 10), inter=Link(10, 1))
FLAT = Cluster(4, 1, intra=Link(1, 10), inter=Link(10, 1))
INT8 = parse_compressor("int8")
TABLE = CostTable(
    hardware="a machine",
    versions="1",
    date="2026-11-20",
    source="test",
    compute={"aten.mm f32[2,2] f32[2,2]": Measured(3.5, 0.1, "test")},
    roofline=Roofline(100.0, 20.0),
    transport={CollectiveKind.ALL_GATHER: TransportCost(10.0, 900.0)},
    processors=Processors(1.5, 1.0),
    collectives={
        (CollectiveKind.ALL_REDUCE, reach): MeasuredCollective.line(
            CollectiveKind.ALL_REDUCE, 4, 20.0, 0.5, 0.05, "measured, 9 samples"
        )
        for reach in ("2x2", "4x1")
    },
    compressors={f"{INT8}@gpu": CompressorCost.of(CompressorPoint(1000, 10.0, 4.0), CompressorPoint(2000, 20.0, 6.0))},
)


def test_a_table_goes_to_json_and_back():
    assert CostTable.from_json(TABLE.to_json()) == TABLE
    assert CostTable.from_json(CostTable().to_json()) == CostTable()


def test_a_measured_collective_prints():
    measured = TABLE.collectives[CollectiveKind.ALL_REDUCE, "2x2"]
    text = measured.describe(CollectiveKind.ALL_REDUCE)
    assert text == "20 us a step, 4gbit a rank; off by 5.0 % (measured, 9 samples)"


def test_what_was_measured_live_wins_over_the_clusters_link():
    live = TABLE.collective(CollectiveKind.ALL_REDUCE, Level.WORLD, 1000, CLUSTER).us
    assert live == pytest.approx(6 * 20.0 + 1.5 * 1000 / 500)
    by_link = replace(TABLE, collectives={}).collective(CollectiveKind.ALL_REDUCE, Level.WORLD, 1000, CLUSTER).us
    assert by_link == pytest.approx(6 * 10.0 + 1.5 * 1000 / 1000)
    assert collective_source(TABLE, CollectiveKind.ALL_REDUCE, Level.WORLD, CLUSTER) == "measured, 9 samples"
    scatter = collective_source(TABLE, CollectiveKind.REDUCE_SCATTER, Level.WORLD, CLUSTER)
    assert scatter == "assumed, as all_reduce: measured, 9 samples"


def test_a_collective_that_was_not_measured_takes_the_link_of_one_that_was():
    gpu = replace(TABLE, copy_gb_per_s=10.0)
    scatter = gpu.collective(CollectiveKind.REDUCE_SCATTER, Level.WORLD, 1000, FLAT).us
    assert scatter == pytest.approx(3 * 20.0 + 0.75 * 1000 / 500)
    # Sent straight: 4/3 of a byte crosses a host's uplink for each that one of its two ranks sends; then the sum.
    direct = TABLE.collective(CollectiveKind.REDUCE_SCATTER, Level.WORLD, 1000, CLUSTER).us
    assert direct == pytest.approx(20.0 + 0.75 * 4 / 3 * 1000 / 500 + 1000 / 5000)
    assert TABLE.collective(CollectiveKind.ALL_REDUCE, Level.INTRA, 0, CLUSTER).us == pytest.approx(2 * 1.0)


def test_a_level_that_joins_the_same_ranks_shares_their_measurement():
    flat = Cluster(4, 1, intra=Link(1, 10), inter=Link(10, 1))
    for level in (Level.INTER, Level.WORLD):
        assert TABLE.collective(CollectiveKind.ALL_REDUCE, level, 0, flat).us == pytest.approx(6 * 20.0)


def test_compressor_costs_lie_on_lines_between_points_and_grow_beyond():
    sizes = (1, 1000, 1500, 2000, 4000)
    assert [TABLE.encode_us(INT8, n) for n in sizes] == [10.0, 10.0, 15.0, 20.0, 40.0]
    assert TABLE.decode_us(INT8, 1500, ranks=3) == pytest.approx(15.0)


def test_further_payloads_cost_what_they_add_to_the_first():
    points = [CompressorPoint(n, 1.0, decode_us=n / 10, decode_more_us=n / 100) for n in (1000, 2000)]
    table = CostTable(compressors={f"{INT8}@gpu": CompressorCost.of(*points)})
    assert [table.decode_us(INT8, 1000, ranks) for ranks in (1, 2, 16)] == pytest.approx([100.0, 110.0, 250.0])
    assert table.decode_us(INT8, 1500, ranks=3) == pytest.approx(150.0 + 30.0)


def test_decoding_that_was_not_measured_reads_every_payload_and_writes_one_mean():
    one, many = (CostTable().decode_us(parse_compressor("sign"), 10**6, ranks) for ranks in (1, 9))
    assert [one, many] == pytest.approx([500.0, 1300.0])  # 5 and 13 bytes a value at 10 GB/s


def test_a_noisy_measurement_does_not_make_more_elements_cheaper():
    points = [CompressorPoint(n, us, us) for n, us in ((100, 5.0), (200, 9.0), (400, 7.0), (800, 9.5))]
    table = CostTable(compressors={f"{INT8}@gpu": CompressorCost.of(*points)})
    times = [table.encode_us(INT8, n) for n in range(50, 2000, 25)]
    assert times == sorted(times)


def test_what_was_not_measured_is_assumed_and_says_so():
    sign = parse_compressor("sign")
    assert CostTable().encode_us(sign, 10**6) == pytest.approx(1200.0)
    assert CostTable().compressor_source(sign) == "assumed, by memory bandwidth"
    other = parse_compressor("int8(block=128)")
    if str(other) != str(INT8):
        assert TABLE.encode_us(other, 1000) == 10.0
        assert TABLE.compressor_source(other) == f"assumed, as {INT8}@main"
    assert TABLE.compressor_source(INT8) == "measured"
    assert TABLE.compute_us("aten.mm f32[2,2] f32[2,2]", 1e9, 1).us == 3.5
    assert TABLE.compute_us("aten.mm f32[9,9] f32[9,9]", 1e9, 1) == Measured(1e4)


def test_the_pool_is_the_device_where_there_is_no_other_and_shares_its_processors():
    assert TABLE.encode_us(INT8, 1000, Device.CPU) == 10.0
    assert TABLE.copy_us(1000) == 0.0
    assert TABLE.pool_load == 1.0
    with_gpu = replace(TABLE, copy_gb_per_s=10.0)
    assert with_gpu.pool_load == 0.0
    assert with_gpu.compressor_source(INT8, Device.CPU) == "assumed, by memory bandwidth"
    assert with_gpu.copy_us(10_000) == 1.0


def test_a_collectives_load_is_its_processor_time_over_its_time():
    kind, level = CollectiveKind.ALL_REDUCE, Level.WORLD
    assert CostTable().collective(kind, level, 10**6, CLUSTER).load == 0.0
    table = replace(TABLE, transport={kind: TransportCost(us=30.0, us_per_mb=1000.0)})
    assert table.collective(kind, level, 10**6, CLUSTER).load == pytest.approx((30 + 1500) / (6 * 20 + 1.5e6 / 500))
    # What was not measured is as an all_reduce of as many bytes sent.
    scatter = table.collective(CollectiveKind.REDUCE_SCATTER, level, 10**6, FLAT).load
    assert scatter == pytest.approx((30 + 750) / (20 + 0.75e6 / 500 + 200))
    assert table.collective(kind, Level.INTRA, 0, Cluster(2, 1, intra=Link(1, 10), inter=Link(10, 1))).load == 0.0


def test_a_table_survives_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_table("a machine", "1", lambda _: TABLE) == TABLE
    assert cached_table("a machine", "1", lambda known: known or pytest.fail("measured twice")) == TABLE
    assert [path.name for path in (tmp_path / "fxcomp").iterdir()] == [cache_path("a machine", "1").name]
    assert cache_path("a machine", "1") != cache_path("a machine", "2")


def test_a_cached_table_is_completed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    point = CompressorCost.of(CompressorPoint(1000, 1.0, 1.0, 3.0))

    def with_sign(known: CostTable | None) -> CostTable:
        assert known is not None
        return replace(known, compressors={**known.compressors, "sign@gpu": point})

    cached_table("a machine", "1", lambda _: TABLE)
    assert cached_table("a machine", "1", with_sign).compressors["sign@gpu"] == point
    assert load_table(cache_path("a machine", "1")) == with_sign(TABLE)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"version": 7}', b"\xff\xfe"])
def test_a_corrupt_cache_is_kept_and_measured_again(
    content: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path("a machine", "1")
    path.parent.mkdir()
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(raw)
    with pytest.warns(UserWarning, match="cannot read the cost table .*, measuring again: "):
        assert cached_table("a machine", "1", lambda _: TABLE) == TABLE
    assert path.with_name(path.name + "~").read_bytes() == raw
    assert load_table(path) == TABLE


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fxcomp").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="cost table"):
        assert cached_table("a machine", "1", lambda _: TABLE) == TABLE


def test_data_that_is_no_table_is_refused():
    with pytest.raises(BadOption, match="this is not a cost table: roofline is missing"):
        CostTable.from_json({k: v for k, v in TABLE.to_json().items() if k != "roofline"})
    for version in (5, "6"):
        with pytest.raises(
            BadOption, match=rf"its version is {version!r}; this fxcomp reads version 6, which .* writes"
        ):
            CostTable.from_json({**TABLE.to_json(), "version": version})
    with pytest.raises(BadOption, match=r"its version is None; this fxcomp reads version 6"):
        CostTable.from_json({"hardware": "a machine"})
    for part, key in (("collectives", "all_reduce"), ("compressors", "int8")):
        one = next(iter(TABLE.to_json()[part].values()))
        with pytest.raises(BadOption, match=f"the key {part}.{key} must be a co"):
            CostTable.from_json({**TABLE.to_json(), part: {key: one}})
    with pytest.raises(BadOption, match=r"compressors.int8@gpu.points must be a list of one entry or more, not \[\]"):
        CostTable.from_json({**TABLE.to_json(), "compressors": {"int8@gpu": {"points": []}}})


def test_groups_that_sit_differently_have_their_own_prices():
    """Four ranks of four hosts, and four ranks of one host: the same number of ranks, not the same time."""
    kind = CollectiveKind.ALL_REDUCE
    table = CostTable(
        collectives={
            (kind, "4x1"): MeasuredCollective.line(kind, 4, 50.0, 0.1),
            (kind, "1x4"): MeasuredCollective.line(kind, 4, 2.0, 10.0),
        }
    )
    spread, together = (Cluster(h, r, intra=Link(1, 10), inter=Link(10, 1)) for h, r in ((4, 1), (1, 4)))
    times = [table.collective(kind, Level.WORLD, 10**6, where).us for where in (spread, together)]
    assert times == pytest.approx([300.0 + 15_000.0, 12.0 + 150.0])


def test_a_collective_priced_as_another_pays_for_its_own_steps_on_every_piece():
    kind = CollectiveKind.ALL_REDUCE
    bent = Fit((Piece(0.0, 60.0, 0.001), Piece(1e6, -940.0, 0.002)), 1e3, 1e7, 20)
    table = CostTable(collectives={(kind, "4x1"): MeasuredCollective(4, bent)}, copy_gb_per_s=10.0)
    half = table.collective(CollectiveKind.REDUCE_SCATTER, Level.WORLD, 4e6, FLAT).us
    assert half == pytest.approx(bent.at(2e6) - 30.0)
    sizes = [10.0**k for k in range(9)]
    for other in CollectiveKind:
        times = [table.collective(other, Level.WORLD, size, FLAT).us for size in sizes]
        assert times == sorted(times)


@pytest.mark.parametrize("kind", [CollectiveKind.ALL_TO_ALL, CollectiveKind.REDUCE_SCATTER])
def test_what_is_sent_straight_is_priced_by_a_gather_of_the_parts_that_was_sent_straight(kind: CollectiveKind):
    """To every rank a message of n/p bytes from every other one: what they hold, the links do not see."""
    gathered = Fit((Piece(0.0, 50.0, 0.003), Piece(1e5, -50.0, 0.004)), 1e3, 1e7, 20)
    known = {(CollectiveKind.ALL_GATHER, "4x1"): MeasuredCollective(4, gathered)}
    known[CollectiveKind.ALL_REDUCE, "4x1"] = MeasuredCollective.line(CollectiveKind.ALL_REDUCE, 4, 99.0, 0.1)
    table = CostTable(collectives=known)
    for size in (0.0, 4e3, 4e6):
        summed_us = table.pack_us(size) if kind is CollectiveKind.REDUCE_SCATTER else 0.0
        us = table.collective(kind, Level.WORLD, size, FLAT).us
        assert us == pytest.approx(gathered.at(size / 4) + summed_us)
    assert collective_source(table, kind, Level.WORLD, FLAT) == "assumed, as all_gather: measured"


def test_threads_that_are_not_measured_take_the_nearest_number_and_say_so():
    costs = {f"{INT8}@cpu*{n}": CompressorCost.of(CompressorPoint(1000, 100.0 / n, 1.0)) for n in (1, 2, 8)}
    table = CostTable(compressors=costs, threads=2)
    assert table.encode_us(INT8, 1000, Device.CPU) == 50.0
    assert table.compressor_source(INT8, Device.CPU) == "measured"
    table = replace(table, threads=6)
    assert table.encode_us(INT8, 1000, Device.CPU) == 12.5
    assert table.compressor_source(INT8, Device.CPU) == f"assumed, as {INT8}@pool*8"
    assert replace(table, threads=None).compressor_source(INT8, Device.CPU) == "measured"


def test_no_collective_is_faster_than_anything_that_was_measured():
    """A time that hardly grows with size tells of latency, not of a bandwidth."""
    kind = CollectiveKind.ALL_REDUCE
    for us_per_byte in (0.0, 1e-15):
        assert MeasuredCollective(2, Fit.line(30.0, us_per_byte)).gb_per_s(kind) == FASTEST_GB_PER_S


def test_a_table_is_written_to_what_a_link_leads_to_and_others_may_read_it(tmp_path: Path):
    (tmp_path / "link.json").symlink_to(tmp_path / "table.json")
    CostTable().save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert CostTable.read(tmp_path / "table.json") == CostTable()
    plain = tmp_path / "plain"
    plain.write_text("")
    assert (tmp_path / "table.json").stat().st_mode == plain.stat().st_mode
