"""`fxcomp bisect` trains on ranks of this machine, and names the tensors that were planted as guilty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_alone

from fxcomp.__main__ import main
from fxcomp.commands.bisect.partly_dense import compressed_names, partly_dense
from fxcomp.commands.bisect.result import Result, headline, sections_of, to_json
from fxcomp.commands.bisect.search import Search
from fxcomp.errors import BadPlan
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.report.terminal import sections_to_text

TOPK = Strategy.parse("compress(topk(0.1)) > all_gather@world > decompress")
INT8 = Strategy.parse("reduce_scatter@intra > compress(int8) > all_gather@inter > decompress > all_gather@intra")
PLAN = Plan(
    (
        Bucket(("a", "b", "c"), (100, 50, 10), TOPK),
        Bucket(("d",), (10,), DENSE, element_type=ElementType.BF16),
        Bucket(("e", "f"), (40, 60), INT8, (0, 0)),
        Bucket(("e",), (60,), TOPK, (40,)),
    )
)

JOB = '''
"""Rows of tables, of which few have a gradient, and matrices of which every element has one."""
import torch
from torch import nn
import fxcomp

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(400, 8) for _ in range(3))
        self.matrices = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        for matrix in self.matrices:
            nn.init.zeros_(matrix.weight)

    def forward(self, batch):
        ids, targets = batch
        hidden = sum(table(ids) for table in self.tables)
        return sum(((matrix(hidden) - target) ** 2).mean() for matrix, target in zip(self.matrices, targets))

def next_batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.arange(32)  # the same rows in every batch
    targets = torch.linspace(-1, 1, 8).expand(2, 32, 8) + 0.05 * torch.randn(2, 32, 8, generator=generator)
    return ids, targets

def loss_fn(model, batch):
    return model(batch)

def job():
    torch.manual_seed(0)
    model = Model()
    return fxcomp.Job(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.3), next_batch(0, 0),
                      next_batch=next_batch)
'''
"""Top-k of a tenth keeps all of a table's gradient (32 of 400 rows), and little of a matrix's."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(JOB)
    return "train.py"


def searched(*words: str) -> tuple[int, str]:
    """Run the command in a process of its own, which joins no group; returns its status and what it printed."""
    return run_alone(_search, words)


def _search(words: tuple[str, ...]) -> tuple[int, str]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(["bisect", *words])
    return status, out.getvalue()


def plan_of(compressed: dict[str, str]) -> str:
    """Save a plan of the job in which these tensors are compressed."""
    sizes = {f"tables.{k}.weight": 3200 for k in range(3)} | {f"matrices.{k}.weight": 64 for k in range(2)}
    order = ["matrices.1.weight", "tables.0.weight", "tables.1.weight", "tables.2.weight", "matrices.0.weight"]
    buckets = [
        Bucket((name,), (sizes[name],), Strategy.parse(compressed[name]) if name in compressed else DENSE)
        for name in order
    ]
    Plan(tuple(buckets)).save("plan.json")
    return "./plan.json"


SPARSE = "compress(topk(0.1)) > all_gather@world > decompress"
TABLES = {f"tables.{k}.weight": SPARSE for k in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize("guilty", [("matrices.0.weight",), ("matrices.0.weight", "matrices.1.weight")])
def test_planted_tensors_are_named_and_no_other_one(guilty: tuple[str, ...], job: str):
    plan = plan_of({**TABLES, **dict.fromkeys(guilty, SPARSE)})
    options = ("--compress", plan, "--steps", "12", "--seeds", "3", "--save-plan", "mended.json", "--json")
    status, out = searched(job, *options)
    assert status == 0, out
    found = json.loads(out[out.index("{") :])
    assert found["verdict"] == "guilty"
    assert sorted(name for each in found["guilty"] for name in each["names"]) == sorted(guilty)
    assert found["rest"]["cost"] <= found["rest"]["noise"]
    assert all(each["cost"] > each["noise"] for each in found["guilty"])
    assert found["more_bytes"] > 0
    mended = Plan.load("mended.json")
    assert compressed_names(mended) == list(TABLES)


@pytest.mark.slow
def test_tables_alone_cost_nothing(job: str):
    status, out = searched(job, "--compress", plan_of(TABLES), "--steps", "12", "--seeds", "2")
    assert status == 0, out
    assert "Compression costs the loss nothing that 2 seeds of 12 steps could tell" in out


def test_a_plan_without_compression_has_nothing_to_search(job: str):
    status, out = searched(job, "--compress", "dense", "--json")
    assert status == 0, out
    assert json.loads(out[out.index("{") :])["verdict"] == "dense"


@pytest.mark.slow
def test_trainings_begin_from_a_checkpoint(job: str):
    """From a model that has learned, a first step has little to lose."""
    torch.save({"tables.0.weight": torch.zeros(1)}, "bad.pt")
    status, out = searched(job, "--compress", plan_of(TABLES), "--checkpoint", "bad.pt", "--steps", "1", "--seeds", "2")
    assert status == 2
    assert "--checkpoint" in out
    assert "does not fit the job" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seeds", "1"), "--seeds are 2 or more, because one training has no noise; it is 1"),
        (("--steps", "0"), "--steps is a number of steps, from 1; it is 0"),
        (("--cluster", "8x4"), "bisect trains on ranks of this machine, 2 to 8; the cluster has 32"),
        (("--checkpoint", "none.pt"), "--checkpoint: there is no file none.pt"),
    ],
)
def test_a_mistake_is_told(options: tuple[str, ...], said: str, job: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bisect", job, *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("job")
def test_a_job_of_one_batch_is_refused(capsys: pytest.CaptureFixture[str]):
    Path("one.py").write_text(JOB.replace("next_batch=next_batch)", ")"))
    assert main(["bisect", "one.py"]) == 2
    assert "has one batch, and bisect trains on many" in capsys.readouterr().err


def test_tensors_go_dense_and_the_rest_stays():
    plan = partly_dense(PLAN, ["b", "e"])
    assert [(each.names, each.starts) for each in plan.buckets] == [
        (("b",), (0,)),
        (("a", "c"), (0, 0)),
        (("d",), (0,)),
        (("e",), (0,)),
        (("f",), (0,)),
        (("e",), (40,)),
    ]
    assert [each.strategy.is_dense for each in plan.buckets] == [True, False, True, True, False, True]
    assert plan.buckets[3].strategy == INT8.uncompressed
    assert (plan.sizes, plan.types) == (PLAN.sizes, PLAN.types)
    assert compressed_names(PLAN) == ["a", "b", "c", "e", "f"]
    assert compressed_names(plan) == ["a", "c", "f"]
    assert partly_dense(PLAN, []) == PLAN
    assert partly_dense(PLAN, compressed_names(PLAN)).is_dense


def test_a_tensor_at_the_momentum_goes_dense_at_the_gradient_with_all_its_parts():
    moved = PLAN.at_momenta()
    plan = partly_dense(moved, ["e"])
    assert {each.at for each in plan.buckets if "e" in each.names} == {ExchangePoint.GRADIENT}
    with pytest.raises(BadPlan):
        Plan((*plan.buckets[:-1], moved.buckets[-1]))


def result_of(costs: dict[str, float], given: str | None, seeds: int = 3) -> Result:
    from helpers.explained import by_hand

    explained = by_hand()
    names = compressed_names(explained.plan)

    def train(compressed: Any, seed: int) -> float:
        return 2.0 + 0.1 * seed + sum(cost for name, cost in costs.items() if name in compressed)

    return Result(explained, Search(names, train, seeds).run(), 20, seeds, given, "'balanced'")


def test_a_result_says_what_to_write_and_what_it_costs():
    guilty = compressed_names(result_of({}, None).explanation.plan)[0]
    chosen, given = result_of({guilty: 0.5}, None), result_of({guilty: 0.5}, "topk(0.01)")
    assert chosen.line == f"fxcomp.Compress(within='balanced', pins={{{guilty!r}: 'dense'}})"
    assert given.line == "fxcomp.Compress(plan='mended.json')"
    plan, sent = chosen.explanation.plan, chosen.explanation.sent_bytes
    dense = partly_dense(plan, compressed_names(plan))
    assert chosen.more_bytes([]) == 0.0
    assert chosen.more_bytes(compressed_names(plan)) == sum(map(sent, dense.buckets)) - sum(map(sent, plan.buckets))
    text = sections_to_text(headline(chosen), sections_of(chosen))
    assert f"Compression of {guilty} costs the loss, over 3 seeds of 20 steps." in text
    assert "24 %" in text
    assert "With them dense, the rest of the plan costs 0 %, noise " in text
    assert to_json(chosen)["guilty"][0]["share"] == pytest.approx(1.0)


def test_a_result_without_guilt_has_no_line():
    result = result_of({}, None)
    assert (result.line, result.names) == ("", [])
    assert to_json(result)["verdict"] == "noise"


def test_guilt_that_is_everywhere_is_told_so():
    names = compressed_names(result_of({}, None).explanation.plan)
    whole = result_of({}, None)

    def train(compressed: Any, seed: int) -> float:
        return 2.0 + 0.1 * seed + (0.5 if len(compressed) == len(names) else 0.0)

    spread = Result(whole.explanation, Search(names, train, 3).run(), 20, 3, None, "'balanced'")
    assert spread.is_spread
    assert spread.line == 'compress="lossless"'
    assert to_json(spread)["verdict"] == "spread"
    assert "by no part of the plan alone" in headline(spread)
