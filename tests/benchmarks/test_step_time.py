"""Measured steps get their verdict, and ranks of two checkouts share hosts."""

import subprocess
import sys
from pathlib import Path

import pytest
import step_time
from baselines import FXCOMP
from records import read
from step_time_start import enter_group
from step_time_verdicts import BASELINES_OF, Turns, analyse, page, ratios, records

CHECKOUT = Path(__file__).parents[2]


def turns_of(**medians: float) -> list[Turns]:
    """Contestants that take this long, give or take a percent from round to round."""
    return [
        Turns(name, blocks=[[median * (1 + 0.01 * (turn % 3 - 1))] for turn in range(20)])
        for name, median in medians.items()
    ]


def test_every_compiled_contestant_is_compared_with_the_bf16_hook_and_the_lossy_one_with_powersgd_too():
    assert list(BASELINES_OF) == list(FXCOMP)
    assert all("ddp_bf16" in baselines for baselines in BASELINES_OF.values())
    lossy = ["fxcomp_lossy", "fxcomp_hook_lossy"]
    assert [name for name, baselines in BASELINES_OF.items() if "ddp_powersgd" in baselines] == lossy


def test_a_ratio_is_that_of_medians_within_its_interval():
    found = list(ratios(turns_of(ddp_bf16=200, ddp_powersgd=100, fxcomp=90, fxcomp_lossy=80, free=50)))
    assert [(r.name, r.to) for r in found] == [
        ("fxcomp", "ddp_bf16"),
        ("fxcomp_lossy", "ddp_bf16"),
        ("fxcomp_lossy", "ddp_powersgd"),
    ]
    assert [r.ratio for r in found] == pytest.approx([0.45, 0.4, 0.8])
    assert all(r.low <= r.ratio <= r.high for r in found)


def test_records_carry_the_ratios_beside_what_was_measured():
    found = {record["name"]: record for record in records("mlp", 8, "100mbit", turns_of(ddp_bf16=200, fxcomp=90))}
    assert found["fxcomp"]["ratios"]["ddp_bf16"][0] == pytest.approx(0.45)
    assert found["ddp_bf16"]["ratios"] == {}
    assert found["ddp_bf16"]["measured_ms"] == {"median": 200, "p10": 198, "p90": 202, "n": 20}


@pytest.mark.parametrize(("now", "says"), [(101.9, "no slower than before"), (102.1, "SLOWER than before")])
def test_another_checkout_may_be_two_percent_faster(now: float, says: str):
    assert says in analyse("1gbit", turns_of(fxcomp=now, fxcomp_before=100))


def test_a_ratio_above_the_margin_is_no_verdict_while_its_interval_reaches_below():
    now, before = turns_of(fxcomp=103, fxcomp_before=100)
    now.blocks[::2] = [[90.0] for _ in now.blocks[::2]]
    now.blocks[::4] = [[120.0] for _ in now.blocks[::4]]
    assert ": above 1.02, but so may chance be." in analyse("1gbit", [now, before])


def test_the_final_loss_is_set_beside_that_of_dense_training():
    turns = turns_of(ddp_fp32=200, fxcomp=90)
    turns[0].final_loss, turns[1].final_loss = 2.0, 2.01
    assert "- fxcomp: final loss +0.50% of that of ddp_fp32." in analyse("1gbit", turns)


def test_a_contestant_is_judged_beside_what_loses_no_more_and_beside_the_best_of_all():
    turns = turns_of(ddp_fp32=200, ddp_bf16=150, ddp_powersgd=80, fxcomp=100, fxcomp_lossy=81)
    turns[0].again = turns[0].blocks
    text = analyse("1gbit", turns)
    assert "fxcomp / ddp_bf16 = 0.667, 95 % interval" in text
    assert text.count("never slower: holds") == 2, "balanced beside bf16, lossy beside PowerSGD"
    assert "fxcomp / ddp_powersgd = 1.250" in text
    assert text.count("SLOWER") == 1


@pytest.mark.parametrize(
    ("ours", "summary"),
    [
        (199, "2 have a verdict and 2 hold. Slower than plain DDP: none."),
        (210, "2 have a verdict and 1 hold. Slower than plain DDP: fxcomp on mlp, 2 hosts, 1gbit."),
    ],
)
def test_the_table_counts_what_holds_and_names_what_is_slower_than_plain_ddp(ours: float, summary: str):
    turns = turns_of(ddp_fp32=200, ddp_bf16=250, fxcomp=ours, fxcomp_lossy=190)
    turns[0].again = turns[0].blocks
    found = page(records("mlp", 2, "1gbit", turns))
    assert summary in found
    assert found.count("| mlp |") == 2


@pytest.mark.parametrize("ranks_here", [1, 3])
def test_ranks_of_two_checkouts_are_numbered_as_if_each_were_alone(ranks_here: int):
    hosts, groups = 4, 2
    each = groups * ranks_here
    numbers: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    for rank in range(hosts * each):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank % each), "WORLD_SIZE": str(hosts * each)}
        group = enter_group(environment, groups, ranks_here)
        assert environment["WORLD_SIZE"] == str(hosts * ranks_here)
        numbers[group].append((environment["RANK"], environment["LOCAL_RANK"]))
    alone = [(str(rank), str(rank % ranks_here)) for rank in range(hosts * ranks_here)]
    assert numbers == {0: alone, 1: alone}


@pytest.mark.parametrize(
    ("model", "name"),
    [("examples/gpt.py:job", "gpt"), ("benchmarks/models.py:mlp", "mlp"), ("examples/gpt.py", "gpt")],
)
def test_a_model_is_named_after_its_function_or_its_file(model: str, name: str):
    assert step_time.name_of(model) == name


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path):
    assert "no fxcomp/__init__.py" in str(step_time.why_no_checkout(tmp_path))
    for name in ("fxcomp/__init__.py", "benchmarks/baselines.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert "no built kernels" in str(step_time.why_no_checkout(tmp_path))
    (tmp_path / "fxcomp" / "_kernels.abi3.so").touch()
    assert step_time.why_no_checkout(tmp_path) is None


@pytest.mark.slow
def test_two_checkouts_take_turns_on_real_ranks(tmp_path: Path):
    model, found = tmp_path / "small.py", tmp_path / "found.json"
    model.write_text(SMALL)
    options = ["--quick", "--inter", "loopback", "--names", "ddp_fp32,ddp_bf16,fxcomp,free", "--against", str(CHECKOUT)]
    command = [sys.executable, str(CHECKOUT / "benchmarks/step_time.py"), "--model", str(model), "--json", str(found)]
    subprocess.run([*command, *options], check=True, timeout=300, capture_output=True)
    names = [record["name"] for record in read(found)]
    assert names == ["ddp_fp32", "ddp_bf16", "fxcomp", "fxcomp_before", "free"]


SMALL = """
import torch
from fxcomp.frontends.job import Job

def job():
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Job(model, lambda model, batch: model(batch).square().mean(), optimizer, torch.randn(4, 32))
"""
