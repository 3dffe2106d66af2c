"""Reading a cost table: what is wrong is told with its place, and nothing that loads prices nonsense."""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomp.cluster.cluster import Cluster, Level, Processors
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.fit import fit
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.piecewise import Fit, Piece
from fxcomp.cost.roofline import Measured, Roofline
from fxcomp.cost.table import CostTable, link_of
from fxcomp.cost.timeline import Task, simulate
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind, Stream
from fxcomp.plan.strategy import Device

_K = CollectiveKind
CLUSTERS = [Cluster(4, 1, intra=Link(1, 10), inter=Link(10, 1)), Cluster(2, 2, intra=Link(1, 10), inter=Link(10, 1))]
BENT = Fit((Piece(0.0, 60.0, 0.001, 3.0, 1e-5), Piece(1e6, -940.0, 0.002, is_switch=True)), 1e3, 1e7, 20, 0.01, 0.1)
POINTS = [CompressorPoint(1 << k, 5.0 + 2.0**k, 3.0, 1.0) for k in range(4)]
FULL = CostTable(
    hardware="a machine",
    versions="1",
    date="2026-11-20",
    source="measured",
    compute={"aten.mm f32[2,2] f32[2,2]": Measured(3.5, 0.1, "measured")},
    roofline=Roofline(100.0, 20.0, others={"bf16": 200.0}),
    transport={_K.ALL_GATHER: TransportCost(10.0, 900.0)},
    collectives={
        (_K.ALL_REDUCE, "4x1"): MeasuredCollective(4, BENT),
        (_K.ALL_REDUCE, "2x2"): MeasuredCollective.line(_K.ALL_REDUCE, 4, 20.0, 0.5),
        (_K.ALL_GATHER, "2x1*2"): MeasuredCollective.line(_K.ALL_GATHER, 2, 20.0, 0.5),
    },
    compressors={
        "int8@gpu": CompressorCost.of(*POINTS[:2]),
        "int8@cpu*1": CompressorCost(tuple(POINTS)),
    },
    copy_gb_per_s=12.0,
    processors=Processors(1.5, 1.0),
    contention=1.5,
    threads=1,
)


def prices(table: CostTable) -> Iterator[float]:
    """Every kind of number that a table tells, small and large."""
    compressors = [parse_compressor(name) for name in ("int8", "sign")]
    for size in (0, 1, 1000, 10**6, 10**12):
        for cluster in CLUSTERS:
            for kind in CollectiveKind:
                for level in Level:
                    price = table.collective(kind, level, size, cluster)
                    yield from (price.us, price.load)
        yield from (table.pack_us(size), table.copy_us(size))
        yield table.compute_us("aten.mm f32[2,2] f32[2,2]", size, size, "bf16").us
        yield table.compute_us("aten.mm f32[9,9] f32[9,9]", size, size, "bf16").us
        for one in compressors:
            for device in Device:
                yield table.encode_us(one, size, device)
                yield table.decode_us(one, size, 4, device)
                yield table.propose_us(one, size, device)
    for between in (True, False):
        link = link_of(table, between_hosts=between)
        if link is not None:
            yield from (link.alpha_us, link.gb_per_s)
    price = table.collective(_K.ALL_REDUCE, Level.WORLD, 1000, CLUSTERS[0])
    sent = Task("b", Stream.INTER, 50.0, load=price.load, overlap_speed=price.overlap_speed)
    step = [Task("a", Stream.COMPUTE, 100.0), sent]
    yield simulate(step, table.processors).step_time_us
    yield table.error_of(1.0, 2.0)


def assert_prices_sense(table: CostTable) -> None:
    assert all(0.0 <= price < math.inf for price in prices(table))


# Round trips

TIMES = st.floats(0, 1e9)
RATES = st.floats(1e-6, 1e6)
SAMPLES = st.lists(st.tuples(st.integers(1, 1 << 26), st.floats(0.01, 1e7)), min_size=1, max_size=12)
TEXTS = st.text(max_size=8)
MEASURED = st.builds(Measured, TIMES, TIMES, TEXTS)
COLLECTIVES = st.builds(lambda ranks, samples: MeasuredCollective(ranks, fit(samples)), st.integers(2, 4096), SAMPLES)
COSTS = st.lists(
    st.tuples(st.integers(1, 1 << 26), TIMES, TIMES), min_size=1, max_size=7, unique_by=lambda p: p[0]
).map(lambda points: CompressorCost(tuple(CompressorPoint(*point) for point in sorted(points))))
TABLES = st.builds(
    CostTable,
    hardware=TEXTS,
    date=TEXTS,
    compute=st.dictionaries(TEXTS, MEASURED, max_size=2),
    roofline=st.builds(Roofline, RATES, RATES, TIMES, TEXTS, st.dictionaries(TEXTS, RATES, max_size=2)),
    collectives=st.dictionaries(
        st.tuples(st.sampled_from(list(CollectiveKind)), st.sampled_from(["4x1", "3+2", "2x(3+2)~2*4"])),
        COLLECTIVES,
        max_size=2,
    ),
    compressors=st.dictionaries(st.sampled_from(["int8@gpu", "topk(0.01)@cpu*2"]), COSTS, max_size=2),
    threads=st.none() | st.integers(1, 64),
    pack_gb_per_s=RATES,
    launch_us=TIMES,
    transport=st.dictionaries(
        st.sampled_from(list(CollectiveKind)),
        st.builds(TransportCost, TIMES, TIMES),
        max_size=2,
    ),
    copy_gb_per_s=st.none() | RATES,
    processors=st.builds(Processors, RATES, RATES) | st.just(Processors()),
    contention=RATES,
    error=st.floats(0, 1),
    compute_error=st.floats(0, 1),
    estimate=TEXTS,
)


@given(TABLES)
@settings(max_examples=60)
def test_what_measuring_makes_is_written_and_read(table: CostTable):
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again == table
    assert_prices_sense(again)


# Corruptions

BAD_VALUES = [
    None, True, "", "1.0", "nan", [], {}, [1.0], {"us": 1.0}, math.nan, math.inf, -math.inf,
    0, 0.0, -1, -1.0, 1, 2, 0.5, 1e-300, 5e-324, 1e-18, 1e18, 1e19, 1e300, 10**400, 1e6, 12345.678,
]  # fmt: skip
BAD_KEYS = ["", "x", "all_refuse", "all_reduce@", "all_reduce@4x1*0", "zip@4x1", "int8@tpu", "int8@cpu*0", "@"]


def places(data: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value stands, the collections included."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*here, key)
        yield from places(value, (*here, key))


WHOLE: Any = json.loads(json.dumps(FULL.to_json()))
PLACES = list(places(WHOLE))


def corrupted(place: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """A copy of the table's data, and where in it the last step of a place leads."""
    data = copy.deepcopy(WHOLE)
    inner = data
    for step in place[:-1]:
        inner = inner[step]
    return data, inner, place[-1]


def loads_sensibly_or_not(data: Any) -> bool:
    try:
        table = CostTable.from_json(data)
    except BadOption:
        return False
    assert_prices_sense(table)
    return True


@given(st.sampled_from(PLACES), st.sampled_from(BAD_VALUES) | st.floats() | st.integers() | st.text(max_size=5))
@settings(max_examples=600)
def test_a_table_with_one_wrong_value_is_refused_or_prices_sense(place: tuple[Any, ...], value: Any):
    data, inner, last = corrupted(place)
    inner[last] = value
    loads_sensibly_or_not(data)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_no_value_may_be_an_object_of_another_kind_and_no_entry_missing(place: tuple[Any, ...]):
    for value in ({"nobody": "knows"}, ["nobody"], math.nan):
        data, inner, last = corrupted(place)
        inner[last] = value
        assert not loads_sensibly_or_not(data)
    data, inner, last = corrupted(place)
    del inner[last]
    if place[0] in ("compute", "collectives", "compressors", "transport") and len(place) == 2:
        assert loads_sensibly_or_not(data)  # one that was not measured
    elif "points" not in place[2:3] and place[-1] not in (0, 1, "bf16"):
        assert not loads_sensibly_or_not(data)


@pytest.mark.parametrize("place", [p for p in PLACES if isinstance(p[-1], str)], ids=lambda p: ".".join(map(str, p)))
def test_a_key_that_nobody_knows_is_refused(place: tuple[Any, ...]):
    for key in BAD_KEYS:
        data, inner, last = corrupted(place)
        inner[key] = inner.pop(last)
        takes_any_text = place[-2:-1] in (("compute",), ("others",))
        assert not loads_sensibly_or_not(data) or takes_any_text


MM, AR = ("compute", "aten.mm f32[2,2] f32[2,2]"), ("collectives", "all_reduce@4x1")
FIRST, SECOND = (*AR, "fit", "pieces", 0), (*AR, "fit", "pieces", 1)
PIECES = "collectives.all_reduce@4x1.fit.pieces"


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ((), [], "it must be an object, as fxcomp calibrate writes it, not []"),
        (("launch_us",), -1, "launch_us must be a number from 0 to 1e+18, not -1"),
        (("pack_gb_per_s",), 0.0, "pack_gb_per_s must be a number from 1e-18 to 1e+18, not 0.0"),
        (("threads",), True, "threads must be a whole number from 1 to 1e+18, not True"),
        (("overlap_speed",), 1.5, "overlap_speed must be a number from 1e-18 to 1, not"),
        ((*MM, "us"), "3", "compute['aten.mm f32[2,2] f32[2,2]'].us must be a number from 0 to 1e+18, not '3'"),
        ((*AR, "ranks"), 1, "collectives.all_reduce@4x1.ranks must be a whole number from 2 to 1.04858e+06, not 1"),
        ((*FIRST, "us_per_unit"), math.nan, f"{PIECES}[0].us_per_unit must be a number from 0 to 1e+18, not nan"),
        ((*FIRST, "at_zero_us"), -1.0, f"{PIECES}[0].at_zero_us must be 0 or more, not -1.0"),
        ((*SECOND, "at_zero_us"), -1940.0, f"{PIECES}[1] must be 1060 us or more at its start"),
        ((*SECOND, "start"), 0.0, f"{PIECES}[1].start must be above the piece before it, 0, not 0.0"),
        ((*AR, "fit", "largest"), 10.0, "fit.largest must be 1e+06 or more"),
        ((*AR, "fit", "smallest"), 1e9, "fit.largest must be 1e+09 or more"),
        (
            ("compressors", "int8@gpu", "points", 1, "elements"),
            1,
            "compressors.int8@gpu.points[1].elements must be more than the point before it has, 1, not 1",
        ),
        (("compressors", "int8@gpu", "zip"), {}, "compressors.int8@gpu.zip is not known; There may be points."),
        (("lunch_us",), 1.0, "lunch_us is not known; did you mean 'launch_us'?"),
        (("transport", "all_refuse"), {}, "the key transport.all_refuse must be a collective: all_reduce, all_gather"),
        (("date",), 5, "date must be a text, not 5"),
        (("copy_gb_per_s",), "x" * 99, f"copy_gb_per_s must be a number from 1e-18 to 1e+18, not '{'x' * 59}..."),
    ],
)
def test_an_error_says_where_what_may_stand_there_and_what_does(path: tuple[Any, ...], value: Any, text: str):
    data, inner, last = corrupted(path) if path else (value, {}, "")
    inner[last] = value
    with pytest.raises(BadOption) as told:
        CostTable.from_json(data)
    assert text in str(told.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, '{"version": 6, "launch_us": NaN}', "\udc80"])
def test_a_file_of_nonsense_is_told_with_its_name(tmp_path: Path, text: str):
    path = tmp_path / "costs.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadOption, match=r"cannot read the cost table .*costs\.json: "):
        CostTable.read(path)


def test_a_table_without_a_gpu_may_say_main_and_pool():
    data = CostTable(
        compressors={"int8@cpu*1": CompressorCost(tuple(POINTS)), "int8@gpu": CompressorCost(tuple(POINTS))}
    )
    other = json.loads(json.dumps(data.to_json()).replace("int8@cpu*1", "int8@pool*1").replace("int8@gpu", "int8@main"))
    assert CostTable.from_json(other) == data
    assert data.shown("int8@gpu") == "int8@main"
    assert replace(data, copy_gb_per_s=10.0).shown("int8@gpu") == "int8@gpu"
