"""Mutated files are refused by name, or usable; `benchmarks/hostile_files.py` runs 100,000 mutations of each kind."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.books import CLUSTERS, SIZES, Job
from hostile.kinds import CachedTables, Clusters, CostTables, ErrorTables, Kind, Logs, Plans, Reports
from hostile.mutate import mutated
from hostile_files import Trial

from fxcomp import compat
from fxcomp.errors import BadOption, BadPlan, BadState, FxcompError
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.state.checkpoint import states_of, to_tensors
from fxcomp.state.checksums import sealed
from fxcomp.state.fields import PLAN

COUNTS = {Plans: 120, CostTables: 60, CachedTables: 20, Clusters: 60, ErrorTables: 20, Logs: 20, Reports: 60}


@pytest.mark.filterwarnings("ignore:cannot read the cost table")
@pytest.mark.parametrize("kind", COUNTS, ids=lambda kind: kind.name)
def test_mutated_files_are_refused_by_name_or_usable(kind: type[Kind], tmp_path: Path):
    trial = Trial(kind(), tmp_path, in_full=False)
    for number in range(COUNTS[kind]):
        error = trial.run(number)
        assert error is None, f"benchmarks/hostile_files.py --kinds {kind.name!r} --only {number}"
    assert trial.tally.accepted


# Saved states


def job_with_states() -> Job:
    plan = Plan((Bucket(tuple(SIZES), tuple(SIZES.values()), Strategy.parse(f"{AGREES}compress({C}) > {REDUCE}")),))
    return Job(CLUSTERS[1, 2], plan)


C, REDUCE = "powersgd(2)", "all_reduce@world > decompress"
AGREES = f"propose({C}) > all_reduce@world > "


def saved() -> dict[str, Any]:
    job = job_with_states()
    calendar = {"patience": 1, "patient_until": 0, "begins": 0, "is_settled": True}
    generators = {"cpu": torch.get_rng_state()}
    more = {PLAN: job.plan.to_json(), "calendar": calendar, "generators": generators, "scale of the loss": 1.0}
    return {**job.saved()[0], **more, "thaws": 1, "freezes_at": 3, "momenta": ["a"]}


def test_mutated_states_are_refused_by_name_or_loaded():
    state, job = saved(), job_with_states()
    other, loaded = job.saved()[1], list[bool]()
    for number in range(150):
        data, _ = mutated(state, random.Random(number))
        with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError):  # what no file can hold
            data = sealed(data)
            data = to_tensors(data, 0) if number % 3 == 0 else data
        try:
            job.load([states_of(data), other])
            loaded.append(True)
        except FxcompError:
            loaded.append(False)
    assert 10 < sum(loaded) < len(loaded) - 10


PARTS = "compressors", "a", 0
SLICE = "residuals", "a", 0

WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("steps",), "3", "steps must be a whole number"),
    (("steps",), True, "steps must be a whole number"),
    (("ranks",), 2**62, "ranks must be a whole number from 1 to"),
    (("learning_rates",), {"0": math.nan}, "learning_rates.0 must be a number"),
    (("learning_rates",), {"1" * 5000: 0.1}, "must be a whole number"),
    (("scale of the loss",), 0.0, "scale of the loss'?.* must be a number"),
    (("scale of the loss",), [1.0], "scale of the loss'?.* must be a number"),
    (("calendar",), [], "calendar must be an object"),
    (("calendar", "begins"), 10**6, "its warm-up begins later"),
    (("calendar", "begins"), -1, "calendar.begins must be a whole number"),
    (("calendar", "patience"), "soon", "calendar.patience must be a whole number"),
    (("thaws",), 2**40, "thaws must be a whole number from 0 to 64"),
    (("freezes_at",), 0.5, "freezes_at must be a whole number"),
    (("momenta",), 3.0, "momenta must be a list"),
    (("generators",), 3, "generators must be an object"),
    (("generators", "cpu"), torch.zeros(3, dtype=torch.uint8), "must be the state of a random generator"),
    ((*PARTS, "state"), torch.zeros(1), r"compressors.a\[0\].state must be"),
    ((*PARTS, "state"), 5, r"compressors.a\[0\].state must be a flat tensor"),
    (PARTS[:2], 5, "compressors.a must be a list"),
    ((*SLICE, "values"), torch.zeros(3, 10), r"residuals.a\[0\].values must be a flat tensor"),
    ((*SLICE, "values"), torch.zeros(30, dtype=torch.int64), "must be a tensor of floating-point values"),
    ((*SLICE, "values"), torch.zeros(1).expand(1 << 28), "checksum is wrong"),  # 1 GB, from four bytes
    ((*SLICE, "start"), 2**70, r"residuals.a\[0\].start must be a whole number"),
    ((*SLICE, "place"), math.inf, r"residuals.a\[0\].place must be a whole number"),
    ((*SLICE, "weight"), [10**15, 1], r"residuals.a\[0\].weight must be a numerator"),
    ((PLAN,), {"version": 1, "buckets": [[]]}, "this is not a plan"),
    ((PLAN,), {"version": torch.ones(2), "buckets": []}, "this is not a plan"),
    ((PLAN,), {"version": 1, "buckets": [torch.zeros(3)]}, "this is not a plan"),
    ((PLAN,), {"version": 1, "buckets": [{"names": ["a"], "sizes": [8], "strategy": "x"}]}, "the state is not whole"),
    (("version",), torch.ones(2), "this state has version unknown"),
]


@pytest.mark.parametrize(("place", "value", "text"), WRONG, ids=lambda value: str(value)[:20])
def test_a_state_with_an_impossible_field_is_refused_by_the_name_of_the_field(place: Any, value: Any, text: str):
    state = copy.deepcopy(saved())
    holder: Any = state
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    with contextlib.suppress(ValueError):  # a state that fxcomp would not write
        state = sealed(state)
    with pytest.raises(BadState, match=text):
        states_of(state)


def nested(levels: int, copies: int) -> Any:
    """Return nested tuples, each of which holds the same one `copies` times."""
    return functools.reduce(lambda inner, _: (inner,) * copies, range(levels), 1)


ENDLESS: dict[str, tuple[str, Any]] = {
    "a tuple of 2^40": ("owed", nested(40, 2)),
    "a dictionary of one": ("owed", {"a": nested(40, 2)}),
    "a deep tuple": ("owed", nested(100_000, 1)),
    "a quantized tensor": ("owed", lambda: {"a": torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8)}),
    **{
        f"{field}, {kind}": (field, value)
        for field in ("version", "rank", "steps")
        for kind, value in {
            "2^40": nested(40, 2),
            "deep": nested(100_000, 1),
            "long": 10**5000,
            "-": -(10**5000),
        }.items()
    },
}


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.parametrize("endless", ENDLESS)
def test_a_value_that_has_no_text_or_would_end_the_process_is_refused(endless: str):
    field, value = ENDLESS[endless]
    value = value() if callable(value) else value
    with pytest.raises(BadState, match=r"checksum is wrong|this state has version") as error:
        states_of({**saved(), field: value})
    assert len(str(error.value)) < 300
    with pytest.raises(BadState, match=r"is not whole: \w+: about must be a flat tensor"):
        states_of({"rank0.about": value, "rank0.a": torch.ones(1)})


def test_lists_of_lists_are_read_to_a_depth():
    state, endless = sealed(saved()), list[Any]()
    endless.append(endless)
    assert states_of([[state], (state,)]) == [state, state]
    for given in (endless, nested(100_000, 1), nested(40, 2)):
        with pytest.raises(BadState, match="not a saved state: it is a"):
            states_of(given)


def test_a_name_with_a_number_beyond_every_rank_is_no_state():
    with pytest.raises(BadState, match="not a saved state"):
        states_of({f"rank{'1' * 5000}.about": torch.zeros(1)})


@pytest.mark.parametrize("about", [
    torch.zeros((), dtype=torch.uint8).expand(1 << 40), torch.zeros((), dtype=torch.uint8).expand(1 << 29),
    torch.zeros(3, 2, dtype=torch.uint8), torch.empty(4, dtype=torch.uint8, device="meta"), torch.rand(3),
    torch.zeros(1, 4).to_sparse(), torch.tensor(3),
], ids=lambda about: f"{about.layout} {list(about.shape)}")  # fmt: skip
def test_a_checkpoint_whose_text_is_no_flat_tensor_of_bytes_is_refused(about: torch.Tensor):
    with pytest.raises(BadState, match="checkpoint of rank 0 is not whole"):
        states_of({**to_tensors(sealed(saved())), "rank0.about": about})


def test_a_step_in_a_log_is_a_number_that_a_plot_can_place(tmp_path: Path):
    kind, path = Logs(), tmp_path / "run.jsonl"
    path.write_bytes(kind.write([{**line, "step": 1e308} for line in kind.samples[0]]))
    with pytest.raises(BadOption, match="'step' must be a whole number"):
        kind.read(path)
    path.write_bytes(kind.write([{**line, "plan": "\ud800"} for line in kind.samples[0]]))
    kind.use(kind.read(path), fully=False)


def test_a_bucket_has_sizes_that_a_memory_can_have():
    with pytest.raises(BadPlan, match="a bucket needs names and as many sizes"):
        Bucket(("a",), (2**63,), Strategy.parse("all_reduce@world"))


def test_an_error_with_half_a_character_reaches_the_other_ranks():
    store = dist.HashStore()
    assert compat.set_once(store, "cause", "it is \ud800") == compat.set_once(store, "cause", "other")


# Numbers too large to compute with


def test_an_oversubscription_is_a_number_that_a_bandwidth_can_be_divided_by(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    for number in (10**400, 1e300, 1e-300, -(10**400)):
        text = 'cluster = "4x2"\nintra = "nvlink4"\ninter = "1gbit"\n[rack]\nhosts = 2\noversubscription = '
        path.write_text(f"{text}{number}\n")
        with pytest.raises(BadOption, match="an oversubscription is above 0"):
            Clusters().read(path)


def test_a_report_with_numbers_beyond_floats_is_refused(tmp_path: Path):
    kind, path = Reports(), tmp_path / "report.json"
    (sample,) = kind.samples
    for change in ({"step_ms": {"chosen": 10**400}}, {"plan": {**sample["plan"], "loss": -(10**400)}}):
        path.write_bytes(kind.write({**sample, **change}))
        with pytest.raises(BadPlan, match="OverflowError"):
            kind.read(path)


@pytest.mark.parametrize("kind", [Plans, CostTables, ErrorTables, Reports], ids=lambda kind: kind.name)
def test_a_text_that_cannot_be_printed_is_refused(kind: type[Kind], tmp_path: Path):
    path = tmp_path / "file.json"
    path.write_bytes(kind().write({**kind().samples[0], "source": "\ud800"}))
    with pytest.raises((BadPlan, BadOption), match="surrogates not allowed"):
        kind().read(path)


def test_an_error_table_of_a_gradient_that_no_memory_holds_is_refused(tmp_path: Path):
    kind, path = ErrorTables(), tmp_path / "errors.json"
    for shape in ([10**400], [2**62, 4]):
        sample = copy.deepcopy(kind.samples[0])
        sample["rows"]["fc.bias"]["shape"] = shape
        path.write_bytes(kind.write(sample))
        with pytest.raises(BadOption, match="which cannot be"):
            kind.read(path)


def test_a_table_whose_errors_are_huge_can_be_planned_by(tmp_path: Path):
    kind, path = CostTables(), tmp_path / "costs.json"
    path.write_bytes(kind.write({**kind.samples[0], "error": 1e18, "compute_error": 1e18}))
    with np.errstate(all="raise"):
        kind.use(kind.read(path), fully=True)
