"""`fxcomp calibrate`: on one process, on two ranks, and with files."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import JOBS, OPTIMIZERS, cross_entropy
from ranks import run_ranks, try_ranks

import fxcomp
from fxcomp.__main__ import main
from fxcomp.calibrate import hardware
from fxcomp.compressors import parse_compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.pipeline import foreign_note
from fxcomp.strategy import CollectiveKind, Device
from fxcomp.survey import TimedCollectives, survey

KIND = CollectiveKind.ALL_REDUCE
TABLE = CostTable(
    hardware="a machine",
    date="2026-11-20",
    source="measured",
    collectives={(KIND, "2x1"): MeasuredCollective.line(KIND, 2, 30.0, 0.125, 0.02, "measured, 9 samples")},
    compressors={"int8(block=128)@cpu*1": CompressorCost.of(CompressorPoint(1000, 10.0, 4.0))},
)
JOB = str(Path(__file__).parent.parent / "examples" / "gpt.py")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def saved(tmp_path: Path, table: CostTable = TABLE, name: str = "costs.json") -> str:
    table.save(tmp_path / name)
    return str(tmp_path / name)


# Measuring


def test_one_process_measures_compressors_and_memory_and_says_that_links_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "costs.json"
    assert main(["calibrate", "-o", str(path), "--compressors", "bf16", "--threads", "1"]) == 0
    shown = capsys.readouterr()
    assert "No process group: links were not measured. Start it with torchrun" in shown.out
    assert "fxcomp: measuring bf16" in shown.err
    table = CostTable.read(path)
    assert list(table.compressors) == ["bf16@cpu*1", "bf16@gpu*1"]
    assert table.collectives == {}
    assert table.roofline.source == "measured"


def surveyed(_: object = None) -> tuple[Any, int, tuple[str, ...]]:
    found = survey([parse_compressor("bf16")], links_s=0.5)
    return found.table.to_json(), found.rank, found.notes


def test_two_ranks_measure_every_collective_and_bring_the_same_table():
    (first, rank, notes), (second, other, _) = run_ranks(2, surveyed)
    assert (rank, other, notes) == (0, 1, ())
    assert first == second
    table = CostTable.from_json(first)
    assert set(table.collectives) == {(kind, "1x2") for kind in CollectiveKind}
    for (kind, _), measured in table.collectives.items():
        assert measured.fit.samples >= 4
        times = [measured.fit.at(size) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 26)]
        assert times == sorted(times)
        assert measured.gb_per_s(kind) > 0.01


def differing(_: object = None) -> None:
    survey([parse_compressor("bf16")], threads=[1 + dist.get_rank()])


def test_ranks_that_measure_different_things_are_refused():
    outcomes = try_ranks(2, differing)
    assert [outcome.error for outcome in outcomes] == ["ModelsDiffer"] * 2


# Files


def test_a_table_is_shown_with_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["calibrate", "--show", saved(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Costs of a machine, 2026-11-20 (measured)" in text
    assert "all_reduce 2x1 30 1gbit 2.0% 0" in text
    assert "int8(block=128)@cpu*1" in text
    assert main(["calibrate", "--show", saved(tmp_path), "--json"]) == 0
    assert CostTable.from_json(json.loads(capsys.readouterr().out)) == TABLE


def test_tables_are_merged_into_a_third_and_contradictions_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    newer = replace(
        TABLE,
        date="2026-11-21",
        collectives={
            (KIND, "2x1"): MeasuredCollective.line(KIND, 2, 30.0, 1.25, 0.02),
            (KIND, "4x1"): MeasuredCollective.line(KIND, 4, 30.0, 1.25, 0.02),
        },
    )
    old, new, out = saved(tmp_path), saved(tmp_path, newer, "new.json"), str(tmp_path / "out.json")
    assert main(["calibrate", "--show", new, "--merge", old, "-o", out]) == 0
    assert "Contradiction: all_reduce@2x1, 64 MiB" in capsys.readouterr().out
    assert CostTable.read(out).collectives == newer.collectives
    assert main(["calibrate", "--diff", old, out]) == 0
    assert "only the second has all_reduce@4x1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--show", "nowhere.json"], "cannot read the cost table nowhere.json"),
        (["--diff", "nowhere.json", "nowhere.json"], "cannot read the cost table nowhere.json"),
        (["--from-trace", "nowhere.json"], "cannot read the trace nowhere.json"),
        (["--merge", "nowhere.json"], "cannot read the cost table nowhere.json"),
        (["-o", "nowhere/costs.json"], "there is no folder"),
        (["--compressors", "zip"], "--compressors: "),
        (["--threads", "0"], "--threads are numbers of threads, 1 to 1,024"),
        (["--show", "costs.json", "--threads", "1"], "are about measuring"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(words: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    assert main(["calibrate", *words]) == 2
    assert text in capsys.readouterr().err


# Use


def test_explain_takes_a_table_of_another_machine_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = saved(tmp_path)
    assert main(["explain", JOB, "--costs", path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The costs were measured on another machine: a machine. This one is" in text
    assert "all_reduce@2x1 30 us a step, 1gbit a rank" in text
    assert "Assumed, because it was not said: --cluster 2x1." in text
    assert main(["explain", JOB, "--costs", path, "--inter", "10gbit"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "priced by the links that were named" in text
    assert "30 us a step" not in text
    assert main(["explain", JOB, "--costs", path, "--device", "h100"]) == 2
    assert "keep one" in capsys.readouterr().err


def compiled(costs: list[str | None]) -> tuple[str, str]:
    """Compile with this rank's costs; the plan, and the report."""
    job = JOBS["mlp"]
    model = job.build()
    optimizer, batch = OPTIMIZERS["plain"](model.parameters()), job.batch(0, dist.get_rank())
    step = fxcomp.compile_step(model, cross_entropy, optimizer, batch, costs=costs[dist.get_rank()])
    return step.plan.digest, " ".join(step.explain().split())


def test_a_step_is_compiled_with_rank_0s_saved_costs(tmp_path: Path):
    path = saved(tmp_path)
    answers = run_ranks(2, compiled, [path, str(tmp_path / "another name.json")])
    assert answers[0][0] == answers[1][0]
    for _, report in answers:
        assert "all_reduce@2x1 30 us a step, 1gbit a rank" in report
        assert "The costs were measured on another machine: a machine." in report


def test_costs_that_one_rank_alone_has_or_that_cannot_be_read_are_refused_on_all(tmp_path: Path):
    outcomes = try_ranks(2, compiled, [saved(tmp_path), None])
    assert [outcome.error for outcome in outcomes] == ["ModelsDiffer"] * 2
    assert all("how costs are given is" in outcome.text for outcome in outcomes)
    nowhere = str(tmp_path / "nowhere.json")
    outcomes = try_ranks(2, compiled, [nowhere, nowhere])
    assert [outcome.error for outcome in outcomes] == ["BadOption", "PeerFailed"]
    assert "cannot read the cost table" in outcomes[0].text


def test_costs_of_another_type_are_refused():
    model = JOBS["mlp"].build()
    optimizer, batch = OPTIMIZERS["plain"](model.parameters()), JOBS["mlp"].batch(0, 0)
    with pytest.raises(BadOption, match=r"costs is a fxcomp\.CostTable or the path of a saved one; it is a dict"):
        fxcomp.compile_step(model, cross_entropy, optimizer, batch, costs={})  # pyright: ignore[reportArgumentType]


def test_a_link_tells_what_measured_collectives_imply():
    assert TABLE.link(between_hosts=False) is None
    link = TABLE.link(between_hosts=True)
    assert link is not None
    assert (link.alpha_us, link.gb_per_s) == pytest.approx((30.0, 0.125))


def test_a_link_that_groups_shared_while_it_was_measured_has_what_all_of_them_got():
    (key, measured), *_ = [(k, m) for k, m in TABLE.collectives.items() if k[0] is CollectiveKind.ALL_REDUCE]
    table = replace(TABLE, collectives={(key[0], "4x1*8"): measured})
    shared, alone = table.link(between_hosts=True), replace(TABLE, collectives={(key[0], "4x1"): measured})
    assert shared is not None
    assert shared.gb_per_s == pytest.approx(8 * alone.link(between_hosts=True).gb_per_s)


def test_a_compressor_of_the_table_is_priced_with_the_threads_that_are_there():
    int8 = parse_compressor("int8(block=128)")
    assert replace(TABLE, threads=1).compressor_source(int8, Device.CPU) == "measured"
    assert "assumed" in replace(TABLE, threads=64).compressor_source(int8, Device.CPU)


def test_another_number_of_threads_is_no_other_machine():
    """torchrun gives a process one thread, and who asks about the table alone has more."""
    here = hardware(torch.device("cpu"))
    table = replace(TABLE, hardware=re.sub(r"\d+ threads", "4096 threads", here))
    assert foreign_note(table, torch.device("cpu")) == ()
    assert foreign_note(replace(table, hardware="a machine, 4096 threads"), torch.device("cpu")) != ()


class Refusing:
    """A transport whose backend refuses everything."""

    def group(self, *_: str) -> tuple[None, tuple[int, ...]]:
        raise RuntimeError("not supported here\nand more")


def test_a_backend_that_lacks_a_collective_says_why_and_one_that_steps_need_is_an_error():
    timed = TimedCollectives(Refusing(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    assert timed.trouble(CollectiveKind.GATHER) == "not supported here"
    with pytest.raises(RuntimeError, match="not supported here"):
        timed.trouble(CollectiveKind.ALL_REDUCE)
