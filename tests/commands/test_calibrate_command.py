"""`fxcomp calibrate`: on one process, on two ranks, and with files."""

import contextlib
import io
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks, try_ranks

import fxcomp
from fxcomp.__main__ import main
from fxcomp.compressors import parse_compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.table import CostTable, link_of
from fxcomp.errors import BadOption, ReplicasDiffer
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device
from fxcomp.planning.decide import foreign_note
from fxcomp.planning.measure_links import TimedCollectives
from fxcomp.planning.measure_machine import hardware
from fxcomp.planning.survey import survey

KIND = CollectiveKind.ALL_REDUCE
TABLE = CostTable(
    hardware="a machine",
    date="2026-11-20",
    source="measured",
    collectives={(KIND, "2x1"): MeasuredCollective.line(KIND, 2, 30.0, 0.125, 0.02, "measured, 9 samples")},
    compressors={"int8(block=128)@cpu*1": CompressorCost.of(CompressorPoint(1000, 10.0, 4.0))},
)
HERE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}
MLP = str(Path(__file__).parents[2] / "examples" / "mlp.py")
JOB = str(Path(__file__).parents[2] / "examples" / "gpt.py")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
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


def surveyed() -> tuple[Any, int, tuple[str, ...], str]:
    """Measure this machine, and then different things on each rank."""
    found = survey([parse_compressor("bf16")], links_s=0.5)
    with pytest.raises(ReplicasDiffer) as refused:
        survey([parse_compressor("bf16")], threads=[1 + dist.get_rank()])
    return found.table.to_json(), found.rank, found.notes, str(refused.value)


def test_two_ranks_measure_every_collective_and_bring_the_same_table_and_different_questions_are_refused():
    (first, rank, notes, refused), (second, other, _, also_refused) = run_ranks(2, surveyed)
    assert all("threads is [2] on rank 1 and [1] on rank 0" in text for text in (refused, also_refused))
    assert (rank, other, notes) == (0, 1, ())
    assert first == second
    table = CostTable.from_json(first)
    assert set(table.collectives) == {(kind, "1x2") for kind in CollectiveKind}
    for (kind, _), measured in table.collectives.items():
        assert measured.fit.samples >= 4
        times = [measured.fit.at(size) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 26)]
        assert times == sorted(times)
        assert measured.gb_per_s(kind) > 0


# Files


def test_a_table_is_shown_with_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["calibrate", "--show", saved(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Costs of a machine, 2026-11-20 (measured)" in text
    assert "all_reduce 2x1 30 1gbit 2.0% 0" in text
    assert "int8(block=128)@pool*1" in text
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--show", "nowhere.json"], "cannot read the cost table nowhere.json"),
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


# Several ranks


def commanded(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["calibrate", *words])
    return status, out.getvalue(), err.getvalue()


def commanded_in_turn(many: list[tuple[str, ...]]) -> list[tuple[int, str, str]]:
    return [commanded(list(words)) for words in many]


def commanded_on(words: list[list[str]]) -> tuple[int, str, str]:
    """Each rank its own words, and half a second for the links."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxcomp.commands.calibrate.survey", partial(survey, links_s=0.5))
        return commanded(words[dist.get_rank()])


def test_a_mistake_is_told_once_and_ends_all_ranks_before_anything_is_measured():
    mistakes = {
        ("--merge", "nowhere.json"): "fxcomp: cannot read the cost table nowhere.json",
        ("-o", "nowhere/costs.json"): "fxcomp: cannot save the table to nowhere/costs.json: there is no folder",
        ("--threads", "0"): "fxcomp: --threads are numbers of threads",
        ("--compressors", "zip"): "fxcomp: --compressors: ",
    }
    told, *others = run_ranks(3, commanded_in_turn, list(mistakes))
    for (status, out, err), text in zip(told, mistakes.values(), strict=True):
        assert (status, out) == (2, "")
        assert err.startswith(text)
    assert others == [[(2, "", "")] * len(mistakes)] * 2


@pytest.mark.slow
def test_files_are_rank_0s_alone(tmp_path: Path):
    """Another rank's answer about files that are not on its machine does not matter."""
    machine = replace(CostTable(), hardware="unknown", compressors=TABLE.compressors, source="measured")
    quick = ["--compressors", "bf16"]
    mine = ["--merge", saved(tmp_path, machine), "-o", str(tmp_path / "new.json"), *quick]
    (first, out, _), other = run_ranks(2, commanded_on, [mine, ["--merge", "nowhere.json", "-o", "no/where", *quick]])
    assert (first, other) == (0, (0, "", ""))
    assert "Costs of" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs.json", "new.json"]
    table = CostTable.read(tmp_path / "new.json")
    assert "int8(block=128)@cpu*1" in table.compressors
    assert "bf16@cpu*1" in table.compressors


def test_a_rank_that_alone_has_a_bad_option_ends_all_and_says_so():
    good = ["--compressors", "bf16"]
    (first, _, told), (other, _, err) = run_ranks(2, commanded_on, [good, [*good, "--threads", "-1"]])
    assert (first, other) == (2, 2)
    assert "rank 1 failed in reading options: BadOption: --threads" in told
    assert err.startswith("fxcomp: --threads are numbers of threads")


def test_a_table_of_another_machine_is_refused_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["calibrate", "--merge", saved(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fxcomp: these tables are of different machines")
    assert "measuring" not in err


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "has RANK=0 and WORLD_SIZE=2, as of a launcher, but not MASTER_ADDR, MASTER",
        ),
        ({"RANK": "3"}, "has RANK=3, as of a launcher, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "4"}, "has WORLD_SIZE=4, as of a launcher, but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({**HERE, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' in the environment must be a whole number from 1 to 1048576"),
        ({**HERE, "WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment"),
        ({**HERE, "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9999"),
        ({**HERE, "RANK": "1"}, "RANK='1' in the environment must be a whole number from 0 to 0"),
        ({**HERE, "RANK": "-1"}, "RANK='-1' in the environment"),
        ({**HERE, "RANK": ""}, "RANK='' in the environment"),
        (
            {**HERE, "MASTER_PORT": "70000"},
            "MASTER_PORT='70000' in the environment must be a whole number from 1 to 65535",
        ),
        ({**HERE, "MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
        ({**HERE, "LOCAL_RANK": "x"}, "LOCAL_RANK='x' in the environment"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_told_with_its_variables(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "--compressors", "bf16"]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "to measure this machine alone: unset RANK WORLD_SIZE" in err
    assert "Traceback" not in err


def test_ranks_that_do_not_meet_are_told_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, value in HERE.items():
        monkeypatch.setenv(name, value)

    def refused(*_: object) -> None:
        raise RuntimeError("The client socket cannot be initialized\nand more")

    monkeypatch.setattr(dist, "init_process_group", refused)
    assert main(["calibrate", "--compressors", "bf16"]) == 2
    text = (
        "the ranks did not meet at MASTER_ADDR:MASTER_PORT, localhost:29555: The client socket cannot be initialized\n"
    )
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_launcher_left_behind_is_of_no_matter_to_explain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(["explain", MLP, "--inter", "10mbit"]) == 0
    assert capsys.readouterr().err == ""


# Use


@pytest.mark.slow
def test_explain_takes_a_table_of_another_machine_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = saved(tmp_path)
    assert main(["explain", JOB, "--costs", path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The costs were measured on another machine: a machine. This one is" in text
    assert "all_reduce@2x1 30 us a step, 1gbit a rank" in text
    assert "Assumed, because not given: --cluster 2x1." in text
    assert main(["explain", JOB, "--costs", path, "--inter", "10gbit"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "priced by the named links" in text
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
    assert [outcome.error for outcome in outcomes] == ["ReplicasDiffer"] * 2
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
    assert link_of(TABLE, between_hosts=False) is None
    link = link_of(TABLE, between_hosts=True)
    assert link is not None
    assert (link.alpha_us, link.gb_per_s) == pytest.approx((30.0, 0.125))


def test_a_link_that_groups_shared_while_it_was_measured_has_what_all_of_them_got():
    (key, measured), *_ = [(k, m) for k, m in TABLE.collectives.items() if k[0] is CollectiveKind.ALL_REDUCE]
    table = replace(TABLE, collectives={(key[0], "4x1*8"): measured})
    shared, alone = link_of(table, between_hosts=True), replace(TABLE, collectives={(key[0], "4x1"): measured})
    assert shared is not None
    assert shared.gb_per_s == pytest.approx(8 * link_of(alone, between_hosts=True).gb_per_s)


def test_a_compressor_of_the_table_is_priced_with_the_threads_that_are_there():
    int8 = parse_compressor("int8(block=128)")
    assert replace(TABLE, threads=1).compressor_source(int8, Device.CPU) == "measured"
    assert "assumed" in replace(TABLE, threads=64).compressor_source(int8, Device.CPU)


def test_another_number_of_threads_is_no_other_machine():
    """torchrun gives a process one thread, and who asks about the table alone has more."""
    here = hardware(torch.device("cpu"))
    table = replace(TABLE, hardware=re.sub(r"\d+ threads", "4096 threads", here))
    assert foreign_note(table.hardware, torch.device("cpu")) == ()
    assert foreign_note("a machine, 4096 threads", torch.device("cpu")) != ()


class Refusing:
    """A transport whose backend refuses everything."""

    def group(self, *_: str) -> tuple[None, tuple[int, ...]]:
        raise RuntimeError("not supported here\nand more")


def test_a_backend_that_lacks_a_collective_says_why_and_one_that_steps_need_is_an_error():
    timed = TimedCollectives(Refusing(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    assert timed.trouble(CollectiveKind.GATHER) == "not supported here"
    with pytest.raises(RuntimeError, match="not supported here"):
        timed.trouble(CollectiveKind.ALL_REDUCE)
