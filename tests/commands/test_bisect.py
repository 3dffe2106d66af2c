"""`fxcomp bisect` trains on ranks of this machine, and names the tensors that were planted as guilty."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.explained import by_hand
from helpers.ranks import run_alone, run_ranks

import fxcomp
from fxcomp.__main__ import main
from fxcomp.cluster.cluster import Cluster
from fxcomp.commands.bisect.mend import compressed_names, partly_dense
from fxcomp.commands.bisect.rank import Trainings
from fxcomp.commands.bisect.run import Result, headline, sections_of, to_json
from fxcomp.commands.bisect.search import Train, search
from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadPlan, FxcompError
from fxcomp.frontends.job import load_job
from fxcomp.plan.compress import BALANCED, Compress, Warmup
from fxcomp.plan.error_feedback import ErrorFeedback, UpdateKind
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
    assert "Compression costs the loss nothing that 2 seeds of 12 steps could show" in out


def test_a_plan_without_compression_has_nothing_to_search(job: str):
    status, out = searched(job, "--compress", "dense", "--json")
    assert status == 0, out
    assert json.loads(out[out.index("{") :])["verdict"] == "dense"


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_what_compile_step_refuses_is_searched_and_told():
    """Of a job that prints parts of lines, in a folder with a file that is named like a module of Python."""
    run_alone(int)  # the server of processes starts while there is no such file
    Path("glob.py").write_text("raise RuntimeError('this is no glob')")
    noisy = JOB.replace("SGD(model.parameters(), lr=0.3)", "AdamW(model.parameters(), lr=1e-3)")
    Path("noisy.py").write_text(noisy.replace("    generator =", "    print('.', end='', flush=True)\n    generator ="))
    options = ("--compress", "topk(0.01)", "--steps", "2", "--seeds", "2", "--least", "0.9")
    status, out = searched("noisy.py", *options)
    assert status == 0, out
    assert "compile_step refuses this plan, and bisect trains it to see: " in out
    assert "elements come through compressors such as topk(0.01)" in " ".join(out.split())
    assert "At most 18 trainings, about 1 minute, if one tensor is guilty; 14 more for each further one." in out


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_a_job_that_ends_its_process_is_told():
    Path("ends.py").write_text(
        JOB.replace("    generator =", "    import os; step > 0 and os._exit(0)\n    generator =")
    )
    status, out = searched("ends.py", "--compress", "topk(0.01)", "--steps", "3", "--seeds", "2")
    assert status == 2
    assert "the ranks have ended before the search did, without an error" in out


def trainings_of(job: str, trainings: list[tuple[int, int]], checkpoint: str | None, steps: int) -> list[Any]:
    """Train on this rank with so many compressed tensors from a seed each; returns losses, or the last one's error."""
    plan, cluster = Plan.load("./plan.json"), Cluster.parse("2x1, inter 10gbit, intra 10gbit")
    made = Trainings(job, plan, cluster, ErrorFeedback(), steps, 2, checkpoint, 0.0)
    found: list[Any] = []
    for compressed, seed in trainings:
        try:
            found.append(made.train(made.names[:compressed], seed))
        except FxcompError as error:
            found.append(str(error))
    return found


@pytest.mark.usefixtures("job")
def test_trainings_begin_from_a_checkpoint():
    """From a model that has learned, a training has less to lose; what does not fit is told."""
    plan_of(TABLES)
    job: Any = load_job("train.py")
    for step in range(80):
        job.loss_fn(job.model, job.batch_at(step, 0)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, "good.pt")
    torch.save({"tables.0.weight": torch.zeros(1)}, "bad.pt")
    scratch = run_ranks(2, trainings_of, "train.py", [(0, 0)], None, 2)
    trained = run_ranks(2, trainings_of, "train.py", [(0, 0)], "good.pt", 2)
    assert trained[0] == trained[1]
    assert trained[0][0] < 0.5 * scratch[0][0]
    refused = run_ranks(2, trainings_of, "train.py", [(0, 0)], "bad.pt", 2)
    assert all("--checkpoint bad.pt does not fit the job" in found[0] for found in refused)


@pytest.mark.usefixtures("job")
def test_seeds_and_ranks_draw_from_the_default_generator():
    """Of a job that seeds it itself, and whose batches do not know their step."""
    plan_of(TABLES)
    lines = {
        "torch.Generator().manual_seed(1000 * step + rank)": "None",
        "(step, rank):": "(step, rank):\n    seen(rank)",
    }
    text = JOB
    for old, new in lines.items():
        assert old in text
        text = text.replace(old, new)
    seen = "def seen(rank):\n    open(f'drawn{rank}', 'a').write(f'{torch.initial_seed()} ')\n\ndef next_batch"
    Path("drawn.py").write_text(text.replace("def next_batch", seen))
    found = run_ranks(2, trainings_of, "drawn.py", [(0, 0), (0, 1), (3, 0)], None, 1)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert all(isinstance(loss, float) for loss in found[0]), found
    drawn = [set(Path(f"drawn{rank}").read_text().split()) for rank in range(2)]
    assert drawn == [{"0", "2"}, {"0", "1", "3"}]  # 0: where the job itself draws its example


SHARED = {
    "parameters": ("from shared import model", "    model = Model()\n"),
    "batches": (
        "from shared import generator",
        "    generator = torch.Generator().manual_seed(1000 * step + rank)\n",
    ),
}


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("what", SHARED)
def test_what_lives_on_between_trainings_is_told(what: str):
    plan_of(TABLES)
    imports, old = SHARED[what]
    assert old in JOB
    model = JOB[JOB.index("import torch") : JOB.index("def next_batch")] + "\nmodel = Model()\n"
    Path("shared.py").write_text(model + "generator = torch.Generator().manual_seed(0)\n")
    Path("job.py").write_text(JOB.replace(old, "").replace("import fxcomp\n", f"import fxcomp\n{imports}\n"))
    for loss, error in run_ranks(2, trainings_of, "job.py", [(0, 0), (3, 0)], None, 2):
        assert isinstance(loss, float)
        assert f"two trainings of 'job.py' from seed 0 differ in their {what}" in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seeds", "1"), "--seeds are 2 or more, because one training has no noise; it is 1"),
        (("--steps", "0"), "--steps is a number of steps, from 1; it is 0"),
        (("--least", "1"), "--least is a share of the loss, from 0 to below 1, like 0.001; it is 1"),
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


def result_of(costs: dict[str, float], compress: Compress = BALANCED, seeds: int = 3, **changes: Any) -> Result:
    def train(compressed: Any, seed: int) -> float:
        return 2.0 + 0.1 * seed + sum(cost for name, cost in costs.items() if name in compressed)

    return result_by(train, compress, seeds, **changes)


def result_by(train: Train, compress: Compress = BALANCED, seeds: int = 3, **changes: Any) -> Result:
    explained = by_hand(**changes.pop("explained", {}))
    least = changes.get("least", 0.0)
    found = search(compressed_names(explained.plan), train, seeds, least)
    return Result(explained, found, compress, 20, seeds, **changes)


NAMES = compressed_names(by_hand().plan)
GUILTY, OTHER = NAMES[0], NAMES[1]


def evaluated(line: str) -> Compress:
    """Read a line as a user's program would."""
    return eval(line, {"fxcomp": fxcomp, "like": fxcomp.like})


def text_of(result: Result) -> str:
    return " ".join(sections_to_text(headline(result), sections_of(result)).split())


def test_a_result_says_the_cost_and_what_it_costs_to_mend():
    chosen = result_of({GUILTY: 0.5})
    plan, sent = chosen.explanation.plan, chosen.explanation.sent_bytes
    dense = partly_dense(plan, NAMES)
    assert chosen.more_bytes([]) == 0.0
    assert chosen.more_bytes(NAMES) == sum(map(sent, dense.buckets)) - sum(map(sent, plan.buckets))
    text = text_of(chosen)
    assert f"Compression costs the loss 24 %, over 3 seeds of 20 steps: by {GUILTY}." in text
    assert "With them dense, the rest of the plan costs 0 %, noise " in text
    assert "compile_step refuses" not in text
    assert to_json(chosen)["guilty"][0]["share"] == pytest.approx(1.0)


FEEDBACK = ErrorFeedback(scale_with_lr=True)
DENSE_ONE = {GUILTY: "dense"}
WAYS = {name: str(b.strategy) for b in by_hand().plan.buckets for name in b.names if not b.strategy.is_dense}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Compress(), Compress(pins=DENSE_ONE)),
        (Compress(within=0.05), Compress(within=0.05, pins=DENSE_ONE)),
        (Compress(within=fxcomp.like("topk(0.01)")), Compress(within=fxcomp.like("topk(0.01)"), pins=DENSE_ONE)),
        (
            Compress(measured=True, at="gradient", steps=900, warmup=Warmup(int8_steps=20), feedback=FEEDBACK),
            Compress(
                measured=True,
                at="gradient",
                steps=900,
                warmup=Warmup(int8_steps=20),
                feedback=FEEDBACK,
                pins=DENSE_ONE,
            ),
        ),
        (
            Compress(pins={GUILTY: "int8", "*": "int4", "*.bias": Strategy.flat(parse_compressor("bf16"))}),
            Compress(pins={"*": "int4", "*.bias": str(Strategy.flat(parse_compressor("bf16"))), **DENSE_ONE}),
        ),
        (Compress(pins={f"{GUILTY[:4]}*.weight": "int8"}), Compress(pins=DENSE_ONE)),
        (
            Compress(plan="int8", feedback=FEEDBACK),
            Compress(pins={"*": "dense", **dict.fromkeys(NAMES[1:], "int8")}, feedback=FEEDBACK),
        ),
        (Compress(plan="./plan.json"), Compress(pins={"*": "dense", **{name: WAYS[name] for name in NAMES[1:]}})),
    ],
)
def test_the_line_to_write_is_the_users_own_with_what_is_dense(given: Compress, expected: Compress):
    line = result_of({GUILTY: 0.5}, given).line
    found = evaluated(line)
    assert found == expected, line
    assert [*found.pins] == [*expected.pins], "the last that matches decides"
    assert not found.pins or found.pinned.check_names(dict.fromkeys(by_hand().plan.sizes, True)) is None
    deciding = found.pinned.rule_for(GUILTY)
    assert deciding is not None
    assert deciding.text == "dense"


def test_a_plan_that_was_saved_is_named():
    given = result_of({GUILTY: 0.5}, Compress(plan="topk(0.01)", feedback=FEEDBACK), saved="other.json")
    assert evaluated(given.line) == Compress(plan="other.json", feedback=FEEDBACK)
    assert "other.json holds this plan with those tensors dense." in text_of(given)
    chosen = result_of({GUILTY: 0.5}, saved="other.json")
    assert evaluated(chosen.line) == Compress(pins=DENSE_ONE)
    assert "other.json holds" in text_of(chosen)


def test_a_plan_that_pins_cannot_say_is_offered_for_saving():
    buckets = by_hand().plan.buckets
    (name,), (size,) = buckets[-1].names, buckets[-1].sizes
    parts = Bucket((name,), (size // 2,), TOPK, (0,)), Bucket((name,), (size // 2,), buckets[0].strategy, (size // 2,))
    plan = Plan((*buckets[:-1], *parts))
    result = result_of({GUILTY: 0.5}, Compress(plan=plan), explained={"plan": plan})
    assert (result.line, to_json(result)["line"]) == ("", None)
    assert "No pins express it: search again with --save-plan FILE" in text_of(result)


def test_the_line_allows_what_is_refused_with_those_tensors_dense():
    text = "compress(topk(0.01))@gpu > all_gather@world > decompress@gpu"
    buckets = [Bucket((name,), (size,), Strategy.parse(text)) for name, size in by_hand().plan.sizes.items()]
    explained = {"plan": Plan(tuple(buckets))}
    kinds = (UpdateKind.SECOND_MOMENT,)
    result = result_of({GUILTY: 0.5}, Compress(plan=text), explained=explained, kinds=kinds)
    assert evaluated(result.line).feedback == ErrorFeedback(allow_diverging=True)
    assert "compile_step refuses this plan, and bisect trains it to see: " in text_of(result)
    assert "compile_step refuses the rest, too" in text_of(result)
    assert "elements come through compressors such as topk" in to_json(result)["refused"]


def test_a_result_without_guilt_has_no_line():
    result = result_of({})
    assert (result.line, result.names) == ("", [])
    assert to_json(result)["verdict"] == "noise"


def test_a_cost_up_to_the_least_is_told():
    result = result_of({GUILTY: 0.001}, least=0.001)
    assert text_of(result).startswith(
        "Compression costs the loss 0.048 % over 3 seeds of 20 steps, up to --least 0.1 %: nothing is searched."
    )
    assert (to_json(result)["verdict"], result.line) == ("small", "")


def test_guilt_that_is_everywhere_is_told_so():
    def train(compressed: Any, seed: int) -> float:
        return 2.0 + 0.1 * seed + (0.5 if len(compressed) == len(NAMES) else 0.0)

    spread = result_by(train, Compress(pins={"*": "int8"}))
    assert spread.is_spread
    assert evaluated(spread.line) == Compress(within="lossless")
    assert to_json(spread)["verdict"] == "spread"
    assert "by no part of the plan alone" in headline(spread)


def test_tensors_that_are_all_guilty_singly_are_not_everywhere():
    result = result_of(dict.fromkeys(NAMES, 0.5))
    assert (result.names, result.is_spread, to_json(result)["verdict"]) == (NAMES, False, "guilty")
    assert f"by {GUILTY} and {len(NAMES) - 1} more." in headline(result)
    assert evaluated(result.line) == Compress(pins=dict.fromkeys(NAMES, "dense"))
    given = result_of(dict.fromkeys(NAMES, 0.5), Compress(plan="int8", feedback=FEEDBACK))
    assert evaluated(given.line) == Compress(plan="dense", feedback=FEEDBACK)
    assert "these pins" not in text_of(given)


def test_the_only_compressed_tensor_is_named():
    plan = partly_dense(by_hand().plan, NAMES[1:])
    result = result_of({GUILTY: 0.5}, explained={"plan": plan})
    assert (result.names, result.is_spread) == ([GUILTY], False)
    assert headline(result).endswith(f"by {GUILTY}.")
    assert evaluated(result.line) == Compress(pins=DENSE_ONE)


def test_seeds_that_diverge_are_counted():
    def train(compressed: Any, seed: int) -> float:
        return math.nan if len(compressed) == len(NAMES) and seed == 1 else 2.0 + 0.1 * seed

    one = result_by(train, seeds=4)
    assert headline(one).startswith("1 seed diverges of 4, too few to name a tensor.")
    assert "1 of 4 diverge" in text_of(one)
    assert to_json(one)["in_all"]["diverging"] == 1
    every = result_by(lambda compressed, seed: math.inf if GUILTY in compressed else 2.0 + 0.1 * seed)
    assert headline(every) == f"Compression makes the training diverge, over 3 seeds of 20 steps: by {GUILTY}."
    assert to_json(every)["in_all"] == {"cost": None, "noise": 1e-4, "diverging": 3}
