"""One table made of two, and where the two contradict each other."""

from dataclasses import replace

import pytest

from fxcomp.cluster.cluster import Processors
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.merge import merge
from fxcomp.cost.piecewise import Fit, Piece
from fxcomp.cost.roofline import Measured, Roofline
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind

KIND = CollectiveKind.ALL_REDUCE


def collective(gb_per_s: float, source: str = "measured, 9 samples") -> MeasuredCollective:
    return MeasuredCollective.line(KIND, 2, 30.0, gb_per_s, 0.02, source)


OLD = CostTable(
    hardware="a machine",
    date="2026-11-01",
    source="measured",
    collectives={(KIND, "2x1"): collective(1.0), (KIND, "4x1"): collective(1.0)},
    compressors={"int8@cpu*1": CompressorCost.of(CompressorPoint(1000, 10.0, 4.0), CompressorPoint(2000, 20.0, 8.0))},
    compute={"aten.mm f32[2,2] f32[2,2]": Measured(4.0, 0.1, "measured")},
    pack_gb_per_s=4.0,
)
NEW = replace(
    OLD,
    date="2026-11-20",
    collectives={(KIND, "2x1"): collective(0.5), (KIND, "1x2"): collective(8.0)},
    compressors={"int8@cpu*1": CompressorCost.of(CompressorPoint(1000, 11.0, 4.0), CompressorPoint(2000, 21.0, 8.0))},
    pack_gb_per_s=5.0,  # the default
)


def test_a_table_and_itself_agree():
    assert merge(OLD, OLD).table == OLD
    assert merge(OLD, OLD).conflicts == ()


def test_contradictions_come_largest_first_and_say_where():
    slower = replace(OLD, pack_gb_per_s=6.0, collectives=NEW.collectives)
    first, second = merge(OLD, slower).conflicts
    assert first.startswith("all_reduce@2x1, 64 MiB: ")
    assert first.endswith("(+100 %)")
    assert second == "pack_gb_per_s: 4 GB/s and 6 GB/s (+50 %)"


SHARED = replace(
    OLD,
    transport={KIND: TransportCost(10.0, 900.0)},
    processors=Processors(2.0, 1.0),
    contention=1.5,
    overlap_speed=0.8,
    roofline=Roofline(50.0, 10.0, others={"bf16": 100.0, "f64": 1.0}),
    copy_gb_per_s=12.0,
    estimate="a data sheet",
)
OTHER = replace(
    SHARED,
    date="2026-11-20",
    transport={KIND: TransportCost(20.0, 1800.0), CollectiveKind.ALL_GATHER: TransportCost(1.0, 1.0)},
    processors=Processors(4.0, 2.0),
    contention=3.0,
    overlap_speed=0.4,
    roofline=Roofline(50.0, 10.0, others={"bf16": 200.0}),
    copy_gb_per_s=24.0,
    estimate="",
)


def test_what_was_measured_together_about_processors_comes_from_one_table():
    def sharing(table: CostTable) -> tuple[object, ...]:
        return table.transport, table.processors, table.contention, table.overlap_speed

    for merged in (merge(SHARED, OTHER), merge(OTHER, SHARED)):
        assert sharing(merged.table) == sharing(OTHER), "the newer one's"
        assert merged.table.copy_gb_per_s == 24.0
        assert merged.table.roofline == OTHER.roofline
        told = " ".join(merged.conflicts)
        assert "copy_gb_per_s" in told
        assert "roofline bf16" in told
        assert not any(word in told for word in ("transport", "contention", "processors"))
    lone = replace(OTHER, transport={}, processors=Processors(), contention=1.0, overlap_speed=1.0)
    assert sharing(merge(SHARED, lone).table) == sharing(SHARED)
    partly = replace(lone, processors=Processors(8.0, 1.0))
    assert sharing(merge(SHARED, partly).table) == ({}, Processors(8.0, 1.0), 1.0, 1.0)


@pytest.mark.parametrize("turned", [False, True])
def test_the_newer_table_wins_and_assumptions_lose(turned: bool):
    merged = merge(NEW, OLD) if turned else merge(OLD, NEW)
    table = merged.table
    assert set(table.collectives) == {(KIND, "2x1"), (KIND, "4x1"), (KIND, "1x2")}
    assert table.collectives[KIND, "2x1"].gb_per_s(KIND) == pytest.approx(0.5)
    assert table.compressors == NEW.compressors
    assert table.pack_gb_per_s == 4.0
    assert table.date == "2026-11-20"
    (conflict,) = merged.conflicts
    assert conflict.startswith("all_reduce@2x1")


def test_a_measured_value_wins_over_a_newer_assumed_one():
    assumed = CostTable(
        source="assumed",
        date="2026-12-01",
        collectives={(KIND, "2x1"): collective(3.0, "assumed")},
        compute={"aten.mm f32[2,2] f32[2,2]": Measured(9.0, 0.1, "assumed"), "aten.relu f32[2]": Measured(1.0)},
    )
    for merged in (merge(OLD, assumed), merge(assumed, OLD)):
        assert merged.table.collectives[KIND, "2x1"].gb_per_s(KIND) == pytest.approx(1.0)
        assert merged.table.compute["aten.mm f32[2,2] f32[2,2]"].us == 4.0
        assert "aten.relu f32[2]" in merged.table.compute
        assert merged.table.hardware == "a machine"
        assert merged.table.source == "measured"
        assert len(merged.conflicts) == 2


def test_a_measured_roofline_wins_over_an_assumed_one():
    measured = replace(OLD, roofline=Roofline(90.0, 9.0, source="measured"))
    for merged in (merge(measured, NEW), merge(NEW, measured)):
        assert merged.table.roofline == measured.roofline
        assert not any("roofline" in conflict for conflict in merged.conflicts)


def test_tables_of_different_machines_are_not_put_together():
    with pytest.raises(BadOption, match="of different machines and cannot be one: 'a machine' and 'another'"):
        merge(OLD, replace(NEW, hardware="another"))


def test_of_two_tables_of_one_day_the_second_wins():
    second = replace(NEW, date=OLD.date)
    assert merge(OLD, second).table.collectives[KIND, "2x1"].gb_per_s(KIND) == pytest.approx(0.5)
    assert merge(second, OLD).table.collectives[KIND, "2x1"].gb_per_s(KIND) == pytest.approx(1.0)


def test_collectives_are_compared_at_sizes_that_both_know():
    """A guess of one of them contradicts nothing."""

    def known_to(largest: float, us_per_byte: float) -> CostTable:
        pieces = Piece(0.0, 30.0, 0.001), Piece(1e5, 130.0 - 1e5 * us_per_byte, us_per_byte)
        return replace(OLD, collectives={(KIND, "2x1"): MeasuredCollective(2, Fit(pieces, 1e3, largest, 9))})

    assert merge(known_to(1e5, 0.001), known_to(1e7, 0.004)).conflicts == ()
    assert merge(known_to(1e7, 0.001), known_to(1e7, 0.004)).conflicts != ()
