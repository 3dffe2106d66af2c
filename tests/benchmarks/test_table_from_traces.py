"""Cost tables from profiler traces: real ones of gloo ranks, made-up ones of NCCL, and what else a file may hold."""

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_from_traces import main, table_from_traces
from torch.profiler import ProfilerActivity, profile

from fxcomp import compat
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.graph.work import work_key
from fxcomp.plan.kinds import CollectiveKind

pytestmark = pytest.mark.filterwarnings("ignore:.*acc_events:UserWarning")  # what torch before 2.13 warns of

SIZES = (1_000, 10_000, 100_000, 1_000_000)


def traced_rank(folder: str) -> None:
    rank = dist.get_rank()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for elements in SIZES:
            for _ in range(3):
                value = torch.ones(elements)
                dist.all_reduce(value)
                dist.broadcast(value, 0)
                dist.all_gather([torch.empty(elements) for _ in range(2)], value)
                dist.barrier()
    path = Path(folder) / f"rank{rank}.json"
    found.export_chrome_trace(str(path))
    named = {"host_name": compat.host_name()}  # which torch 2.11 leaves out
    path.write_text(json.dumps({**named, **json.loads(path.read_text())}))


def test_traces_of_two_ranks_give_their_collectives(tmp_path: Path):
    run_ranks(2, traced_rank, str(tmp_path))
    paths = sorted(tmp_path.iterdir())
    found = table_from_traces(paths)
    kinds = {CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.ALL_GATHER}
    assert {(kind, reach) for kind, reach in found.table.collectives} == {(kind, "1x2") for kind in kinds}
    for kind in kinds:
        assert found.recognised[kind.value] == 2 * 3 * len(SIZES)
        measured = found.table.collectives[kind, "1x2"]
        assert measured.fit.samples == 3 * len(SIZES)
        assert (measured.fit.smallest, measured.fit.largest) == (4 * SIZES[0], 4 * SIZES[-1])
        assert measured.source == "a trace of 2 ranks, 12 samples up to 3.81 MiB"
    assert found.unknown["gloo:barrier"] == 2 * 3 * len(SIZES)
    assert any("gloo:barrier" in note for note in found.notes)
    assert CostTable.from_json(found.table.to_json()) == found.table
    alone = table_from_traces(paths[:1])
    assert alone.table.collectives == {}
    assert any("traces, and 1 is here" in note for note in alone.notes)


def test_a_trace_of_one_process_gives_operators_under_the_keys_of_a_graph(tmp_path: Path):
    a, b = torch.randn(64, 32), torch.randn(32, 16)

    def work(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = torch.mm(a, b)
        return torch.relu(product + product) * 2.0

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for _ in range(5):
            work(a, b)
    path = tmp_path / "trace.json"
    found.export_chrome_trace(str(path))
    table = table_from_traces([path]).table
    assert table.compute["aten.mm f32[64,32] f32[32,16]"].us > 0
    assert table.compute["aten.mm f32[64,32] f32[32,16]"].source == "a trace of 1 rank, 5 times"
    graph = compat.trace(lambda inputs: work(*inputs), [[a, b]])
    keys = [work_key(node) for node in graph.graph.nodes if node.op == "call_function"]
    assert keys[0] in table.compute
    assert "aten.add.Tensor f32[64,16] f32[64,16]" in table.compute
    assert any(key.startswith("aten.relu ") for key in keys)
    assert "aten.relu f32[64,16]" in table.compute
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert table_from_traces([packed]).table == table


def event(name: str, us: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": 1.0, "dur": us, "args": args}


def nccl(us: float, elements: int, **args: Any) -> dict[str, Any]:
    common = {"Collective name": "allreduce", "In msg nelems": elements, "dtype": "BFloat16", "Group size": 2}
    return event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", us, **common, **args)


def write(path: Path, rank: int, events: list[Any], **more: Any) -> Path:
    data: dict[str, Any] = {
        "distributedInfo": {"rank": rank, "world_size": 2},
        "deviceProperties": [{"name": "NVIDIA H100"}],
        "host_name": f"host{rank}",
        "traceEvents": events,
    }
    path.write_text(json.dumps({**data, **more}))
    return path


def test_nccl_kernels_are_read_and_the_rank_that_waited_least_is_believed(tmp_path: Path):
    early = [nccl(900.0, 1000), nccl(80.0, 1000), nccl(5000.0, 1_000_000)]
    late = [nccl(50.0, 1000), nccl(60.0, 1000), nccl(400.0, 1_000_000)]
    paths = [write(tmp_path / f"{rank}.json", rank, events) for rank, events in enumerate((early, late))]
    table = table_from_traces(paths).table
    measured = table.collectives[CollectiveKind.ALL_REDUCE, "2x1"]
    assert measured.fit.at(2000) == pytest.approx(55.0)
    assert measured.fit.at(2_000_000) == pytest.approx(400.0)
    assert table.hardware == "NVIDIA H100"


def test_kernels_give_an_operator_its_time_on_the_device(tmp_path: Path):
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
    events = [
        event("aten::mm", 9.0, "cpu_op", **{"External id": 7, **shapes}),
        event("sgemm_128x64", 400.0, "kernel", **{"External id": 7}),
        event("sgemm_reduce", 20.0, "kernel", **{"External id": 7}),
    ]
    table = table_from_traces([write(tmp_path / "0.json", 0, events)]).table
    assert table.compute["aten.mm f32[64,32] f32[32,16]"].us == 420.0


ODD: list[Any] = [
    None,
    7,
    {},
    {"ph": "X"},
    {"ph": "X", "name": 3, "cat": [], "dur": "long", "ts": None, "args": 5},
    event("aten::mm", 1.0, "cpu_op", **{"Input Dims": 3, "Input type": None}),
    event("aten::mm", 1.0, "cpu_op", **{"Input Dims": [["a"], None], "Input type": ["float", {}]}),
    event("aten::nothing_of_this_name", 1.0, "cpu_op", **{"Input Dims": [[2]], "Input type": ["float"]}),
    event("aten::mm", float("nan"), "cpu_op", **{"Input Dims": [[2, 2], [2, 2]], "Input type": ["float", "float"]}),
    event("gloo:all_reduce", 5.0, "user_annotation"),
    event("gloo:quantum_reduce", 5.0, "user_annotation", **{"Input Dims": [[2]], "Input type": ["float"]}),
    nccl(5.0, -3),
    event("ncclDevKernel_Generic", 5.0, **{"Collective name": "allreduce", "In msg nelems": 5, "dtype": "Quaternion"}),
    event("my_kernel", 5.0),
    event("my\nkernel\ud800\x1b[2J", 5.0),
    event("aten::__file__", 1.0, "cpu_op", **{"Input Dims": [[2]], "Input type": ["float"]}),
    event("aten::__class__", 1.0, "cpu_op", **{"Input Dims": [[2]], "Input type": ["float"]}),
    event("aten::name", 1.0, "cpu_op", **{"Input Dims": [[2]], "Input type": ["float"]}),
    event("aten::relu\ud800", 1.0, "cpu_op", **{"Input Dims": [[2]], "Input type": ["float"]}),
    event("aten::relu\0", 1.0, "cpu_op", **{"Input Dims": [[2]], "Input type": ["float"]}),
    event("aten::", 1.0, "cpu_op", **{"Input Dims": [[2]], "Input type": ["float"]}),
    event("aten::relu", 1.0, "cpu_op", **{"Input Dims": [[2**62, 2**62]], "Input type": ["float"]}),
    *(
        {**event("aten::relu", us, "cpu_op", **{"Input Dims": [[2]], "Input type": ["float"]}), "ts": us}
        for us in (-1, 10**400, -(10**400), 1e300, 5e-324, float("inf"), True)
    ),
    {**event("", 5.0), "name": {"a": []}},
    {**event("", 5.0), "name": None},
    nccl(5.0, 10**30),
    nccl(1e300, 1000),
]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_an_event_that_nobody_knows_is_counted_and_never_an_exception(number: int, tmp_path: Path):
    found = table_from_traces([write(tmp_path / "0.json", 0, [ODD[number]])])
    assert found.table.collectives == {}
    assert found.table.compute == {}
    assert sum(found.unknown.values()) == (1 if number > 2 else 0)
    assert all(name.isprintable() for name in found.unknown)
    assert all(note.isprintable() for note in found.notes)


SHAPES = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
GOOD: dict[str, Any] = {
    "distributedInfo": {"rank": 0, "world_size": 2, "pg_config": [{"ranks": [0, 1]}]},
    "deviceProperties": [{"name": "NVIDIA H100"}],
    "host_name": "a",
    "traceEvents": [
        event("aten::mm", 9.0, "cpu_op", **{"External id": 7}, **SHAPES),
        event("sgemm", 400.0, **{"External id": 7}),
        event("gloo:all_reduce", 5.0, "user_annotation", **SHAPES),
        nccl(50.0, 1000, **{"Process Group Ranks": "[0, 1]"}),
    ],
}


def places(data: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*here, key)
        yield from places(value, (*here, key))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just(10**400)
    | st.sampled_from(["aten::__dict__", "aten::add", "gloo:gather", "X", "[0, 0]", "[,]", f"[{'9' * 5000}]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(st.sampled_from(list(places(GOOD))), ANYTHING)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_trace_with_one_strange_value_gives_a_table_or_an_error_in_words(
    tmp_path: Path, place: tuple[Any, ...], value: Any
):
    data = copy.deepcopy(GOOD)
    inner = data
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    other = {**GOOD, "distributedInfo": {"rank": 1, "world_size": 2}}
    for path, one in zip(paths, (data, other), strict=True):
        path.write_text(json.dumps(one))
    for some in (paths, paths[:1]):
        try:
            table = table_from_traces(some).table
        except BadOption:
            continue
        assert CostTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (0, 10**9)])
def test_a_rank_that_no_job_has_is_refused(rank: int, world_size: int, tmp_path: Path):
    path = write(tmp_path / "0.json", rank, [], distributedInfo={"rank": rank, "world_size": world_size})
    with pytest.raises(BadOption, match=r"not of the ranks of one job: rank 2 of 2|a job may have 1,048,576"):
        table_from_traces([path])


def test_a_collective_whose_ranks_are_not_told_is_left_out(tmp_path: Path):
    groups = {"pg_config": [{"ranks": [0, 1]}, {"ranks": [0, 1, 2]}]}
    shapes = {"Input Dims": [[100]], "Input type": ["float"]}
    events = [event("gloo:all_reduce", 5.0, "user_annotation", **shapes)]
    paths = [
        write(tmp_path / f"{r}.json", r, events, distributedInfo={"rank": r, "world_size": 3, **groups})
        for r in range(3)
    ]
    found = table_from_traces(paths)
    assert found.table.collectives == {}
    assert "3 collectives do not say which ranks they join: left out." in found.notes


def test_files_that_are_no_traces_are_refused(tmp_path: Path):
    path = tmp_path / "0.json"
    for text, why in (
        ("{", "cannot read the trace"),
        ("{}", "no list of traceEvents"),
        ("3", "no list of traceEvents"),
        ("[" * 100_000, "cannot read the trace"),
        ("1" * 5000, "cannot read the trace"),
    ):
        path.write_text(text)
        with pytest.raises(BadOption, match=why):
            table_from_traces([path])
    with pytest.raises(BadOption, match="cannot read the trace"):
        table_from_traces([tmp_path / "nowhere.json"])
    same = [write(tmp_path / name, 0, []) for name in ("a.json", "b.json")]
    with pytest.raises(BadOption, match="not of the ranks of one job: rank 0 of 2, rank 0 of 2"):
        table_from_traces(same)


@pytest.mark.parametrize("first", [1, 3])
def test_of_groups_that_sit_alike_the_one_with_more_samples_is_believed(first: int, tmp_path: Path):
    paths: list[Path] = []
    for rank in range(4):
        group, count = ([0, 1], first) if rank < 2 else ([2, 3], 4 - first)
        events = [nccl(50.0 if count == 3 else 900.0, 1000, **{"Process Group Ranks": group})] * count
        info = {"rank": rank, "world_size": 4}
        paths.append(write(tmp_path / f"{rank}.json", rank, events, distributedInfo=info, host_name="a"))
    measured = table_from_traces(paths).table.collectives[CollectiveKind.ALL_REDUCE, "1x2"]
    assert (measured.fit.samples, measured.fit.at(2000)) == (3, pytest.approx(50.0))


def test_the_script_writes_the_table_and_says_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, out = write(tmp_path / "0.json", 0, [ODD[0]]), tmp_path / "costs.json"
    assert main([str(path), "-o", str(out)]) == 0
    assert CostTable.read(out) == table_from_traces([path]).table
    assert "Recognised" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere.json")]) == 2
    assert "cannot read the trace" in capsys.readouterr().err
